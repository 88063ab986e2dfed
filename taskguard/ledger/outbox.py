"""Works whose calls are stored: written as NEW in the user's transaction, and found when overdue.

Guarantees: what `write` wrote stands or falls with the user's transaction; a work is overdue from
the moment on that its holder's lease, or the time its message was given, has passed, until
somebody claims it, ends it or says that its message was sent again. Reading what is overdue locks
nothing, and saying that it was sent again locks one batch for one statement.

Does not send anything: `taskguard/sweep.py` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from taskguard.ledger.base import ClaimRequest, MessageRef
from taskguard.ledger.database import Database
from taskguard.ledger.tables import FREE, MESSAGES, WORKS
from taskguard.states import State

__all__ = ["Overdue", "overdue", "sent", "write"]

_OPEN = (State.NEW.value, State.PROCESSING.value)


@dataclass(frozen=True, slots=True)
class Overdue:
    """A work that nobody seems to be at.

    Attributes:
        work: its id.
        task: the task's name.
        message: its message, with the highest numbers that are known: a copy with lower ones
            would be superseded.
        call: how the message is sent again, as JSON text.
        due_us: since when it is overdue, by the database's clock.
    """

    work: str
    task: str
    message: MessageRef
    call: str
    due_us: int


def write(database: Database, db: sa.Connection, request: ClaimRequest, *, due_in_s: float) -> None:
    """The work as NEW, in the transaction of `db`. One that is known stays, unless it failed."""
    now = database.now()
    due = now + int(due_in_s * 1e6)
    fresh = {
        "message": request.message.id,
        "retries": request.message.retries,
        "state": State.NEW.value,
        "lease_until": 0,
        "owner": FREE,
        "fingerprint": request.fingerprint,
        "call": request.call,
        "due": due,
        "error": None,
        "finished": None,
    }
    db.execute(
        database.dialect.insert_missing(
            WORKS,
            id=request.work,
            task=request.task,
            key=",".join(request.keys),
            final=0,
            fence=0,
            attempts=0,
            crashes=0,
            crashed_owner="",
            created=now,
            **fresh,
        )
    )
    failed = sa.and_(WORKS.c.state == State.FAILED.value, WORKS.c.final == 0)
    db.execute(sa.update(WORKS).where(WORKS.c.id == request.work, failed).values(**fresh))


def overdue(
    database: Database, *, limit: int, after: Overdue | None = None, work: str | None = None
) -> list[Overdue]:
    """At most `limit` works that are overdue, the longest overdue first, those after `after`.

    `work` asks for one, whenever it is due.
    """
    with database.transaction() as db:
        select = (
            sa.select(WORKS, MESSAGES.c.retries.label("last_retries"), MESSAGES.c.copy)
            .outerjoin_from(WORKS, MESSAGES, MESSAGES.c.message == WORKS.c.message)
            .where(WORKS.c.due.is_not(None), WORKS.c.call.is_not(None), WORKS.c.state.in_(_OPEN))
        )
        if work is None:
            select = select.where(WORKS.c.due <= database.now_us(db))
        else:
            select = select.where(WORKS.c.id == work)
        if after is not None:
            place = sa.tuple_(WORKS.c.due, WORKS.c.id)
            select = select.where(place > sa.tuple_(after.due_us, after.work))
        rows = db.execute(select.order_by(WORKS.c.due, WORKS.c.id).limit(limit)).all()
    return [_overdue(row) for row in rows]


def _overdue(row: Any) -> Overdue:
    recorded = (0, 0) if row.copy is None else (row.last_retries, row.copy)
    retries, copy = max((row.retries, 0), recorded)
    return Overdue(row.id, row.task, MessageRef(row.message, retries, copy), row.call, row.due)


def sent(database: Database, works: Sequence[Overdue], *, again_after_s: float) -> int:
    """Their messages were sent again: they are overdue again after so long. Returns how many.

    One that was claimed or ended meanwhile is left: it says itself when it is due.
    """
    dues = {work.due_us for work in works}
    with database.transaction(lock_timeout_s=database.lock_timeout_s) as db:
        again = database.now_us(db) + int(again_after_s * 1e6)
        changed = db.execute(
            sa.update(WORKS)
            .where(
                WORKS.c.id.in_([work.work for work in works]),
                WORKS.c.due.in_(dues),
                WORKS.c.state.in_(_OPEN),
            )
            .values(due=again)
        )
        return int(changed.rowcount)
