"""Claims in several statements of one transaction, over locked rows.

Guarantees: `states.decide()` decides each claim, from rows that the claim has locked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import sqlalchemy as sa

from taskguard.errors import TransactionRetryError
from taskguard.ledger.connections.database import Database
from taskguard.ledger.decisions import (
    CLAIMABLE,
    Records,
    WorkRecord,
    decide_row,
    why_dead,
)
from taskguard.ledger.history import NO_FLAG, appended, flagged, line_of
from taskguard.ledger.lines import newest
from taskguard.ledger.lines.park import position_of
from taskguard.ledger.own_rows import changes as rows
from taskguard.ledger.statements.gates import View, gates_of
from taskguard.ledger.statements.locking import claim_statements, inserting
from taskguard.ledger.statements.slots import choose
from taskguard.ledger.tables import FREE, KEYS, NO_POSITION, WORK
from taskguard.model.claims import Answer, Busy, ClaimAnswer, Claimed, ClaimRequest
from taskguard.model.history import HISTORY_CHARS, Flag, Happened, entry
from taskguard.model.line_states import LineState
from taskguard.model.states import Decision, State

__all__ = ["LockedClaim", "Seen", "claim", "decision_of", "peek", "peek_in", "peeked", "settle"]


def claim(database: Database, request: ClaimRequest) -> ClaimAnswer:
    """Decide and record, in one transaction, whether this delivery may run."""
    with database.transaction(lock_timeout_s=database.lock_timeout_s, claim=True) as db:
        if request.work is not None:
            # If the work has ended, for example DONE or DEAD, the claim does not touch its key.
            found = peek_in(database, db, request)
            if found.decision not in CLAIMABLE and found.decision is not Decision.BURY:
                settle(db, request, found)
                _catch_up(db, found)
                return found.answer(request)
        return LockedClaim(database, db, request).decide()


def settle(db: sa.Connection, request: ClaimRequest, found: Seen) -> None:
    """Take the work off the sweep's list if the user's row shows that its outcome is final."""
    row = found.row
    if request.row is None or row is None or row.due is None:
        return
    declared, put_off = request.row.declared, False
    if found.decision is Decision.MISSING:
        put_off = request.may_create and declared.on_missing == "defer"
    elif found.decision is Decision.INELIGIBLE:
        put_off = request.may_create and declared.on_ineligible == "defer"
    elif found.decision is not Decision.DONE:
        return
    if not put_off:
        same = WORK.c.state == row.state, WORK.c.fence == row.fence, WORK.c.owner == row.owner
        db.execute(
            sa.update(WORK).where(WORK.c.id == row.id, *same).values(due=None, **NO_POSITION)
        )


def _catch_up(db: sa.Connection, found: Seen) -> None:
    """Bring the record up to date if the work ended under a former id.

    The sweep does not send the message again. If the work is DONE, this record becomes DONE, too.
    """
    mine, row = found.records.own, found.row
    ended = found.decision in (Decision.DONE, Decision.DEAD, Decision.REVOKED)
    if not ended or mine is None or row is None or mine.fence >= row.fence:
        return
    these = (
        WORK.c.id == mine.id,
        WORK.c.state == mine.state,
        WORK.c.fence == mine.fence,
        WORK.c.owner == mine.owner,
    )
    values: dict[str, object] = {"due": None, **NO_POSITION}
    if found.decision is Decision.DONE and row.state == State.DONE.value:
        same = ("state", "message", "fence", "owner", "result", "error", "finished")
        values |= {name: getattr(row, name) for name in same} | {"lease_until": 0, "call": None}
    elif mine.due is None:
        return
    db.execute(sa.update(WORK).where(*these).values(**values))


class Seen(NamedTuple):
    """A work's records, the decision of a claim, and the user's row."""

    records: Records
    decision: Decision
    own: rows.Found | None

    @property
    def row(self) -> WorkRecord | None:
        """The work's row."""
        return self.records.speaking

    def answer(self, request: ClaimRequest) -> Answer | Busy:
        """Return the answer for a delivery whose claim is not granted."""
        own_state = None if self.own is None else self.own.state
        return self.records.answer(request, self.decision, own_state)


def peek(database: Database, request: ClaimRequest) -> Seen:
    """Return the records and the decision of a claim, without making it."""
    with database.transaction() as db:
        return peek_in(database, db, request)


def peeked(request: ClaimRequest, seen: Seen) -> ClaimAnswer:
    """Return what a claim would find, as an answer of `ports.peek()`."""
    if seen.decision not in CLAIMABLE and seen.decision is not Decision.BURY:
        return seen.answer(request)
    started = seen.row is not None and seen.row.attempts > 0
    return Busy(None, None, same_work=False, started=started)


def peek_in(database: Database, db: sa.Connection, request: ClaimRequest) -> Seen:
    own = None if request.row is None else rows.read(db, request.row)
    records = _read(database, db, request)
    return Seen(records, decision_of(request, records, own), own)


def decision_of(request: ClaimRequest, records: Records, own: rows.Found | None) -> Decision:
    """Return the decision of `states.py` for a claim of work with these records."""
    row = records.speaking
    row_state = None if request.row is None else rows.state_of(request.row, own, row)
    return decide_row(request, row, records.recorded, records.now_us, row_state)


def _read(
    database: Database, db: sa.Connection, request: ClaimRequest, *, lock: bool = False
) -> Records:
    """Return the work's records, the message's numbers, and the clock after any wait for locks.

    `lock` locks the records, in an order that all transactions share.
    """
    found: dict[str, tuple[WorkRecord | None, tuple[int, int]]] = {}
    now_us = 0
    ids = (str(request.work), *request.formerly)
    for work in sorted(ids) if lock else ids:
        row, number, now_us = _read_one(database, db, request, work, lock=lock)
        found[work] = row, number
    return Records(
        tuple(found[work][0] for work in ids), tuple(found[work][1] for work in ids), now_us
    )


def _read_one(
    database: Database, db: sa.Connection, request: ClaimRequest, work: str, *, lock: bool
) -> tuple[WorkRecord | None, tuple[int, int], int]:
    statements = database.once(claim_statements, len(request.keys))
    if lock and not database.dialect.locks_joined:
        db.execute(sa.select(WORK.c.id).where(WORK.c.id == work).with_for_update())
    values = {"work": work, "message": request.message.name}
    [row] = database.read(db, statements.read if lock else statements.peek, values)
    if lock and database.dialect.locks_joined and _is_of_another(row, request):
        # The other message may have replaced this one's call while this claim waited for the lock.
        # The numbers in `row` are then out of date, so read them again.
        [row] = database.read(db, statements.peek, values)
    number = (row.known_retries or 0, row.known_deferrals or 0)
    return (None if row.id is None else row), number, row.now_us


def _is_of_another(row: Any, request: ClaimRequest) -> bool:
    """Return True if the record names another message."""
    return row.id is not None and row.message != request.message.name


class LockedClaim:
    """One claim, with its rows locked, and the gates that its request has to pass.

    The order of locks is that of every transaction: the user's own row, the key, the task's
    `NewestRow` or the slot of the key, the work. Several keys are locked in the order of their
    names.
    """

    def __init__(self, database: Database, db: sa.Connection, request: ClaimRequest) -> None:
        self.database = database
        self.db = db
        self.owner = str(request.owner)
        self.own = None if request.row is None else rows.read(db, request.row, lock=True)
        base: Any = None
        others: Sequence[Any] = ()
        if request.bounds is not None and request.bounds.slots:
            request, base, others = choose(database, db, request, request.bounds)
        self.request = request
        self.statements = database.once(claim_statements, len(request.keys))
        self.names = {f"key_{number}": key for number, key in enumerate(request.keys)}
        keys = self._lock_keys()
        if request.bounds is not None and base is None:
            [base] = keys
        newest_row = None if request.newest is None else newest.NewestRow(database, db, request)
        if request.work is None:
            records = Records((None,), ((0, 0),), database.now_us(db))
        else:
            records = _read(database, db, request, lock=True)
        self.records, self.row, self.now_us = records, records.speaking, records.now_us
        decision = decision_of(request, records, self.own)
        self.view = View(request, decision, records, keys, base, others, newest_row)

    def _lock_keys(self) -> Sequence[Any]:
        keys: Sequence[Any] = ()
        while len(keys) < len(set(self.request.keys)):  # a purge may come between the two
            self._make_keys()
            keys = self.database.read(self.db, self.statements.lock_keys, self.names)
        return keys

    def _make_keys(self) -> None:
        self.statements.make_keys.run(self.db, self.names)

    def decide(self) -> ClaimAnswer:
        """Grant the claim, or return the reason for the refusal."""
        view, buried = self.view, self.view.decision is Decision.BURY
        if view.decision not in CLAIMABLE and not buried:
            return Seen(self.records, view.decision, self.own).answer(self.request)
        gates = gates_of(self.request, self.db)
        for gate in gates:
            refused = None if buried and not gate.may_end else gate.refuse(view)
            if refused is not None:
                self._note()
                return refused
        if buried:
            assert self.row is not None  # noqa: S101  # only existing work is buried
            return self._bury(self.row)
        granted = self._grant()
        for gate in gates:
            granted = gate.granted(view, granted)
        self._note()
        return granted

    def _note(self) -> None:
        """Write the changes that gates noted to the key's own row, if there are any."""
        base, noted = self.view.base, self.view.noted
        if any(getattr(base, name) != value for name, value in noted.items()):
            self.db.execute(sa.update(KEYS).where(KEYS.c.key == base.key).values(**noted))

    def _grant(self) -> Claimed:
        """Write the claim."""
        view, request, row, now_us = self.view, self.request, self.row, self.now_us
        if view.is_mine and (view.decision is Decision.SAME or request.work is None):
            fence = view.keys[0].fence  # the same owner asks again and gets the same grant
        else:
            fences = [key.fence for key in view.keys]
            if row is not None:
                fences.append(row.fence)  # of another slot, if a clock was set back
            fence = max(now_us, *(last + 1 for last in fences))
            if self.own is not None:
                fence = self._move_own(self.own, fence)
            until_us = now_us + int(request.ttl_s * 1e6)
            self._take_keys(fence, until_us)
            if request.work is not None:
                self._write_works(view.decision, fence, until_us)
        return self.records.claimed(request, fence, view.decision)

    def _take_keys(self, fence: int, until_us: int) -> None:
        if self.request.work is None:
            values = {"fence": fence, "owner": self.owner, "lease_until": until_us}
            self.statements.take_keys.run(self.db, {**self.names, **values})
            return
        # Under each id, because a release finds the work of a holder by these names.
        line = "".join(line_of(work) for work in (self.request.work, *self.request.formerly))
        taken = {"new_fence": fence, "new_owner": self.owner, "until": until_us}
        taken |= {"line": line, "chars": len(line)}
        self.statements.take_for_work.run(self.db, {**self.names, **taken})

    def _move_own(self, own: rows.Found, fence: int) -> int:
        """Move the user's row to PROCESSING, and return a fence above all its former fences."""
        assert self.request.row is not None  # noqa: S101
        fence = max(fence, (own.fence or 0) + 1)
        if not rows.claim(self.db, self.request.row, own, fence):
            raise TransactionRetryError("the row was locked, and did not change")  # a trigger?
        return fence

    def _write_works(self, decision: Decision, fence: int, until_us: int) -> None:
        """Write the work's record, and a copy without the call under each former id."""
        request = self.request
        calls = [request.call, *(each.call for each in (self.records.own, self.row) if each)]
        call = next((each for each in calls if each is not None), None)
        claim: dict[str, object] = {
            "message": request.message.name,
            "retries": request.message.retries,
            "state": State.PROCESSING.value,
            "final": 0,
            "fence": fence,
            "owner": self.owner,
            "lease_until": until_us,
            "started": self.now_us,
            "trace": request.trace,
            "sends": None,
            **NO_POSITION,
            "error": None,
            **NO_FLAG,
        }
        if request.fingerprint is not None:
            claim["fingerprint"] = request.fingerprint
        ids = (str(request.work), *request.formerly)
        if request.formerly:  # by these ids an operator's change finds the records of the claim
            claim["also"] = "".join(map(line_of, ids))
        for work, known in zip(ids, self.records.rows, strict=True):
            values = dict(claim)
            if request.strict and work == request.work:
                values |= self._kept_position(known)
            if call is not None and work == request.work:
                values["due"] = until_us
                if known is None or known.call != call:
                    values["call"] = call
            elif known is not None and known.call is not None:
                values |= {"call": None, "due": None}
            if known is None:
                self._insert(decision, work, values)
            else:
                self._update(decision, known, values)

    def _kept_position(self, known: WorkRecord | None) -> dict[str, object]:
        """Return the position that the work has or gets, and keeps until it has ended."""
        position: dict[str, Any] = position_of(self.request, self.now_us, LineState.KEPT)
        kept = [row.parked for row in self.records.rows if row and row.parked is not None]
        position["parked"] = min(kept, default=position["parked"])
        if known is not None:
            position["parked"] = sa.func.coalesce(WORK.c.parked, position["parked"])
        return position

    def _insert(self, decision: Decision, work: str, values: dict[str, object]) -> None:
        request, row = self.request, self.row
        values |= {"id": work, "base": request.base, "task": request.task, "key": request.line}
        values |= {"created": self.now_us, "final": 0}
        if row is None:
            values |= {"attempts": 1, "crashes": 0, "crashed_owner": ""}
        else:
            values = {**self._carried(row), **values, **self._counted(decision, row)}
            values["history"] = self._carried_history(decision, row)
        values = {name: value for name, value in values.items() if value is not None}
        try:
            self.database.once(inserting, tuple(values)).run(self.db, values)
        except sa.exc.IntegrityError as error:
            raise TransactionRetryError("Another claim of this work came first.") from error

    def _carried(self, row: WorkRecord) -> dict[str, object]:
        """Return the columns that a new record copies from `row`, the record that counts."""
        names = ("crashes", "crashed_owner", "rounds", "fingerprint", "progress")
        return {name: getattr(row, name) for name in names} | {"attempts": row.attempts + 1}

    def _carried_history(self, decision: Decision, row: WorkRecord) -> str | None:
        """Return the history of a new record: that of `row`, the record that counts."""
        known: str | None = self.db.scalar(sa.select(WORK.c.history).where(WORK.c.id == row.id))
        if decision is not Decision.TAKEOVER:
            return known
        return f"{known or ''}{self._takeover(row)}"[-HISTORY_CHARS:]

    def _takeover(self, row: WorkRecord) -> str:
        """Return the line of a history that says which holder crashed."""
        owner, fence = row.owner, row.fence
        return entry(self.now_us, Happened.TAKEOVER, owner=owner, fence=fence, text=self.owner)

    def _counted(self, decision: Decision, row: WorkRecord) -> dict[str, object]:
        """Return the columns that depend on the decision and on `row`, the record that counts."""
        if decision is Decision.TAKEOVER:
            return {"crashes": row.crashes + 1, "crashed_owner": row.owner}
        if decision is not Decision.AGAIN:
            return {}
        anew: dict[str, object] = {"final": 0, "crashes": 0, "crashed_owner": "", "finished": None}
        if row.state == State.DONE.value:
            anew |= {"result": None, "progress": None}
        return anew

    def _update(self, decision: Decision, known: WorkRecord, values: dict[str, object]) -> None:
        row = known if self.row is None else self.row
        if known is row:
            counted = int(decision is not Decision.SAME)
            values |= {"attempts": WORK.c.attempts + counted}
        else:
            values = {**self._carried(row), "final": 0, "finished": None, "result": None, **values}
        values |= self._counted(decision, row)
        if decision is Decision.TAKEOVER:
            values["history"] = appended(self._takeover(row))
        changed = self.db.execute(
            sa.update(WORK)
            .where(
                WORK.c.id == known.id,
                WORK.c.state == known.state,
                WORK.c.fence == known.fence,
                WORK.c.owner == known.owner,
            )
            .values(**values)
        )
        if changed.rowcount != 1:
            raise AssertionError("the row was locked, and changed")

    def _death(self, row: WorkRecord) -> str:
        owner, fence, why = row.owner, row.fence, why_dead(row)
        return entry(self.now_us, Happened.DEAD, owner=owner, fence=fence, text=why)

    def _bury(self, row: WorkRecord) -> Answer:
        if self.request.row is not None:
            rows.bury(self.db, self.request.row, row.fence)
        self.db.execute(
            sa.update(WORK)
            .where(
                WORK.c.id.in_([str(self.request.work), *self.request.formerly]),
                WORK.c.state == State.PROCESSING.value,
                WORK.c.fence == row.fence,
                WORK.c.owner == row.owner,
                WORK.c.lease_until <= self.now_us,
            )
            .values(
                state=State.DEAD.value,
                crashes=WORK.c.crashes + 1,
                crashed_owner=row.owner,
                history=appended(self._death(row)),
                **flagged(Flag.DEAD, self.now_us),
                owner=FREE,
                due=None,
                **NO_POSITION,
                error=why_dead(row),
                finished=self.now_us,
            )
        )
        buried = Answer(Decision.BURY, crashes=row.crashes + 1, error=why_dead(row))
        return buried if row.id == self.request.work else replace(buried, recorded_as=row.id)
