"""Which work goes before other work of the line: a claim that looks finds whether it has to wait.

Does not guarantee that nothing overtakes: a claim that does not look at the line may do so.
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
    """Whether somebody who goes before this work waits for its key, or has not ended.

    Nobody goes before work that has begun: its holder is gone, and it is taken over. A place in the
    line is that of one message: another one of the same work stands behind it, until it was sent
    again. `room`: for how many the key is free; fewer may have been called. `but`: of this task
    nobody counts.
    """
    columns = WORK.c.state, WORK.c.message, WORK.c.rank, WORK.c.parked, WORK.c.line
    sent_again = states.sent_again(WORK).label("sent_again")
    ids = (str(request.work), *request.formerly)
    records = db.execute(sa.select(*columns, sent_again).where(WORK.c.id.in_(ids))).all()
    if any(mine.state == State.PROCESSING.value for mine in records):
        return False
    places = []
    for mine in records:
        if mine.line is None:
            continue
        if mine.message == request.message.name:
            places.append((mine.rank, mine.parked))
        elif mine.state == State.NEW.value and not mine.sent_again:
            return True  # nothing else would answer that message
    rank, place = min(places, default=(request.rank, _LAST))
    line = WORK.c.key.in_(request.lines) if request.formerly else WORK.c.key == request.line
    blocks = sa.or_(states.waits(WORK), states.keeps(WORK), states.expected(WORK, now_us))
    before = [line, states.before(rank, place), blocks]
    if request.formerly:
        before.append(WORK.c.id.not_in(ids))
    if but is not None:
        before.append(WORK.c.task != but)
    # In order, for the first is mostly one who waits.
    first = sa.select(WORK.c.line).where(*before).order_by(WORK.c.rank, WORK.c.parked).limit(room)
    found = db.execute(first).scalars().all()
    return LineState.WAITING in found or len(found) >= room


def is_held_up(db: sa.Connection, key: str, first: Any) -> bool:
    """Whether somebody before the first who waits keeps his place until his work has ended."""
    kept = WORK.c.key == key, states.keeps(WORK), states.before(first.rank, first.parked)
    return db.execute(sa.select(sa.literal(1)).where(*kept).limit(1)).first() is not None
