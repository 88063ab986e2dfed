"""Messages of one task and key of which a newer one takes an older one's place.

`busy="latest"`: one is at work, and one waits, the newest. `busy="supersede"`: a newer one takes
the key also from a holder that is alive. What is newer says `states.is_outdated()`, by when
messages were sent.

Beside the row of the key stands the task's mark, a row of the same table that nobody holds: when
the newest message that has begun was sent (`stamp`), which work that was (`owner`), and with which
fence. So a key whose fence is the mark's is held by that very work. Who changes the line, or
claims, has the mark locked, after the key and before any work.

Guarantees: the mark outlives the run, so that what was sent before is superseded however late it
comes; no stamp of it goes back; at most one work of the task waits. Who takes a key from another
raises its fence in the same transaction in which the other's work ends: FAILED, final, with the
reason. So does work whose place was taken while it waited. Its message, which was acknowledged, is
to be sent again, so that its caller hears of it; until that has come its call is overdue
(`outbox.py`). All of that is by the portable statements, on every database.

A mark is purged as keys are, by its fence: messages older than that are refused (`retention_s`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from taskguard.keys import shorten
from taskguard.ledger.connections.database import Database
from taskguard.ledger.decisions import CLAIMABLE
from taskguard.ledger.records import expiry_of, new_record, overdue_of, waiting_values
from taskguard.ledger.statements.claims import LockedClaim, decision_of
from taskguard.ledger.statements.lines import (
    WRITE_LOCK_S,
    called,
    is_behind,
    is_on_record,
    may_wait,
    place_of,
    stands,
)
from taskguard.ledger.tables import FREE, KEYS, NO_PLACE, WORK
from taskguard.model.claims import (
    Answer,
    Busy,
    ClaimAnswer,
    Claimed,
    ClaimRequest,
    Overdue,
    ParkedNewest,
)
from taskguard.model.lease import Owner
from taskguard.model.states import OUTDATED, Decision, State, is_outdated, sent_at_us

__all__ = ["NewestClaim", "mark_of", "park", "told"]

_TOLD = {"due": None, "call": None, **NO_PLACE}
# So long after it was sent the message of work that was superseded while it waited is expected.
_TOLD_S = 5.0


def mark_of(request: ClaimRequest) -> str:
    """The key of the row that stands beside the request's key. No key has a blank in it."""
    return shorten(f"{request.keys[0]}#newest {request.task}", limit_bytes=500)


def told(database: Database, work: str) -> None:
    """The caller of work that was superseded is being told: its message is sent no more."""
    untold = WORK.c.state == State.FAILED.value, WORK.c.final == 1, WORK.c.parked.is_not(None)
    with database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
        db.execute(sa.update(WORK).where(WORK.c.id == work, *untold).values(**_TOLD))


class _Mark:
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


class _Line:
    """Who waits for the key, of one task, while its mark is locked."""

    def __init__(self, db: sa.Connection, request: ClaimRequest, now_us: int) -> None:
        self._db = db
        self._now_us = now_us
        self._others = sa.and_(
            WORK.c.key == request.keys[0],
            WORK.c.task == request.task,
            WORK.c.id != request.work,
            stands(WORK),
        )

    def newest(self) -> Any:
        """The others' newest: its id and when it was sent; None: nobody else waits."""
        newest = sa.select(WORK.c.id, WORK.c.parked).where(self._others)
        return self._db.execute(newest.order_by(WORK.c.parked.desc()).limit(1)).first()

    def replace(self, by: str) -> tuple[Overdue, ...]:
        """NEW -> FAILED, final, for the others. What is to be sent, for their callers to be told.

        The message of who was called is on its way already.
        """
        rows = sa.select(WORK.c.id, WORK.c.due).where(self._others).order_by(WORK.c.id)
        found = self._db.execute(rows.with_for_update()).all()
        expected_us = self._now_us + int(_TOLD_S * 1e6)
        for row in found:
            self._db.execute(
                sa.update(WORK)
                .where(WORK.c.id == row.id, WORK.c.state == State.NEW.value)
                .values(**_outdated(by, self._now_us), due=row.due or expected_us)
            )
        return tuple(overdue_of(called(self._db, row.id)) for row in found if row.due is None)


def _outdated(by: str, now_us: int) -> dict[str, object]:
    """The columns that say that a newer message took the work's place; `by` is its work."""
    return {
        "state": State.FAILED.value,
        "final": 1,
        "owner": FREE,
        "lease_until": 0,
        "error": f"{OUTDATED}: {by}",
        "finished": now_us,
    }


def _end(
    db: sa.Connection, request: ClaimRequest, row: Any, *, by: str, now_us: int, created_us: int
) -> Answer:
    """The request's own work, which nobody is at, is superseded; `row` is locked, or None."""
    ended = {**_outdated(by, now_us), **_TOLD}
    if row is None:
        new = new_record(request, created_us=created_us, message=request.message.name)
        db.execute(sa.insert(WORK).values({**new, "retries": request.message.retries, **ended}))
    else:
        same = WORK.c.state == row.state, WORK.c.fence == row.fence, WORK.c.owner == row.owner
        db.execute(sa.update(WORK).where(WORK.c.id == row.id, *same).values(**ended))
    return Answer(Decision.OUTDATED, error=str(ended["error"]))


class NewestClaim(LockedClaim):
    """One claim with its rows locked: its key, then its task's mark, then its work."""

    def _lock_beside(self) -> None:
        self.mark = _Mark(self.database, self.db, self.request)

    def decide(self) -> ClaimAnswer:
        decision = decision_of(self.request, self.records, self.own)
        self.created_us = self.now_us if self.row is None else self.row.created
        self.sent_us = sent_at_us(self.request.sent_us, created_us=self.created_us)
        self.line = _Line(self.db, self.request, self.now_us)
        if decision in CLAIMABLE - {Decision.SAME} or decision is Decision.BURY:
            newer = self._newer()
            if newer is not None:
                return self._end(newer)
            if self._is_held_elsewhere():
                return self._busy(None)
        return super().decide()

    def _newer(self) -> str | None:
        """The work of a newer message that has begun, or waits."""
        waits = self.line.newest()
        others = {self.mark.work: self.mark.stamp_us}
        if waits is not None:
            others[waits.id] = waits.parked
        if not is_outdated(self.sent_us, others_us=list(others.values())):
            return None
        return max(others, key=lambda work: others[work] or 0)

    def _is_held_elsewhere(self) -> bool:
        """Whether the lock server's holder is about to claim the key, or to end."""
        held_by, [key] = self.request.held_by, self.keys
        if held_by is None or key.owner == str(held_by):
            return False
        return not super()._holders()

    def _end(self, newer: str) -> Answer:
        return _end(
            self.db,
            self.request,
            self.row,
            by=newer,
            now_us=self.now_us,
            created_us=self.created_us,
        )

    def _holders(self) -> list[Any]:
        live = super()._holders()
        return [] if self._supersedes(live) else live

    def _supersedes(self, live: list[Any]) -> bool:
        """Whether the key's holder is an older message of the task, which is to lose it."""
        by_key = self.request.newest == "supersede"
        return by_key and any(key.fence == self.mark.fence for key in live)

    def _held_up(self, decision: Decision) -> Busy | None:
        del decision
        # Those of its own task are older. Who takes a key from its holder takes nobody's turn.
        if not self.request.in_line or self._supersedes(super()._holders()):
            return None
        behind = is_behind(self.db, self.request, self.now_us, but=self.request.task)
        return self._busy(None) if behind else None

    def _grant(self, decision: Decision) -> Claimed:
        [key] = super()._holders() or [None]
        granted = super()._grant(decision)
        work = str(self.request.work)
        if self.mark.work != work:
            self._end_older(by=work)
        # Who asks again has replaced them all: whoever waits since then is newer.
        replaced = () if decision is Decision.SAME else self.line.replace(by=work)
        self.mark.move(fence=granted.claim.fence, work=work, stamp_us=self.sent_us)
        over = None if key is None else Owner.parse(key.owner)
        return replace(granted, over=over, replaced=replaced)

    def _end_older(self, *, by: str) -> None:
        """PROCESSING -> FAILED, final, for the last one that has begun, dead or alive."""
        older = sa.select(WORK).where(WORK.c.id == self.mark.work).with_for_update()
        row = self.db.execute(older).first()
        if row is None or row.state != State.PROCESSING.value or row.fence != self.mark.fence:
            return
        self.db.execute(
            sa.update(WORK)
            .where(
                WORK.c.id == row.id,
                WORK.c.state == row.state,
                WORK.c.fence == row.fence,
                WORK.c.owner == row.owner,
            )
            .values(**_outdated(by, self.now_us), **_TOLD)
        )


def park(
    database: Database, request: ClaimRequest, *, only_new: bool = False
) -> ParkedNewest | Answer | None:
    """Store the work with its call as the only one of its task that waits for its key.

    None if it is not to wait; with `only_new` also if it, or its message, is on record.
    """
    with database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
        if only_new and is_on_record(db, request):
            return None
        mark = _Mark(database, db, request)
        row = db.execute(sa.select(WORK).where(WORK.c.id == request.work).with_for_update()).first()
        now_us = database.now_us(db)
        if row is not None and not may_wait(row, request):
            return None
        created_us = now_us if row is None else row.created
        sent_us = sent_at_us(request.sent_us, created_us=created_us)
        line = _Line(db, request, now_us)
        waits = line.newest()
        others = [mark.stamp_us, None if waits is None else waits.parked]
        if is_outdated(sent_us, others_us=others):
            by = mark.work if waits is None else waits.id
            return _end(db, request, row, by=by, now_us=now_us, created_us=created_us)
        values = {**waiting_values(request, due=None), **place_of(request, created_us)}
        if row is None:
            db.execute(sa.insert(WORK).values(new_record(request, created_us=now_us, **values)))
        else:
            same = WORK.c.state == row.state, WORK.c.fence == row.fence, WORK.c.owner == row.owner
            values["expires"] = expiry_of(row, request)
            db.execute(sa.update(WORK).where(WORK.c.id == row.id, *same).values(**values))
        return ParkedNewest(line.replace(by=str(request.work)))
