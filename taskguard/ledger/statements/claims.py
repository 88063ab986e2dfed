"""Claims in several statements of one transaction, over rows that are locked.

Guarantees: each claim is decided by `states.decide()` from rows nobody else can change meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import sqlalchemy as sa

from taskguard.errors import TransactionRetryError
from taskguard.ledger.connections.database import Database
from taskguard.ledger.connections.prepared import Prepared
from taskguard.ledger.decisions import (
    CLAIMABLE,
    Records,
    WorkRecord,
    busy_key,
    decide_row,
    why_dead,
)
from taskguard.ledger.lines import turn
from taskguard.ledger.lines.park import place_of
from taskguard.ledger.own_rows import changes as rows
from taskguard.ledger.tables import FREE, KEYS, MESSAGES, NO_PLACE, WORK
from taskguard.model.claims import Answer, Busy, ClaimAnswer, Claimed, ClaimRequest
from taskguard.model.states import Decision, State

__all__ = ["LockedClaim", "Seen", "claim", "decision_of", "peek"]


# The columns that decide a claim, and those that its answer tells.
_COLUMNS = (
    "id", "state", "final", "owner", "fence", "lease_until", "message", "retries", "crashes",
    "fingerprint", "attempts", "progress", "result", "error", "call", "due", "finished", "created",
    "parked", "crashed_owner", "rounds",
)  # fmt: skip
_KEY_COLUMNS = (KEYS.c.key, KEYS.c.fence, KEYS.c.owner, KEYS.c.lease_until)


def claim(
    database: Database, request: ClaimRequest, *, by: type[LockedClaim] | None = None
) -> ClaimAnswer:
    """Decide and record, in one transaction, whether this delivery may run.

    `by`: how, once the rows are to be locked; None: as the claim of a key that is not bounded.
    """
    with database.transaction(lock_timeout_s=database.lock_timeout_s, claim=True) as db:
        if request.work is not None:
            # DONE, DEAD and the like touch no key.
            found = _peek(database, db, request)
            if found.decision not in CLAIMABLE and found.decision is not Decision.BURY:
                _settle(db, request, found)
                _catch_up(db, found)
                return found.answer(request)
        return (by or LockedClaim)(database, db, request).decide()


def _settle(db: sa.Connection, request: ClaimRequest, found: Seen) -> None:
    """End the sweep's interest in work of which the user's row says for good that it is done."""
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
        db.execute(sa.update(WORK).where(WORK.c.id == row.id, *same).values(due=None, **NO_PLACE))


def _catch_up(db: sa.Connection, found: Seen) -> None:
    """Bring the work's record up to that of a worker with a former guard, which ended the work.

    Its message is sent no more; where the work is DONE, this record says so, too.
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
    values: dict[str, object] = {"due": None}
    if found.decision is Decision.DONE and row.state == State.DONE.value:
        same = ("state", "message", "fence", "owner", "result", "error", "finished")
        values |= {name: getattr(row, name) for name in same} | {"lease_until": 0, "call": None}
    elif mine.due is None:
        return
    db.execute(sa.update(WORK).where(*these).values(**values))


class Seen(NamedTuple):
    """A work's records, what a claim would do with it, and the user's row."""

    records: Records
    decision: Decision
    own: rows.Found | None

    @property
    def row(self) -> WorkRecord | None:
        """The work's row."""
        return self.records.speaking

    def answer(self, request: ClaimRequest) -> Answer | Busy:
        """What the delivery is told, where it gets no claim."""
        own_state = None if self.own is None else self.own.state
        return self.records.answer(request, self.decision, own_state)


def peek(database: Database, request: ClaimRequest) -> Seen:
    """What a claim would find."""
    with database.transaction() as db:
        return _peek(database, db, request)


def _peek(database: Database, db: sa.Connection, request: ClaimRequest) -> Seen:
    own = None if request.row is None else rows.read(db, request.row)
    records = _read(database, db, request)
    return Seen(records, decision_of(request, records, own), own)


def decision_of(request: ClaimRequest, records: Records, own: rows.Found | None) -> Decision:
    """What a claim does with a work of these records, by `states.py`."""
    row = records.speaking
    place = None if request.row is None else rows.place(request.row, own, row)
    return decide_row(request, row, records.recorded, records.now_us, place)


def _read(
    database: Database, db: sa.Connection, request: ClaimRequest, *, lock: bool = False
) -> Records:
    """The work's records, the message's numbers in them, and the clock as of after any wait.

    With `lock` they are locked, in an order that all transactions share.
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
    statements = database.once(_statements, len(request.keys))
    if lock and not database.dialect.locks_joined:
        db.execute(sa.select(WORK.c.id).where(WORK.c.id == work).with_for_update())
    values = {"work": work, "message": request.message.name}
    [row] = database.read(db, statements.read if lock else statements.peek, values)
    if lock and database.dialect.locks_joined and _is_of_another(row, request):
        # Which may have replaced this one's call while this waited: the numbers are then older.
        [row] = database.read(db, statements.peek, values)
    number = (row.known_retries or 0, row.known_deferrals or 0)
    return (None if row.id is None else row), number, row.now_us


def _is_of_another(row: Any, request: ClaimRequest) -> bool:
    """Whether the work is another message's."""
    return row.id is not None and row.message != request.message.name


class _Statements(NamedTuple):
    """The statements of a claim; `peek` and `read` give one row, also where there is no record."""

    peek: Prepared
    read: Prepared
    make_keys: Prepared
    lock_keys: Prepared
    take_keys: Prepared


def _statements(database: Database, keys: int) -> _Statements:
    """For claims of so many keys."""
    dialect, sql = database.dialect, database.engine.dialect
    known = sa.select(MESSAGES).where(
        MESSAGES.c.message == sa.bindparam("message"), MESSAGES.c.work == sa.bindparam("work")
    )
    one = sa.select(sa.literal_column("1").label("one")).subquery("one")
    peek = sa.select(
        dialect.now().label("now_us"),
        known.with_only_columns(MESSAGES.c.retries).scalar_subquery().label("known_retries"),
        known.with_only_columns(MESSAGES.c.deferrals).scalar_subquery().label("known_deferrals"),
        *(WORK.c[name] for name in _COLUMNS),
    ).select_from(one.outerjoin(WORK, WORK.c.id == sa.bindparam("work")))
    names = [f"key_{number}" for number in range(keys)]
    these = KEYS.c.key.in_([sa.bindparam(name, type_=KEYS.c.key.type) for name in names])
    free = {"fence": 0, "owner": FREE, "lease_until": 0}
    new = [{"key": sa.bindparam(name), **free} for name in names]
    return _Statements(
        peek=Prepared(peek, sql),
        read=Prepared(peek.with_for_update() if dialect.locks_joined else peek, sql),
        make_keys=Prepared(dialect.insert_missing(KEYS, new), sql),
        lock_keys=Prepared(
            sa.select(*_KEY_COLUMNS).where(these).order_by(KEYS.c.key).with_for_update(), sql
        ),
        take_keys=Prepared(
            sa.update(KEYS).where(these), sql, columns=("fence", "owner", "lease_until")
        ),
    )


def _inserting(database: Database, columns: tuple[str, ...]) -> Prepared:
    return Prepared(sa.insert(WORK), database.engine.dialect, columns=columns)


class LockedClaim:
    """One claim with its rows locked: the user's own, then keys, in order, then the work."""

    def __init__(self, database: Database, db: sa.Connection, request: ClaimRequest) -> None:
        self.database = database
        self.db = db
        self.request = request
        self.owner = str(request.owner)
        self.own = None if request.row is None else rows.read(db, request.row, lock=True)
        self.statements = database.once(_statements, len(request.keys))
        self.names = {f"key_{number}": key for number, key in enumerate(request.keys)}
        self.keys: Sequence[Any] = ()
        while len(self.keys) < len(set(request.keys)):  # a purge may come between the two
            self._make_keys()
            self.keys = database.read(db, self.statements.lock_keys, self.names)
        self._lock_beside()
        if request.work is None:
            self.records = Records((None,), ((0, 0),), database.now_us(db))
        else:
            self.records = _read(database, db, request, lock=True)
        self.row, self.now_us = self.records.speaking, self.records.now_us

    def _make_keys(self) -> None:
        self.statements.make_keys.run(self.db, self.names)

    def _lock_beside(self) -> None:
        """What else is to be locked between the keys and the work: nothing here."""

    def decide(self) -> ClaimAnswer:
        """Grant the claim, or say why not."""
        decision = decision_of(self.request, self.records, self.own)
        if decision is Decision.BURY:
            assert self.row is not None  # noqa: S101  # whose crashes they are
            return self._bury(self.row)
        if decision not in CLAIMABLE:
            return Seen(self.records, decision, self.own).answer(self.request)
        live = self._holders()
        if live:
            return self._taken(max(live, key=lambda key: key.lease_until))
        refused = self._held_up(decision)
        return self._grant(decision) if refused is None else refused

    def _holders(self) -> list[Any]:
        """The rows of keys that somebody else holds."""
        return [
            key for key in self.keys if key.owner != self.owner and key.lease_until > self.now_us
        ]

    def _taken(self, by: Any) -> Busy:
        """Busy, for other work holds a key: this row."""
        return busy_key(by.owner, by.lease_until, self.row, self.now_us)

    def _held_up(self, decision: Decision) -> Busy | None:
        """What keeps the work from a key that is free; None: nothing."""
        del decision
        if self.request.in_line and turn.is_behind(self.db, self.request, self.now_us):
            return self._busy(None)
        return None

    def _busy(self, until_us: int | None, *, too_early: bool = False) -> Busy:
        """Busy, and it is nobody's doing that could be named."""
        after_s = None if until_us is None else max(0.0, (until_us - self.now_us) / 1e6)
        started = self.row is not None and self.row.attempts > 0
        return Busy(None, after_s, same_work=False, started=started, too_early=too_early)

    def _grant(self, decision: Decision) -> Claimed:
        """Write the claim."""
        mine = all(key.owner == self.owner for key in self.keys)
        if mine and (decision is Decision.SAME or self.request.work is None):
            fence = self.keys[0].fence  # the same owner asks again and gets the same grant
        else:
            fence = max(self.now_us, *(last + 1 for last in self._last_fences()))
            if self.own is not None:
                fence = self._move_own(self.own, fence)
            until_us = self.now_us + int(self.request.ttl_s * 1e6)
            values = {"fence": fence, "owner": self.owner, "lease_until": until_us}
            self.statements.take_keys.run(self.db, {**self.names, **values})
            if self.request.work is not None:
                self._write_works(decision, fence, until_us)
        return self.records.claimed(self.request, fence, decision)

    def _last_fences(self) -> list[int]:
        """Those that the fence of this claim has to be above."""
        return [key.fence for key in self.keys]

    def _move_own(self, own: rows.Found, fence: int) -> int:
        """Move the user's row to PROCESSING; returns a fence above every one that it had."""
        assert self.request.row is not None  # noqa: S101
        fence = max(fence, (own.fence or 0) + 1)
        if not rows.claim(self.db, self.request.row, own, fence):
            raise TransactionRetryError("the row was locked, and did not change")  # a trigger?
        return fence

    def _write_works(self, decision: Decision, fence: int, until_us: int) -> None:
        """The work's own record, and a copy under each former id, without what would be sent."""
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
            **NO_PLACE,
            "error": None,
        }
        if request.fingerprint is not None:
            claim["fingerprint"] = request.fingerprint
        for work, known in zip((request.work, *request.formerly), self.records.rows, strict=True):
            values = dict(claim)
            if request.strict and work == request.work:
                values |= self._kept_place(known)
            if call is not None and work == request.work:
                values["due"] = until_us
                if known is None or known.call != call:
                    values["call"] = call
            elif known is not None and known.call is not None:
                values |= {"call": None, "due": None}
            if known is None:
                self._insert(decision, str(work), values)
            else:
                self._update(decision, known, values)

    def _kept_place(self, known: WorkRecord | None) -> dict[str, object]:
        """The place that it has, or gets, and keeps until it has ended."""
        place: dict[str, Any] = place_of(self.request, self.now_us)
        kept = [row.parked for row in self.records.rows if row and row.parked is not None]
        place["parked"] = min(kept, default=place["parked"])
        if known is not None:
            place["parked"] = sa.func.coalesce(WORK.c.parked, place["parked"])
        return place

    def _insert(self, decision: Decision, work: str, values: dict[str, object]) -> None:
        request, row = self.request, self.row
        values |= {"id": work, "task": request.task, "key": request.line}
        values |= {"created": self.now_us, "final": 0}
        if row is None:
            values |= {"attempts": 1, "crashes": 0, "crashed_owner": ""}
        else:
            values = {**self._carried(row), **values, **self._counted(decision, row)}
        try:
            self.database.once(_inserting, tuple(values)).run(self.db, values)
        except sa.exc.IntegrityError as error:
            raise TransactionRetryError("Another claim of this work came first.") from error

    def _carried(self, row: WorkRecord) -> dict[str, object]:
        """What a new record takes over from `row`, the record that counts."""
        names = ("crashes", "crashed_owner", "rounds", "fingerprint", "progress")
        return {name: getattr(row, name) for name in names} | {"attempts": row.attempts + 1}

    def _counted(self, decision: Decision, row: WorkRecord) -> dict[str, object]:
        """The columns of a record that depend on the decision and `row`, the record that counts."""
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
                owner=FREE,
                due=None,
                **NO_PLACE,
                error=why_dead(row),
                finished=self.now_us,
            )
        )
        buried = Answer(Decision.BURY, crashes=row.crashes + 1, error=why_dead(row))
        return buried if row.id == self.request.work else replace(buried, recorded_as=row.id)
