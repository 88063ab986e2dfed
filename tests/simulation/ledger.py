"""A ledger in memory: rows, row locks and transactions as a database has them, and nothing else.

Guarantees what `ledger/ports.py` says. It passes the contract suite of ledgers, so that a fault
that the simulation finds is a fault of the real ones. Every change of rows happens at one moment.
Others see what a transaction writes when it commits. A process that meets a row of another open
transaction calls `wait` until the row is free or the time is up.

Does not guarantee that anything survives a process. That makes it fast.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from simulation.newest import KeyRow, NewestMessages
from simulation.operated import Operated
from simulation.runs import Pointer, Runs
from simulation.stored_calls import StoredCalls
from support.line_states import check_line
from taskguard.clock import SYSTEM_CLOCK, Clock
from taskguard.errors import LedgerUnavailableError, StaleTokenError
from taskguard.ledger.decisions import (
    CLAIMABLE,
    Records,
    busy_key,
    decide_row,
    view_of,
    why_dead,
)
from taskguard.ledger.lines.park import position_of
from taskguard.ledger.parts.endings import UNDECIDED_S
from taskguard.ledger.parts.messages import is_over, waits_for
from taskguard.ledger.records import message_of
from taskguard.ledger.tables import NO_POSITION
from taskguard.locks.base import Renewal
from taskguard.model.bounds import is_slot
from taskguard.model.changes import Said
from taskguard.model.claims import (
    Answer,
    Busy,
    Claim,
    ClaimAnswer,
    Claimed,
    ClaimRequest,
    MessageRef,
    Overdue,
)
from taskguard.model.history import Action, Happened
from taskguard.model.lease import Owner
from taskguard.model.line_states import LineState
from taskguard.model.records import WorkView
from taskguard.model.runs import FAILED_RUN, run_id
from taskguard.model.states import EXPIRED, Decision, State

__all__ = ["FREE", "KeyRow", "MemoryLedger", "MemoryTransaction", "Work"]

FREE = ""
_PUBLISH_LOCK_S = 5.0


@dataclass(frozen=True, slots=True)
class Work:
    """A row of the table of work."""

    id: str
    task: str
    key: str
    message: str
    retries: int
    state: State
    fence: int
    owner: str
    lease_until: int
    created: int
    started: int | None
    base: str | None = None
    final: int = 0
    attempts: int = 1
    crashes: int = 0
    crashed_owner: str = ""
    rounds: int = 0
    fingerprint: str | None = None
    progress: str | None = None
    result: str | None = None
    error: str | None = None
    call: str | None = None
    sends: int | None = None
    due: int | None = None
    line: str | None = None
    rank: int | None = None
    parked: int | None = None
    expires: int | None = None
    strict: int | None = None
    flag: int | None = None
    since: int | None = None
    also: str | None = None
    finished: int | None = None
    trace: str | None = None


class WorkItems(dict[str, Work]):
    """The table of work. A change of a line's state is an error unless `TRANSITIONS` has it."""

    def __setitem__(self, name: str, row: Work) -> None:
        before = self.get(name)
        check_line(None if before is None else before.line, row)
        super().__setitem__(name, row)

    def values(self) -> list[Work]:  # type: ignore[override]
        """Return the rows as of now; other threads go on."""
        return list(super().values())

    def update(self, rows: Mapping[str, Work]) -> None:  # type: ignore[override]
        for name, row in rows.items():
            self[name] = row


@dataclass
class MemoryTransaction:
    """One open transaction. Its writes are kept apart until it commits.

    `db` is the transaction itself: bodies call `write(effect)`.
    """

    ledger: MemoryLedger
    work_items: dict[str, Work] = field(default_factory=dict)
    keys: dict[str, KeyRow] = field(default_factory=dict)
    numbers: dict[tuple[str, str | None], tuple[int, int]] = field(default_factory=dict)
    pointers: dict[str, Pointer] = field(default_factory=dict)
    # The runs that messages join, unless another transaction has written their numbers.
    joined: dict[tuple[str, str | None], tuple[int, int]] = field(default_factory=dict)
    effects: list[Any] = field(default_factory=list)
    committed: bool = False

    @property
    def db(self) -> MemoryTransaction:
        return self

    def write(self, effect: Any) -> None:
        """Write an effect of the body."""
        self.effects.append(effect)

    def complete_in_block(self, claim: Claim, result_json: str | None) -> None:
        ledger = self.ledger
        now_us = ledger.now_us()
        with ledger.locking(self, ledger.rows_of(claim)):
            ledger.expect(ledger.may_complete(claim), claim)
            done = {"state": State.DONE, "result": result_json, "finished": now_us}
            done |= {"call": None, "due": None, "line": None, "parked": None}
            for work in claim.work_ids:
                self.work_items[work] = replace(ledger.work_items[work], lease_until=0, **done)
            for key in ledger.keys.keys() & claim.keys:
                self.keys[key] = replace(ledger.keys[key], owner=FREE, lease_until=0)

    def checkpoint(self, claim: Claim, progress_json: str) -> None:
        ledger = self.ledger
        with ledger.locking(self, ledger.rows_of(claim)):
            ledger.expect(ledger.may_complete(claim), claim)
            for work in claim.work_ids:
                self.work_items[work] = replace(ledger.work_items[work], progress=progress_json)


def records_of(work_items: Sequence[str]) -> list[tuple[str, str | None]]:
    """Return the rows of this work to lock."""
    return [("work", work) for work in work_items]


class MemoryLedger(NewestMessages, StoredCalls, Runs, Operated):
    """A `LineLedger` without a database."""

    def __init__(
        self,
        clock: Clock = SYSTEM_CLOCK,
        *,
        lock_timeout_s: float = 0.25,
        wait: Callable[[], None] | None = None,
    ) -> None:
        self.clock = clock
        self.keys: dict[str, KeyRow] = {}
        self.work_items: dict[str, Work] = WorkItems()
        # The highest number of a message in a work.
        self.numbers: dict[tuple[str, str | None], tuple[int, int]] = {}
        # The open run of each work that has runs, and the one that follows it.
        self.pointers: dict[str, Pointer] = {}
        self.effects: list[Any] = []
        self.actions: list[tuple[Action, str | None]] = []
        # The last resume of each key: when, and by whom.
        self.resumes: dict[str, tuple[int, Said]] = {}
        # How much of the requested lease is granted: all of it, except for a mutant.
        self.lease_share = 1.0
        # How long a purge keeps the next start that a rate allows.
        self.starts_kept_us = 0
        # For how long no sweep sends the message of a run that follows, after it was delivered.
        self.put_off_s = 60.0
        self.lock_timeout_s = lock_timeout_s
        self._wait = wait or (lambda: clock.sleep(0.001))
        self._locked: dict[tuple[str, str | None], object] = {}
        # Held for moments only, never while a thread waits or publishes.
        self._mutex = threading.RLock()

    def now_us(self) -> int:
        """The database's clock."""
        return int(self.clock.wall_s() * 1e6)

    def purge_keys(self) -> int:
        """Forget keys whose lease has expired. Return their number."""
        now_us = self.now_us()
        with self._mutex:
            gone = [
                key
                for key, row in self.keys.items()
                if row.lease_until < now_us
                and row.fence < now_us
                and row.stamp is None  # its messages may still be too young to purge it
                and (row.next_start or 0) < now_us - self.starts_kept_us
                and ("key", key) not in self._locked
            ]
            for key in gone:
                del self.keys[key]
        return len(gone)

    # -- rows and their locks -----------------------------------------------------------------

    @contextmanager
    def locking(
        self, by: object, rows: Sequence[tuple[str, str | None]], timeout_s: float = _PUBLISH_LOCK_S
    ) -> Iterator[None]:
        """Lock `rows` for the rest of the transaction `by`, and change things at one moment."""
        until_s = self.clock.monotonic_s() + timeout_s
        while True:
            with self._mutex:
                if all(self._locked.get(row, by) is by for row in rows):
                    self._locked.update(dict.fromkeys(rows, by))
                    yield
                    return
            if self.clock.monotonic_s() >= until_s:
                raise LedgerUnavailableError("A row stayed locked.")
            self._wait()

    def unlock(self, by: object) -> None:
        """Release the row locks of the transaction `by`, which has ended."""
        with self._mutex:
            self._locked = {row: who for row, who in self._locked.items() if who is not by}

    def is_locked(self, row: tuple[str, str | None]) -> bool:
        """Return whether an open transaction has locked the row."""
        return row in self._locked

    def is_held(self, key: str) -> bool:
        """Return whether the key has a lease that has not expired."""
        row = self.keys.get(key)
        return row is not None and row.lease_until > self.now_us()

    def holders(self, key: str, *, but: str = FREE) -> list[KeyRow]:
        """Return the rows by which owners other than `but` hold the key or its slots."""
        return [
            row
            for name, row in self.keys.items()
            if (name == key or is_slot(name, of=key)) and row.owner != but and self.is_held(name)
        ]

    @contextmanager
    def _at_once(
        self, rows: Sequence[tuple[str, str | None]], timeout_s: float = _PUBLISH_LOCK_S
    ) -> Iterator[None]:
        """Run a transaction of one statement."""
        by = object()
        try:
            with self.locking(by, rows, timeout_s):
                yield
        finally:
            self.unlock(by)

    @staticmethod
    def rows_of(claim: Claim | ClaimRequest) -> list[tuple[str, str | None]]:
        names = set(claim.keys)
        if isinstance(claim, ClaimRequest) and claim.bounds is not None:
            names.add(claim.bounds.key)
        rows: list[tuple[str, str | None]] = [("key", key) for key in sorted(names)]
        return rows if claim.work is None else rows + records_of((claim.work, *claim.formerly))

    def held_records(self, claim: Claim, state: State = State.PROCESSING) -> list[Work]:
        """Return the claim's records that still have its state, fence and owner."""
        mine = state, claim.fence, str(claim.owner)
        records = [self.work_items[work] for work in claim.work_ids if work in self.work_items]
        return [work for work in records if (work.state, work.fence, work.owner) == mine]

    def works_are_held(self, claim: Claim) -> bool:
        """Return whether all records of the claim's work are still its own."""
        return len(self.held_records(claim)) == len(claim.work_ids)

    def keys_are_held(self, claim: Claim) -> bool:
        return all(
            (row := self.keys.get(key)) is not None
            and (row.fence, row.owner) == (claim.fence, str(claim.owner))
            for key in claim.keys
        )

    def may_complete(self, claim: Claim) -> bool:
        """Return whether a completion of the claim may commit."""
        return self.keys_are_held(claim) and self.works_are_held(claim)

    @staticmethod
    def expect(valid: bool, claim: Claim) -> None:
        if not valid:
            key = ", ".join(claim.keys)
            raise StaleTokenError(f"{key}: a newer holder exists", key=key, fence=claim.fence)

    # -- claims -------------------------------------------------------------------------------

    def records(self, request: ClaimRequest) -> Records:
        """Return the records of the work, under each of its ids."""
        ids = (request.work, *request.formerly)
        rows = tuple(self.work_items.get(work or "") for work in ids)
        numbers = tuple(self.numbers.get(self.numbered(request, work), (0, 0)) for work in ids)
        return Records(rows, numbers, self.now_us())

    def _decide(self, request: ClaimRequest) -> tuple[Records, Decision]:
        records = self.records(request)
        row, recorded, now_us = records.speaking, records.recorded, records.now_us
        return records, decide_row(request, row, recorded, now_us)

    def numbered(self, request: ClaimRequest, work: str | None) -> tuple[str, str | None]:
        """Return what a delivery's number belongs to: a message, in a work."""
        return request.message.name, work

    def peek(self, request: ClaimRequest) -> ClaimAnswer:
        return self.peek_run(request) if request.by_run else self.peek_work(request)

    def claim(self, request: ClaimRequest) -> ClaimAnswer:
        return self.claim_run(request) if request.by_run else self.claim_work(request)

    def peek_work(self, request: ClaimRequest) -> ClaimAnswer:
        records, decision = self._decide(request)
        if decision not in CLAIMABLE and decision is not Decision.BURY:
            return records.answer(request, decision)
        row = records.speaking
        return Busy(None, None, same_work=False, started=row is not None and row.attempts > 0)

    def claim_work(self, request: ClaimRequest) -> ClaimAnswer:
        records, decision = self._decide(request)
        try:
            if decision not in CLAIMABLE and decision is not Decision.BURY:
                self._catch_up(records, decision)
                return records.answer(request, decision)
            request = self._of_one_slot(request)
            rows = self.rows_of(request)
            if request.newest is not None:
                rows += self.rows_beside(request)
            with self._at_once(rows, self.lock_timeout_s):
                if self._of_one_slot(request) != request:
                    return self._busy(records.speaking)  # while this request waited for its rows
                return self._claim(request)
        except LedgerUnavailableError:
            return Busy(None, None, same_work=False, started=True)

    def _catch_up(self, records: Records, decision: Decision) -> None:
        """Copy what a worker with a former guard has done to the work's own id."""
        mine, row = records.own, records.speaking
        if decision is Decision.DONE and mine is not None and mine.fence < row.fence:
            with self._at_once(records_of([mine.id]), self.lock_timeout_s):
                if self.work_items[mine.id] == mine:
                    same = {"id": mine.id, "task": mine.task, "key": mine.key}
                    self.work_items[mine.id] = replace(row, created=mine.created, **same)

    def _others(self, request: ClaimRequest) -> list[KeyRow]:
        """Return the rows of other holders of its key or its slots."""
        assert request.bounds is not None
        return self.holders(request.bounds.key, but=str(request.owner))

    def _of_one_slot(self, request: ClaimRequest) -> ClaimRequest:
        """Return the request for one slot: its own, else the first free one, else the first."""
        if request.bounds is None or not request.bounds.slots:
            return request
        slots, owner = request.bounds.slots, str(request.owner)
        mine = [slot for slot, row in self.keys.items() if row.owner == owner]
        free = [slot for slot in slots if not self.is_held(slot)]
        return replace(request, keys=([*mine, *free, *slots][0],))

    @staticmethod
    def _busy(row: Work | None, after_us: int | None = None, *, too_early: bool = False) -> Busy:
        after_s = None if after_us is None else after_us / 1e6
        started = row is not None and row.attempts > 0
        return Busy(None, after_s, same_work=False, started=started, too_early=too_early)

    def _held_up(self, request: ClaimRequest, row: Work | None, now_us: int) -> Busy | None:
        """Return what refuses a claim of a free key. If nothing does, charge its start."""
        bounds, others = request.bounds, []
        if bounds is not None and bounds.slots:
            others = self._others(request)
            if len(others) >= bounds.limit:
                return self._busy(row, min(each.lease_until for each in others) - now_us)
        room = 1 if bounds is None else bounds.limit - len(others)
        if request.in_line and self.is_behind(request, room=room):
            return self._busy(row)
        if bounds is None:
            return None
        base = self.keys.get(bounds.key, KeyRow())
        early_us = 0
        if bounds.rate is not None:
            opens_us = bounds.rate.opens_us(base.next_start, now_us)
            early_us = opens_us - now_us
            noted = opens_us if early_us > 0 else bounds.rate.charged_us(opens_us, now_us)
            base = replace(base, next_start=noted)
        if early_us <= 0:
            fence = max(base.fence, now_us) if bounds.slots and base.owner == FREE else base.fence
            base = replace(base, slots=bounds.limit if bounds.slots else None, fence=fence)
        self.keys[bounds.key] = base
        return self._busy(row, early_us, too_early=True) if early_us > 0 else None

    def _claim(self, request: ClaimRequest) -> ClaimAnswer:
        records, decision = self._decide(request)
        runs = decision in CLAIMABLE or decision is Decision.BURY
        mine = all(self.keys.get(key, KeyRow()).owner == str(request.owner) for key in request.keys)
        again = decision is Decision.SAME and mine
        if request.newest is not None and runs and not again:
            turned_away = self.turn_away(request, records)
            if turned_away is not None:
                return turned_away
        return self._decided(request, records, decision)

    def _decided(self, request: ClaimRequest, records: Records, decision: Decision) -> ClaimAnswer:
        if decision is Decision.BURY:
            return self._bury(request, records)
        if decision not in CLAIMABLE:
            return records.answer(request, decision)
        paused = self.pause_with_slots(request)
        if paused is not None:
            return busy_key(str(paused), 0, records.speaking, 0)
        return self._unless_held(request, records, decision)

    def _unless_held(
        self, request: ClaimRequest, records: Records, decision: Decision
    ) -> ClaimAnswer:
        owner = str(request.owner)
        keys = [self.keys.get(key, KeyRow()) for key in request.keys]
        live = [key for key in keys if key.owner != owner and key.lease_until > records.now_us]
        supersedes = request.newest == "supersede" and any(
            key.fence == self.mark(request).fence for key in live
        )
        if live and not supersedes:
            last = max(live, key=lambda key: key.lease_until)
            if request.bounds is not None and len(request.bounds.slots) > 1:
                first_us = min(row.lease_until for row in self._others(request))
                return self._busy(records.speaking, first_us - records.now_us)
            return busy_key(last.owner, last.lease_until, records.speaking, records.now_us)
        if all(key.owner == owner for key in keys) and (
            decision is Decision.SAME or request.work is None
        ):
            return records.claimed(request, keys[0].fence, decision)
        # A message that takes the key from its holder takes the turn of no other message.
        asked = replace(request, in_line=request.in_line and not supersedes)
        held_up = self._held_up(asked, records.speaking, records.now_us)
        keys = [self.keys.get(key, KeyRow()) for key in request.keys]
        return held_up or self._grant(request, records, decision, keys)

    def _bury(self, request: ClaimRequest, records: Records) -> Answer:
        row = records.speaking
        mine = row.state, row.fence, row.owner
        for each in records.rows:
            if each is not None and (each.state, each.fence, each.owner) == mine:
                self.work_items[each.id] = replace(
                    each,
                    state=State.DEAD,
                    crashes=each.crashes + 1,
                    owner=FREE,
                    due=None,
                    line=None,
                    parked=None,
                    error=why_dead(row),
                    finished=records.now_us,
                )
        recorded_as = None if row.id == request.work else row.id
        return Answer(
            Decision.BURY,
            crashes=row.crashes + 1,
            error=why_dead(row),
            recorded_as=recorded_as,
        )

    def _grant(
        self, request: ClaimRequest, records: Records, decision: Decision, keys: list[KeyRow]
    ) -> Claimed:
        last, owner = [key.fence for key in keys], str(request.owner)
        if request.bounds is not None and records.speaking is not None:
            last.append(records.speaking.fence)
        fence = self.next_fence(last, records.now_us)
        until_us = records.now_us + int(request.ttl_s * self.lease_share * 1e6)
        live = (row for row in keys if row.owner != owner and row.lease_until > records.now_us)
        over = next((Owner.parse(row.owner) for row in live), None)
        values = {"fence": fence, "owner": owner, "lease_until": until_us}
        for key, row in zip(request.keys, keys, strict=True):
            granted = self.keys[key] = replace(row, **values)
        replaced: tuple[Overdue, ...] = ()
        if request.newest is not None:
            replaced = self.take_place(request, records, fence)
        if request.work is not None:
            self._write(request, records, decision, granted)
        return replace(records.claimed(request, fence, decision), over=over, replaced=replaced)

    def _write(
        self, request: ClaimRequest, records: Records, decision: Decision, granted: KeyRow
    ) -> None:
        """Write the work's own record, and a copy under each former id."""
        row = records.speaking
        calls = [request.call, *(each.call for each in (records.own, row) if each is not None)]
        call = next((each for each in calls if each is not None), None)
        for work, known in zip((request.work, *request.formerly), records.rows, strict=True):
            stored = call is not None and work == request.work
            fresh = replace(
                self.new_work(request),
                id=str(work),
                attempts=1,
                state=State.PROCESSING,
                fence=granted.fence,
                owner=granted.owner,
                lease_until=granted.lease_until,
                started=records.now_us,
                call=call if stored else None,
                due=granted.lease_until if stored else None,
                trace=request.trace,
            )
            if row is not None:
                takeover = decision is Decision.TAKEOVER
                fresh = replace(
                    fresh,
                    attempts=row.attempts + (decision is not Decision.SAME),
                    crashes=row.crashes + takeover,
                    rounds=row.rounds,
                    crashed_owner=row.owner if takeover else row.crashed_owner,
                    fingerprint=request.fingerprint or row.fingerprint,
                    progress=row.progress,
                )
            if known is not None:
                fresh = replace(fresh, task=known.task, key=known.key, created=known.created)
                fresh = replace(fresh, also=known.also)
            if request.formerly:
                ids = (request.work, *request.formerly)
                fresh = replace(fresh, also="".join(f"{each}\n" for each in ids))
            if request.strict and work == request.work:
                place = position_of(request, records.now_us, LineState.KEPT)
                placed = [each.parked for each in records.rows if each and each.parked is not None]
                if known is not None and known.parked is not None:
                    placed = [known.parked]
                place["parked"] = min(placed, default=place["parked"])
                fresh = replace(fresh, **place)
            self.work_items[fresh.id] = fresh

    def new_work(self, request: ClaimRequest, **values: Any) -> Work:
        """Return a record of work that has never been claimed."""
        return Work(
            id=str(request.work),
            base=request.base,
            task=request.task,
            key=request.line,
            message=request.message.name,
            retries=request.message.retries,
            state=State.NEW,
            fence=0,
            owner=FREE,
            lease_until=0,
            created=self.now_us(),
            started=None,
            attempts=0,
            fingerprint=request.fingerprint,
            **values,
        )

    @staticmethod
    def next_fence(last: Sequence[int], now_us: int) -> int:
        """Return a fence above all of these, taken from the clock if the tables were lost."""
        return max(now_us, *(fence + 1 for fence in last))

    # -- the holder's transactions ------------------------------------------------------------

    @contextmanager
    def transaction(
        self, claim: Claim, *, look_first: bool = True, on: None = None
    ) -> Iterator[MemoryTransaction]:
        tx = self.begin(claim, look_first=look_first)
        try:
            yield tx
            self.commit(tx)
        finally:
            self.unlock(tx)

    def begin(self, claim: Claim, *, look_first: bool) -> MemoryTransaction:
        """Begin a transaction, which `commit()` or `unlock()` ends."""
        # As in the databases, only the own record: the completion checks the others.
        self.expect(
            not look_first or claim.work in {each.id for each in self.held_records(claim)}, claim
        )
        return MemoryTransaction(self)

    def begin_plain(self) -> MemoryTransaction:
        """Begin a transaction that has no claim."""
        return MemoryTransaction(self)

    def commit(self, tx: MemoryTransaction) -> None:
        """Write all changes at one moment."""
        with self._mutex:
            self.work_items.update(tx.work_items)
            self.keys.update(tx.keys)
            self.pointers.update(tx.pointers)
            self.numbers = {**tx.joined, **self.numbers, **tx.numbers}
            self.effects.extend(tx.effects)
            tx.committed = True
            self.unlock(tx)

    def complete_alone(self, claim: Claim, result_json: str | None) -> None:
        with self.transaction(claim, look_first=False) as tx:
            tx.complete_in_block(claim, result_json)

    # -- small changes ------------------------------------------------------------------------

    def store_result(self, claim: Claim, result_json: str) -> None:
        with self._at_once(records_of(claim.work_ids)):
            for work in self.held_records(claim, State.DONE):
                self.work_items[work.id] = replace(work, result=result_json)

    def note(self, claim: Claim, progress_json: str) -> bool:
        with self._at_once(records_of(claim.work_ids)):
            found = list(self.held_records(claim))
            for work in found:
                self.work_items[work.id] = replace(work, progress=progress_json)
            return bool(found)

    def fail(self, claim: Claim, error: str, *, again_in_s: float | None = 0.0) -> bool:
        error = error.replace("\0", "\\0")
        now_us = self.now_us()
        values: dict[str, Any] = {"lease_until": 0}
        row = self.work_items.get(claim.work or "")
        if claim.request.base is None:
            values["due"] = now_us + int(UNDECIDED_S * 1e6) if claim.request.strict else None
        elif again_in_s is None:
            values |= {"final": FAILED_RUN, "due": None, **NO_POSITION}
        else:
            until_us = now_us + int(again_in_s * 1e6)
            stored = row is not None and row.call is not None
            values |= {"lease_until": until_us, "due": until_us if stored else None}
        return self._end(
            claim, state=State.FAILED, error=error, rounds=0, finished=now_us, **values
        )

    def end_round(
        self, claim: Claim, reason: str, *, most: int, again_in_s: float | None = 0.0
    ) -> State | None:
        before = self.work_items.get(claim.work or "")
        rounds = 1 if before is None else before.rounds + 1
        if rounds < most:
            ended = self._end(
                claim,
                state=State.NEW,
                error=reason.replace("\0", "\\0"),
                rounds=rounds,
                owner=FREE,
                lease_until=self._back_us(claim),
            )
            return State.NEW if ended else None
        failed = self.fail(claim, reason, again_in_s=again_in_s)
        return State.FAILED if failed else None

    def give_back(self, claim: Claim, *, happened: Happened | None = None) -> bool:
        del happened  # this ledger keeps no histories
        return self._end(claim, state=State.NEW, owner=FREE, lease_until=self._back_us(claim))

    def _back_us(self, claim: Claim) -> int:
        """Return until when the message of a run that was given back is expected. 0: it is none."""
        run = claim.request.base is not None
        return self.now_us() + int(claim.request.ttl_s * 1e6) if run else 0

    def crash(self, claim: Claim, error: str) -> bool:
        row, now_us = self.work_items.get(claim.work or ""), self.now_us()
        due = None if row is None or row.call is None else now_us
        return self._end(claim, error=error.replace("\0", "\\0"), lease_until=now_us, due=due)

    def _end(self, claim: Claim, **values: Any) -> bool:
        with self._at_once(self.rows_of(claim)):
            were_held = self.keys_are_held(claim)
            for key in claim.keys:
                row = self.keys.get(key)
                if row is not None and (row.fence, row.owner) == (claim.fence, str(claim.owner)):
                    self.keys[key] = replace(row, owner=FREE, lease_until=0)
            if claim.work is None:
                return were_held
            if not self.works_are_held(claim):
                return False
            for work in self.held_records(claim):
                self.work_items[work.id] = replace(work, **values)
            return True

    def uncount_crash(self, claim: Claim, *, happened: Happened | None = None) -> None:
        del happened
        with self._at_once(records_of(claim.work_ids)):
            for work in [
                self.work_items[each] for each in claim.work_ids if each in self.work_items
            ]:
                if (
                    work.crashed_owner == str(claim.owner)
                    and work.crashes > 0
                    and work.state is not State.DEAD
                ):
                    self.work_items[work.id] = replace(
                        work, crashes=work.crashes - 1, crashed_owner=""
                    )

    def revoke(self, work: str, *, message: str) -> bool:
        with self._at_once([("work", work)]):
            row = self.work_items.get(work)
            revocable = (State.NEW, State.PROCESSING, State.FAILED)
            if row is None or row.state not in revocable:
                return False
            if row.base is not None and not self._ends_run(row, message):
                return self._leave_run(row, message)
            if row.base is None and row.message != message:
                return False
            self.work_items[work] = replace(
                row,
                state=State.FAILED,
                final=1,
                owner=FREE,
                lease_until=0,
                error="revoked",
                due=None,
                line=None,
                parked=None,
                finished=self.now_us(),
            )
            return True

    def _ends_run(self, row: Work, message: str) -> bool:
        """Return whether this message ends a run if it is revoked: that of its call, or its
        first."""
        if row.call is not None:
            return message_of(row) == message
        return row.id == run_id(str(row.base), message)

    def _leave_run(self, row: Work, message: str) -> bool:
        """Return whether the message was at work. Other messages of its run may continue that."""
        if row.state is not State.PROCESSING or row.message != message:
            return False
        due = None if row.call is None else self.now_us()
        given_back = {"state": State.NEW, "owner": FREE, "lease_until": 0, "due": due}
        self.work_items[row.id] = replace(row, **given_back)
        return True

    def expire(
        self, work: str, *, message: MessageRef, retries: int | None = None, due: bool = False
    ) -> bool:
        with self._at_once([("work", work)]):
            row = self.work_items.get(work)
            if row is None or not waits_for(row, message, self.now_us()):
                return False
            if due and not is_over(row, self.now_us()):
                return False
            again = message.retries + 1 if retries is None else retries
            left = {"call": None, "sends": None, "due": None, "line": None}
            row = replace(row, **left, parked=None, expires=None, retries=again)
            if row.state is not State.FAILED or not row.final:
                now_us = self.now_us()
                values = {"error": EXPIRED, "lease_until": 0, "finished": now_us, "owner": FREE}
                row = replace(row, state=State.FAILED, final=int(row.base is not None), **values)
            self.work_items[work] = row
            named = message.name, work
            self.numbers[named] = max((again, 0), self.numbers.get(named, (0, 0)))
            return True

    def renew(self, claims: Sequence[Claim]) -> list[str]:
        with self._mutex:
            return [self._renew(claim) for claim in claims]

    def _renew(self, claim: Claim) -> str:
        if self.held_records(claim, State.DONE):
            return Renewal.SKIPPED
        records = self.held_records(claim)
        if (claim.work is not None and not records) or not self.keys_are_held(claim):
            return Renewal.TAKEN
        if any(row in self._locked for row in self.rows_of(claim)):
            return Renewal.SKIPPED
        until_us = self.now_us() + int(claim.request.ttl_s * 1e6)
        for key in claim.keys:
            self.keys[key] = replace(self.keys[key], lease_until=until_us)
        for work in records:
            due = None if work.due is None else until_us
            self.work_items[work.id] = replace(work, lease_until=until_us, due=due)
        return Renewal.RENEWED

    def defer(self, request: ClaimRequest, publish: Callable[[int], None]) -> bool:
        by, request = object(), self.of_run(request)
        row, deferrals = self.numbered(request, request.work), request.message.deferrals + 1
        number = request.message.retries, deferrals
        try:
            with self.locking(by, [("message", f"{row}")]):
                if self.numbers.get(row, (0, 0)) >= number:
                    return False
            publish(deferrals)  # others may go on meanwhile; the message's row stays locked
            # A replacement writes its number without this row's lock. Its number is the higher one.
            self.numbers[row] = max(number, self.numbers.get(row, number))
            return True
        finally:
            self.unlock(by)

    # -- for people ---------------------------------------------------------------------------

    def view(self, work: str) -> WorkView | None:
        row = self.work_items.get(work)
        return None if row is None else view_of(row)

    def holds(self, keys: tuple[str, ...], owner: Owner) -> bool:
        return any(self.keys[key].owner == str(owner) for key in keys if key in self.keys)

    def done_elsewhere(self, request: ClaimRequest) -> str | None:
        mine = request.message.name, request.task, State.DONE
        known = request.work, *request.formerly
        for work in self.work_items.values():
            if (work.message, work.task, work.state) == mine and work.id not in known:
                return work.id
        return None

    def check_schema(self, rows: Any = ()) -> None:
        """Do nothing: there is no schema."""

    def create_schema(self) -> None:
        """Do nothing: there is no schema."""

    def close(self) -> None:
        """Do nothing."""

    def count_effects(self) -> Counter[str]:
        """Return how often each item was written."""
        return Counter(str(each[0]) for each in self.effects)
