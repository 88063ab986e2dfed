"""Decides whether work has to wait for other work of its line.

Does not guarantee that no delivery overtakes: a claim that does not look at the line may do so.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from taskguard.ledger.lines import states
from taskguard.ledger.tables import WORK
from taskguard.model.claims import ClaimRequest
from taskguard.model.line_states import LineState
from taskguard.model.states import State

__all__ = ["is_behind", "is_held_up"]

# The position of work that is in no line: last within its rank.
_LAST = 2**63 - 1


def is_behind(
    db: sa.Connection,
    request: ClaimRequest,
    now_us: int,
    *,
    room: int = 1,
    but: str | None = None,
) -> bool:
    """Return True if work that goes before this work waits for the key, or has not ended.

    No work goes before work that has begun: its holder is gone, and this claim takes it over. A
    position in line belongs to one message. Another message of the same work goes behind it, until
    the first message was late and sent again.

    Args:
        db: the claim's transaction.
        request: the request of the claim.
        now_us: the database's clock.
        room: how many deliveries the key has room for. Promoted messages may use some of it.
        but: a task whose work does not count.
    """
    columns = WORK.c.state, WORK.c.message, WORK.c.rank, WORK.c.parked, WORK.c.line
    sent_again = states.sent_again(WORK).label("sent_again")
    ids = (str(request.work), *request.formerly)
    records = db.execute(sa.select(*columns, sent_again).where(WORK.c.id.in_(ids))).all()
    if any(mine.state == State.PROCESSING.value for mine in records):
        return False
    positions = []
    for mine in records:
        if mine.line is None:
            continue
        if mine.message == request.message.name:
            positions.append((mine.rank, mine.parked))
        elif mine.state == State.NEW.value and not mine.sent_again:
            return True  # no other delivery would answer that message
    rank, parked = min(positions, default=(request.rank, _LAST))
    line = WORK.c.key.in_(request.lines) if request.formerly else WORK.c.key == request.line
    blocks = sa.or_(states.waits(WORK), states.keeps(WORK), states.expected(WORK, now_us))
    before = [line, states.before(rank, parked), blocks]
    if request.formerly:
        before.append(WORK.c.id.not_in(ids))
    if but is not None:
        before.append(WORK.c.task != but)
    # In order, because the first one is mostly a message that waits.
    first = sa.select(WORK.c.line).where(*before).order_by(WORK.c.rank, WORK.c.parked).limit(room)
    found = db.execute(first).scalars().all()
    return LineState.WAITING in found or len(found) >= room


def is_held_up(db: sa.Connection, key: str, first: Any) -> bool:
    """Return True if strict work before the first waiting message has still to end."""
    kept = WORK.c.key == key, states.keeps(WORK), states.before(first.rank, first.parked)
    return db.execute(sa.select(sa.literal(1)).where(*kept).limit(1)).first() is not None
