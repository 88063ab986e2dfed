"""The line of messages that supersede each other, and the row that names the newest of them.

In addition to the row of the key, each task has a row in the same table: its `NewestRow`. No
delivery holds it. It names the newest message that has begun: when it was sent (`stamp`), its work
(`owner`), and its fence. If the key has the same fence, that work holds the key. A transaction that
claims, or changes the line, locks the key, then this row, then work.

Guarantees: the row outlives the run, so an older message is superseded however late it arrives.
Its stamp never decreases. At most one work of the task waits. Work that is superseded while it
waits becomes FAILED, final, with the reason. Its message was acknowledged, so it is sent again to
notify its caller. Until it has arrived, its call is overdue (`outbox.py`). Every database uses the
portable statements for this.

The row is purged by its fence, as keys are. Older messages are refused by then (`retention_s`).
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from taskguard.keys import shorten
from taskguard.ledger.connections.database import WRITE_LOCK_S, Database
from taskguard.ledger.history import NO_FLAG
from taskguard.ledger.lines import states
from taskguard.ledger.lines.park import is_on_record, may_wait, position_of
from taskguard.ledger.lines.promotion import to_send
from taskguard.ledger.records import expiry_of, new_record, overdue_of, waiting_values
from taskguard.ledger.tables import FREE, KEYS, NO_POSITION, WORK
from taskguard.model.claims import Answer, ClaimRequest, Overdue, ParkedNewest
from taskguard.model.line_states import LineState
from taskguard.model.states import OUTDATED, Decision, State, is_outdated, sent_at_us

__all__ = [
    "NOTIFIED",
    "Line",
    "NewestRow",
    "end",
    "note_notified",
    "outdated_values",
    "park",
    "row_id",
    "row_id_of",
]

NOTIFIED = {"due": None, "call": None, "sends": None, **NO_POSITION}
"""The columns of superseded work whose caller was notified."""

# How long the message that notifies the caller of superseded work is expected.
_NOTIFIED_S = 5.0


def row_id_of(request: ClaimRequest) -> str:
    """Return the id of the `NewestRow` of a request."""
    return row_id(request.keys[0], request.task)


def row_id(key: str, task: str) -> str:
    """Return the id of a `NewestRow`. No key equals it, because no key contains a blank."""
    return shorten(f"{key}#newest {task}", limit_bytes=500)


def note_notified(database: Database, work: str) -> None:
    """Note that the caller of superseded work is notified: its message is not sent again."""
    not_notified = WORK.c.line == LineState.SUPERSEDED.value
    with database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
        db.execute(sa.update(WORK).where(WORK.c.id == work, not_notified).values(**NOTIFIED))


class NewestRow:
    """The row of the newest message of a task and a key, locked."""

    def __init__(self, database: Database, db: sa.Connection, request: ClaimRequest) -> None:
        self._db = db
        self._key = row_id_of(request)
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
        """Record this work as the newest that has begun."""
        self._db.execute(
            sa.update(KEYS)
            .where(KEYS.c.key == self._key, KEYS.c.fence == self.fence, KEYS.c.owner == self.work)
            .values(fence=fence, owner=work, stamp=stamp_us)
        )


class Line:
    """The other work of one task that waits for the key. Its `NewestRow` is locked."""

    def __init__(self, db: sa.Connection, request: ClaimRequest, now_us: int) -> None:
        self._db = db
        self._now_us = now_us
        self._others = sa.and_(
            WORK.c.key == request.keys[0],
            WORK.c.task == request.task,
            WORK.c.id != request.work,
            states.is_in_line(WORK),
        )

    def newest(self) -> Any:
        """Return the newest other work: its id, and when it was sent. None: no other work waits."""
        newest = sa.select(WORK.c.id, WORK.c.parked).where(self._others)
        return self._db.execute(newest.order_by(WORK.c.parked.desc()).limit(1)).first()

    def replace(self, by: str) -> tuple[Overdue, ...]:
        """Move the others NEW -> FAILED, final. Return the messages that notify their callers.

        If a message was promoted, it is on its way already, and is not returned.
        """
        rows = sa.select(WORK.c.id, WORK.c.line, WORK.c.due).where(self._others).order_by(WORK.c.id)
        found = self._db.execute(rows.with_for_update()).all()
        expected_us = self._now_us + int(_NOTIFIED_S * 1e6)
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
        return tuple(overdue_of(to_send(self._db, work)) for work in waited)


def outdated_values(by: str, now_us: int) -> dict[str, object]:
    """Return the columns of work that a newer message superseded; `by` is the newer work."""
    return {
        "state": State.FAILED.value,
        "final": 1,
        "owner": FREE,
        "lease_until": 0,
        "error": f"{OUTDATED}: {by}",
        **NO_FLAG,
        "finished": now_us,
    }


def end(
    db: sa.Connection, request: ClaimRequest, row: Any, *, by: str, now_us: int, created_us: int
) -> Answer:
    """End the request's own work, which no delivery holds, as superseded.

    `row` is its record, locked, or None.
    """
    ended = {**outdated_values(by, now_us), **NOTIFIED}
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

    Return None if the work may not wait. With `only_new`, return None also if the work or its
    message is on record.
    """
    with database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
        if only_new and is_on_record(db, request):
            return None
        newest_row = NewestRow(database, db, request)
        row = db.execute(sa.select(WORK).where(WORK.c.id == request.work).with_for_update()).first()
        now_us = database.now_us(db)
        if row is not None and not may_wait(row, request):
            return None
        created_us = now_us if row is None else row.created
        sent_us = sent_at_us(request.sent_us, created_us=created_us)
        line = Line(db, request, now_us)
        waits = line.newest()
        others = [newest_row.stamp_us, None if waits is None else waits.parked]
        if is_outdated(sent_us, others_us=others):
            by = newest_row.work if waits is None else waits.id
            return end(db, request, row, by=by, now_us=now_us, created_us=created_us)
        position = position_of(request, created_us, LineState.WAITING)
        values = {**waiting_values(request, due=None), **position}
        if row is None:
            db.execute(sa.insert(WORK).values(new_record(request, created_us=now_us, **values)))
        else:
            same = WORK.c.state == row.state, WORK.c.fence == row.fence, WORK.c.owner == row.owner
            values["expires"] = expiry_of(row, request)
            db.execute(sa.update(WORK).where(WORK.c.id == row.id, *same).values(**values))
        return ParkedNewest(line.replace(by=str(request.work)))
