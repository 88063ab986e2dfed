"""The mark and the line of messages of which the newest takes the others' position.

Beside the row of the key is the task's mark, a row of the same table that nobody holds: when
the newest message that has begun was sent (`stamp`), which work that was (`owner`), and with which
fence. So a key whose fence is the mark's is held by that very work. A transaction that changes the
line, or claims, has the mark locked, after the key and before any work.

Guarantees: the mark outlives the run, so that what was sent before is superseded however late it
comes; no stamp of it goes back; at most one work of the task waits. Work whose position was taken
while it waited ends: FAILED, final, with the reason. Its message, which was acknowledged, is to be
sent again, so that its caller hears of it; until that has come its call is overdue (`outbox.py`).
All of that is by the portable statements, on every database.

A mark is purged as keys are, by its fence: messages older than that are refused (`retention_s`).
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from taskguard.keys import shorten
from taskguard.ledger.connections.database import WRITE_LOCK_S, Database
from taskguard.ledger.lines import states
from taskguard.ledger.lines.park import is_on_record, may_wait, place_of
from taskguard.ledger.lines.promotion import called
from taskguard.ledger.records import expiry_of, new_record, overdue_of, waiting_values
from taskguard.ledger.tables import FREE, KEYS, NO_PLACE, WORK
from taskguard.model.claims import Answer, ClaimRequest, Overdue, ParkedNewest
from taskguard.model.line_states import LineState
from taskguard.model.states import OUTDATED, Decision, State, is_outdated, sent_at_us

__all__ = ["TOLD", "Line", "Mark", "end", "mark_of", "outdated_values", "park", "told"]

TOLD = {"due": None, "call": None, "sends": None, **NO_PLACE}
"""The columns of superseded work whose caller is told."""

# So long after it was sent the message of work that was superseded while it waited is expected.
_TOLD_S = 5.0


def mark_of(request: ClaimRequest) -> str:
    """The key of the row that stands beside the request's key. No key has a blank in it."""
    return shorten(f"{request.keys[0]}#newest {request.task}", limit_bytes=500)


def told(database: Database, work: str) -> None:
    """The caller of work that was superseded is being told: its message is sent no more."""
    untold = WORK.c.line == LineState.SUPERSEDED.value
    with database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
        db.execute(sa.update(WORK).where(WORK.c.id == work, untold).values(**TOLD))


class Mark:
    """The mark of a task and a key, locked."""

    def __init__(self, database: Database, db: sa.Connection, request: ClaimRequest) -> None:
        self._db = db
        self._key = mark_of(request)
        select = sa.select(KEYS).where(KEYS.c.key == self._key).with_for_update()
        none = {"key": self._key, "fence": 0, "owner": FREE, "lease_until": 0}
        row = db.execute(select).first()
        while row is None:  # a purge may come between the two
            db.execute(database.dialect.insert_missing(KEYS, none))
            row = db.execute(select).first()
        self.fence: int = row.fence
        self.work: str = row.owner
        self.stamp_us: int | None = row.stamp

    def move(self, *, fence: int, work: str, stamp_us: int) -> None:
        """The newest that has begun is this one."""
        self._db.execute(
            sa.update(KEYS)
            .where(KEYS.c.key == self._key, KEYS.c.fence == self.fence, KEYS.c.owner == self.work)
            .values(fence=fence, owner=work, stamp=stamp_us)
        )


class Line:
    """Who waits for the key, of one task, while its mark is locked."""

    def __init__(self, db: sa.Connection, request: ClaimRequest, now_us: int) -> None:
        self._db = db
        self._now_us = now_us
        self._others = sa.and_(
            WORK.c.key == request.keys[0],
            WORK.c.task == request.task,
            WORK.c.id != request.work,
            states.stands(WORK),
        )

    def newest(self) -> Any:
        """The others' newest: its id and when it was sent; None: nobody else waits."""
        newest = sa.select(WORK.c.id, WORK.c.parked).where(self._others)
        return self._db.execute(newest.order_by(WORK.c.parked.desc()).limit(1)).first()

    def replace(self, by: str) -> tuple[Overdue, ...]:
        """NEW -> FAILED, final, for the others. What is to be sent, for their callers to be told.

        The message of who was called is on its way already.
        """
        rows = sa.select(WORK.c.id, WORK.c.line, WORK.c.due).where(self._others).order_by(WORK.c.id)
        found = self._db.execute(rows.with_for_update()).all()
        expected_us = self._now_us + int(_TOLD_S * 1e6)
        for row in found:
            self._db.execute(
                sa.update(WORK)
                .where(WORK.c.id == row.id, WORK.c.line == row.line)
                .values(
                    **outdated_values(by, self._now_us),
                    line=LineState.SUPERSEDED.value,
                    due=row.due or expected_us,
                )
            )
        waited = [row.id for row in found if row.line == LineState.WAITING]
        return tuple(overdue_of(called(self._db, work)) for work in waited)


def outdated_values(by: str, now_us: int) -> dict[str, object]:
    """The columns that say that a newer message took the work's place; `by` is its work."""
    return {
        "state": State.FAILED.value,
        "final": 1,
        "owner": FREE,
        "lease_until": 0,
        "error": f"{OUTDATED}: {by}",
        "finished": now_us,
    }


def end(
    db: sa.Connection, request: ClaimRequest, row: Any, *, by: str, now_us: int, created_us: int
) -> Answer:
    """The request's own work, which nobody is at, is superseded; `row` is locked, or None."""
    ended = {**outdated_values(by, now_us), **TOLD}
    if row is None:
        new = new_record(request, created_us=created_us, message=request.message.name)
        db.execute(sa.insert(WORK).values({**new, "retries": request.message.retries, **ended}))
    else:
        same = WORK.c.state == row.state, WORK.c.fence == row.fence, WORK.c.owner == row.owner
        db.execute(sa.update(WORK).where(WORK.c.id == row.id, *same).values(**ended))
    return Answer(Decision.OUTDATED, error=str(ended["error"]))


def park(
    database: Database, request: ClaimRequest, *, only_new: bool = False
) -> ParkedNewest | Answer | None:
    """Store the work with its call as the only one of its task that waits for its key.

    None if it is not to wait; with `only_new` also if it, or its message, is on record.
    """
    with database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
        if only_new and is_on_record(db, request):
            return None
        mark = Mark(database, db, request)
        row = db.execute(sa.select(WORK).where(WORK.c.id == request.work).with_for_update()).first()
        now_us = database.now_us(db)
        if row is not None and not may_wait(row, request):
            return None
        created_us = now_us if row is None else row.created
        sent_us = sent_at_us(request.sent_us, created_us=created_us)
        line = Line(db, request, now_us)
        waits = line.newest()
        others = [mark.stamp_us, None if waits is None else waits.parked]
        if is_outdated(sent_us, others_us=others):
            by = mark.work if waits is None else waits.id
            return end(db, request, row, by=by, now_us=now_us, created_us=created_us)
        place = place_of(request, created_us, LineState.WAITING)
        values = {**waiting_values(request, due=None), **place}
        if row is None:
            db.execute(sa.insert(WORK).values(new_record(request, created_us=now_us, **values)))
        else:
            same = WORK.c.state == row.state, WORK.c.fence == row.fence, WORK.c.owner == row.owner
            values["expires"] = expiry_of(row, request)
            db.execute(sa.update(WORK).where(WORK.c.id == row.id, *same).values(**values))
        return ParkedNewest(line.replace(by=str(request.work)))
