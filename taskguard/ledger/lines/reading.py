"""Reads of lines for people: which messages wait, and how many of each queue."""

from __future__ import annotations

import sqlalchemy as sa

from taskguard.ledger.connections.database import Database
from taskguard.ledger.lines import states
from taskguard.ledger.tables import KEYS, WORK
from taskguard.model.line_states import LineState
from taskguard.model.records import Waiting
from taskguard.model.states import State

__all__ = ["calls_in_line", "waiting"]

# How many characters of a stored call contain its queue, and its namespace.
_BEGIN_OF_CALL, _END_OF_CALL = 60, 300


def waiting(database: Database, key: str | None, *, limit: int) -> list[Waiting]:
    """Return the messages in the line of a key, or of all keys, in order."""
    columns = ("key", "id", "message", "parked", "line", "due", "state", "sends")
    failed = sa.and_(states.keeps(WORK), WORK.c.state == State.FAILED.value)
    held = sa.and_(KEYS.c.key == WORK.c.key, KEYS.c.lease_until > database.now())
    select = sa.select(*(WORK.c[name] for name in columns), KEYS.c.owner.label("owner"))
    select = select.select_from(WORK.outerjoin(KEYS, held))
    select = select.where(sa.or_(states.is_in_line(WORK), failed))
    select = select.order_by(WORK.c.key, *states.in_order(), WORK.c.id).limit(limit)
    if key is not None:
        select = select.where(WORK.c.key == key)
    first: dict[str, str] = {}
    with database.transaction(bounded=False) as db:
        return [
            Waiting(
                row.key,
                row.id,
                row.message,
                row.parked / 1e6,
                LineState(row.line),
                row.due and row.due / 1e6,
                failed=row.state == State.FAILED.value,
                sent_again=row.sends or 0,
                owner=(row.owner or "") if first.setdefault(row.key, row.id) == row.id else "",
            )
            for row in db.execute(select)
        ]


def calls_in_line(database: Database, *, most: int) -> list[tuple[str, str]]:
    """Return the beginning and the end of the calls of at most `most` messages in lines."""
    ends = sa.func.substr(WORK.c.call, sa.func.length(WORK.c.call) - _END_OF_CALL)
    select = sa.select(sa.func.substr(WORK.c.call, 1, _BEGIN_OF_CALL), ends)
    waits = WORK.c.parked.is_not(None), WORK.c.call.is_not(None)
    with database.transaction(bounded=False) as db:
        return [(begin, end) for begin, end in db.execute(select.where(*waits).limit(most))]
