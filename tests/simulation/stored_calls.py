"""Stored messages, for the ledger in memory: the outbox, and the lines of keys.

Guarantees what `ledger/parts/outbox.py`, `ledger/unique.py` and `ledger/lines/` do in the
databases, and passes the same contract suites. Each change happens at one moment, over rows that no
other transaction has locked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from simulation.runs import Pointer, RunOfMessage, join
from taskguard.errors import LineFullError
from taskguard.ledger.lines.park import position_of
from taskguard.ledger.records import ToSend, expiry_of, message_of, overdue_of, waiting_values
from taskguard.ledger.tables import NO_POSITION
from taskguard.ledger.unique import Sent
from taskguard.model.bounds import NO_RATES, Bounds, Rate, is_slot
from taskguard.model.claims import Claim, ClaimRequest, Overdue
from taskguard.model.lease import Owner
from taskguard.model.line_states import LineState
from taskguard.model.records import Existing, Once, Seen, Waiting
from taskguard.model.runs import FAILED_RUN, Resolved, run_id
from taskguard.model.states import State

if TYPE_CHECKING:
    from simulation.ledger import KeyRow, MemoryTransaction, Work

__all__ = [
    "SUPERSEDED",
    "StoredCalls",
    "is_expected",
    "is_in_line",
    "is_open",
    "is_unnotified",
    "keeps",
    "may_park",
    "to_send",
    "waits_again",
]

SUPERSEDED = (2**31 - 1, 2**31 - 1)
"""The number of a message that was replaced."""

_OPEN = (State.NEW, State.PROCESSING)
# FAILED work is due only if it keeps its position, or its caller has to learn that it lost it.
_SENDABLE = (*_OPEN, State.FAILED, State.DONE)
_LAST = 2**63 - 1
_BEFORE_CLAIM = (LineState.WAITING, LineState.PROMOTED, LineState.RESENT, LineState.EXPIRED)


class Rows(Protocol):
    """The parts of the ledger that this module uses."""

    keys: dict[str, KeyRow]
    work_items: dict[str, Work]
    numbers: dict[tuple[str, str | None], tuple[int, int]]

    def now_us(self) -> int: ...
    def is_locked(self, row: tuple[str, str | None]) -> bool: ...
    def is_held(self, key: str) -> bool: ...
    def pause_of(self, keys: tuple[str, ...]) -> Owner | None: ...
    def new_work(self, request: ClaimRequest, **values: Any) -> Work: ...
    def locking(
        self, by: object, rows: Sequence[tuple[str, str | None]]
    ) -> AbstractContextManager[None]: ...
    def unlock(self, by: object) -> None: ...
    def begin_plain(self) -> MemoryTransaction: ...
    def commit(self, tx: MemoryTransaction) -> None: ...
    def run_of(
        self, request: ClaimRequest, tx: MemoryTransaction | None = None
    ) -> RunOfMessage: ...
    def settle(self, run: RunOfMessage, tx: MemoryTransaction | None = None) -> None: ...
    def has_just_ended(self, run: RunOfMessage) -> bool: ...
    def park_run(self, request: ClaimRequest, *, only_new: bool) -> bool: ...
    def park_work(self, by: object, request: ClaimRequest, *, only_new: bool) -> bool: ...


class StoredCalls:
    """The part of a `LineLedger` that `Ledger` does not have."""

    # -- the outbox ---------------------------------------------------------------------------

    def enqueue(
        self: Rows,
        db: MemoryTransaction | None,
        request: ClaimRequest,
        *,
        due_in_s: float = 5.0,
        once: Once | None = None,
    ) -> str:
        """Store work in the user's transaction, or in one of its own. Return its id."""
        tx = self.begin_plain() if db is None else db
        try:
            enqueue = _Enqueue(self, tx, request, once, self.now_us() + int(due_in_s * 1e6))
            work = enqueue.write_run() if request.by_run else str(request.work)
            if not request.by_run:
                enqueue.write()
            if db is None:
                self.commit(tx)
            return work
        finally:
            if db is None:
                self.unlock(tx)

    def overdue(
        self: Rows,
        *,
        limit: int = 1000,
        after: Overdue | None = None,
        work: str | None = None,
        parked: bool | None = None,
    ) -> list[Overdue]:
        now_us = self.now_us()

        def is_due(row: Work) -> bool:
            if row.due is None or row.call is None or row.state not in _SENDABLE:
                return False
            if parked is not None and parked != (row.line is not None):
                return False
            if after is not None and (row.due, row.id) <= (after.due_us, after.work):
                return False
            if work is not None:
                return row.id == work
            return row.due <= now_us and not self.is_locked(("work", row.id))

        found = sorted(filter(is_due, self.work_items.values()), key=lambda row: (row.due, row.id))
        return [
            replace(overdue_of(to_send(self, row)), keeps_position=is_in_line(row) and keeps(row))
            for row in found[:limit]
        ]

    def sent(
        self: Rows, items: Sequence[Overdue], *, again_after_s: float | None, counted: bool = True
    ) -> int:
        again_us = None if again_after_s is None else self.now_us() + int(again_after_s * 1e6)
        noted = 0
        for item in items:
            row = self.work_items.get(item.work)
            if row is None or row.due != item.due_us or row.state not in _SENDABLE:
                continue
            if self.is_locked(("work", row.id)) or (is_in_line(row) and not counted):
                continue
            if again_us is None and not (is_in_line(row) and keeps(row)):
                continue
            line, sends = row.line, row.sends
            if again_us is None:
                line = LineState.WAITING
            elif counted and line in (LineState.PROMOTED, LineState.EXPIRED):
                line = LineState.RESENT
            if counted:
                sends = (row.sends or 0) + 1
            self.work_items[row.id] = replace(row, due=again_us, line=line, sends=sends)
            noted += 1
        return noted

    def abandon(self: Rows, work: Overdue, *, error: str) -> bool:
        by, now_us = object(), self.now_us()
        try:
            with self.locking(by, [("work", work.work)]):
                row = self.work_items.get(work.work)
                if row is None or (row.due, row.attempts) != (work.due_us, work.attempts):
                    return False
                if is_unnotified(row):
                    self.work_items[row.id] = replace(row, due=None, line=None, parked=None)
                    return True
                if row.final or (row.state is State.PROCESSING and not _left(row, now_us)):
                    return False
                self.work_items[row.id] = replace(
                    row,
                    state=State.FAILED,
                    final=0,
                    owner="",
                    lease_until=0,
                    error=error,
                    sends=None,
                    due=None,
                    line=None,
                    parked=None,
                    finished=now_us,
                )
                return True
        finally:
            self.unlock(by)

    # -- lines --------------------------------------------------------------------------------

    def park(self: Rows, request: ClaimRequest, *, only_new: bool = False) -> bool:
        if request.by_run:
            return self.park_run(request, only_new=only_new)
        by = object()
        try:
            return self.park_work(by, request, only_new=only_new)
        finally:
            self.unlock(by)

    def park_work(self: Rows, by: object, request: ClaimRequest, *, only_new: bool) -> bool:
        """Park in the transaction `by`."""
        now_us = self.now_us()
        with self.locking(by, [("work", work) for work in (request.work, *request.formerly)]):
            row = self.work_items.get(str(request.work))
            former = _records(self, request.formerly)
            message = request.message.name
            numbered = (message, request.work) in self.numbers
            if only_new and (row is not None or numbered):
                return False
            of_work = (request.work, *request.formerly)
            if any(self.numbers.get((message, work)) == SUPERSEDED for work in of_work):
                return False
            if _is_full(self, (row, *former), request):
                fresh = row is not None and row.line is None and not row.attempts
                if fresh and row.message == message:
                    refused = {"state": State.FAILED, "due": None, "finished": now_us}
                    refused["final"] = 0 if row.base is None else FAILED_RUN
                    self.work_items[row.id] = replace(row, **refused)
                raise LineFullError(f"{request.max_waiting} messages wait", key=request.keys[0])
            if not all(may_park(each, request) for each in (row, *former) if each):
                return False
            kept = [each.parked for each in former if each.parked is not None]
            for each in former:
                left = replace(each, call=None, sends=None, due=None)
                self.work_items[each.id] = replace(left, **NO_POSITION)
            before = self.new_work(request) if row is None else row
            place = position_of(request, now_us, LineState.WAITING)
            if before.parked is not None:
                place["parked"] = before.parked
            elif kept:
                place["parked"] = min(kept)
            elif before.state is State.FAILED and not request.strict:
                place["parked"] = now_us
            waits = waits_again(before, request, due=None)
            place["expires"] = expiry_of(before, request)
            self.work_items[before.id] = replace(waits, **place)
            return True

    def keep(self: Rows, claim: Claim, *, retries: int, call: str | None, due_in_s: float) -> bool:
        again: dict[str, Any] = {} if call is None else {"call": call, "sends": None}
        due = self.now_us() + int(due_in_s * 1e6)
        return _change_kept(self, claim, retries=retries, due=due, **again)

    def leave(self: Rows, claim: Claim, *, retries: int) -> bool:
        return _change_kept(self, claim, retries=retries, due=None, line=None, parked=None)

    def promote_next(
        self: Rows,
        key: str,
        *,
        expected_s: float,
        app: str = "",
        queues: Sequence[str] | None = None,
        bounds: Bounds | None = None,
        ahead_s: float | None = None,
        rates: Mapping[str, Rate | None] = NO_RATES,
    ) -> Overdue | None:
        del rates
        by, ahead_us = object(), int((ahead_s or 0.0) * 1e6)
        first = _first(self.work_items.values(), key)
        if first is None:
            return None
        try:
            with self.locking(by, [("work", first.id)]):
                now_us = self.now_us()
                wait_us = room(self, first, now_us, bounds)
                if self.work_items.get(first.id) != first or wait_us is None or wait_us > ahead_us:
                    return None
                if not _is_for(first, app, queues):
                    return None
                line = LineState.KEPT if first.strict else LineState.PROMOTED
                due = now_us + wait_us + int(expected_s * 1e6)
                expected = replace(first, line=line, due=due)
                self.work_items[first.id] = expected
                return overdue_of(to_send(self, expected)._replace(wait_us=wait_us))
        finally:
            self.unlock(by)

    def look(
        self: Rows,
        *,
        app: str = "",
        queues: Sequence[str] | None = None,
        ahead_s: float = 0.0,
        after: str | None = None,
        most: int = 1000,
        announce: str | None = None,
        rates: Mapping[str, Rate | None] = NO_RATES,
    ) -> Seen:
        del announce, rates
        now_us = self.now_us()

        def has_room(row: Work) -> bool:
            wait_us = room(self, row, now_us, None)
            return wait_us is not None and wait_us <= ahead_s * 1e6

        rows = [row for row in self.work_items.values() if row.parked is not None]
        rows = [row for row in rows if after is None or row.key > after]
        page = sorted(rows, key=lambda row: (row.key, _place(row)))[:most]
        keys = dict.fromkeys(row.key for row in page)
        firsts = [first for key in keys if (first := _first(rows, key)) is not None]
        mine = [row.key for row in firsts if _is_for(row, app, queues) and has_room(row)]
        placed = (row for row in self.work_items.values() if row.parked is not None)
        past = [row for row in placed if row.expires is not None and row.expires <= now_us]
        return Seen(
            tuple(mine),
            page[-1].key if len(page) == most else None,
            expired=any(row.line == LineState.WAITING for row in past),
            overdue=bool(self.overdue(limit=1, parked=True)),
        )

    def expired(
        self: Rows, *, app: str = "", queues: Sequence[str] | None = None, limit: int = 1000
    ) -> list[Overdue]:
        now_us = self.now_us()
        past = [
            row
            for row in self.work_items.values()
            if row.line == LineState.WAITING and row.expires is not None
            if row.expires <= now_us and _is_for(row, app, queues)
            if not self.is_locked(("work", row.id))
        ]
        past.sort(key=lambda row: (row.expires, row.id))
        found = [
            replace(row, line=LineState.KEPT if row.strict else LineState.EXPIRED, due=row.expires)
            for row in past[:limit]
        ]
        self.work_items.update({row.id: row for row in found})
        return [overdue_of(to_send(self, row)) for row in found]

    def waiting(self: Rows, key: str | None = None, *, limit: int = 100) -> list[Waiting]:
        rows = [
            row
            for row in self.work_items.values()
            if is_in_line(row) or (keeps(row) and row.state is State.FAILED)
        ]
        rows = [row for row in rows if key in (None, row.key)]
        rows.sort(key=lambda row: (row.key, _place(row), row.id))
        return [
            Waiting(
                row.key,
                row.id,
                row.message,
                (row.parked or 0) / 1e6,
                LineState(row.line),
                None if row.due is None else row.due / 1e6,
                failed=row.state is State.FAILED,
                sent_again=row.sends or 0,
            )
            for row in rows[:limit]
        ]

    def is_behind(self: Rows, request: ClaimRequest, *, room: int = 1) -> bool:
        """Return whether earlier work waits, or has begun and not ended.

        If several slots are free, return whether as much promoted work takes them all.
        """
        now_us, ids = self.now_us(), (str(request.work), *request.formerly)
        places = []
        records = _records(self, ids)
        if any(mine.state is State.PROCESSING for mine in records):
            return False
        for mine in records:
            if mine.line is not None and mine.message == request.message.name:
                places.append(_place(mine))
            elif is_in_line(mine) and not _was_sent_again(mine):
                return True  # nothing else would answer that message
        place = min(places, default=(request.rank, _LAST))
        before = [
            row.line
            for row in self.work_items.values()
            if row.key in request.lines
            and row.id not in ids
            and _place(row) < place
            and (keeps(row) or _is_awaited(row, now_us))
            and not (request.newest is not None and row.task == request.task)
        ]
        return LineState.WAITING in before or len(before) >= room


def is_open(ledger: Rows, first: Work, now_us: int) -> bool:
    """Return whether the key is free, no promoted message is on its way, and no earlier work keeps
    its position."""
    if ledger.is_held(first.key):
        return False
    return not any(
        row.key == first.key
        and (is_expected(row, now_us) or (keeps(row) and _place(row) < _place(first)))
        for row in ledger.work_items.values()
    )


def room(ledger: Rows, first: Work, now_us: int, bounds: Bounds | None) -> int | None:
    """Return in how many µs this work may begin if it is promoted now, or None if no work may be
    promoted."""
    key = first.key
    noted = ledger.keys.get(key)
    slots, next_start = (None, None) if noted is None else (noted.slots, noted.next_start)
    limit = bounds.limit if bounds is not None else slots or 1
    if limit == 1 and not is_open(ledger, first, now_us):
        return None
    expected = sum(
        row.key == key and is_expected(row, now_us) for row in ledger.work_items.values()
    )
    if limit > 1:
        held = sum(is_slot(each, of=key) and ledger.is_held(each) for each in ledger.keys)
        if ledger.is_held(key) or expected + held >= limit:
            return None
    opens_us = next_start or 0
    if bounds is not None and bounds.rate is not None:
        opens_us = bounds.rate.opens_us(next_start, now_us)
        for _ in range(expected):
            opens_us = bounds.rate.charged_us(opens_us, max(opens_us, now_us))
    elif expected and next_start is not None:
        return None
    return max(0, opens_us - now_us)


def _is_awaited(row: Work, now_us: int) -> bool:
    """Return whether it waits, or was promoted a short while ago."""
    return row.line == LineState.WAITING or is_expected(row, now_us)


def _was_sent_again(row: Work) -> bool:
    return row.line == LineState.RESENT or (keeps(row) and bool(row.sends))


def keeps(row: Work) -> bool:
    """Return whether it is strict, was sent or has begun, and has not ended."""
    return row.line == LineState.KEPT


def _place(row: Work) -> tuple[int, int]:
    return row.rank or 0, row.parked or 0


def _records(ledger: Rows, ids: Sequence[str]) -> list[Work]:
    return [ledger.work_items[each] for each in ids if each in ledger.work_items]


def _is_full(ledger: Rows, records: Sequence[Work | None], request: ClaimRequest) -> bool:
    known = any(row and (row.parked or row.attempts or row.final) for row in records)
    if request.max_waiting is None or known or ledger.pause_of(request.lines) is not None:
        return False
    of_key = [each for each in ledger.work_items.values() if each.key in request.lines]
    return sum(map(is_in_line, of_key)) >= request.max_waiting


def _change_kept(ledger: Rows, claim: Claim, **values: Any) -> bool:
    by = object()
    try:
        with ledger.locking(by, [("work", claim.work)]):
            row = ledger.work_items.get(str(claim.work))
            mine = State.FAILED, claim.fence, str(claim.owner)
            if row is None or not keeps(row) or (row.state, row.fence, row.owner) != mine:
                return False
            ledger.work_items[row.id] = replace(row, **values)
            return True
    finally:
        ledger.unlock(by)


def is_expected(row: Work, now_us: int) -> bool:
    """Return whether it was promoted a short while ago."""
    return row.line == LineState.PROMOTED and (row.due or 0) > now_us


def is_in_line(row: Work) -> bool:
    """Return whether it is NEW, and in the line of its key, promoted or not."""
    return row.line in _BEFORE_CLAIM or (keeps(row) and row.state is State.NEW)


def is_unnotified(row: Work) -> bool:
    """Return whether a newer message superseded it while it waited, and its caller was not notified
    yet."""
    return row.line == LineState.SUPERSEDED


def _first(rows: Iterable[Work], key: str) -> Work | None:
    waiting = (row for row in rows if row.key == key and row.line == LineState.WAITING)
    return min(waiting, key=lambda row: (_place(row), row.id), default=None)


def _is_for(row: Work, app: str, queues: Sequence[str] | None) -> bool:
    call = json.loads(row.call or "{}")
    return call.get("app", "") == app and (queues is None or call.get("queue") in queues)


def may_park(row: Work, request: ClaimRequest) -> bool:
    """Return whether the work may wait for this message."""
    same = row.message == request.message.name
    if same and row.retries > request.message.retries:
        return False
    if row.state is State.NEW:
        return row.call is None or same
    return row.state is State.FAILED and not row.final and (row.line is None or same)


def waits_again(row: Work, request: ClaimRequest, *, due: int | None, **values: Any) -> Work:
    """Return the work's record after it waits for this message."""
    waits = waiting_values(request, due=due)
    return replace(row, **{**waits, "state": State(waits["state"]), **values})


def _left(row: Work, now_us: int) -> bool:
    return row.state is State.PROCESSING and row.lease_until <= now_us


def to_send(ledger: Rows, row: Work) -> ToSend:
    """Return the message that is sent for the work."""
    known = ledger.numbers.get((message_of(row), row.id), (None, None))
    call, due = row.call or "", row.due or 0
    return ToSend(
        row.id,
        row.task,
        row.message,
        row.retries,
        call,
        due,
        row.attempts,
        row.sends,
        *known,
    )


class _Enqueue:
    """One enqueue, in one transaction."""

    def __init__(
        self,
        ledger: Rows,
        tx: MemoryTransaction,
        request: ClaimRequest,
        once: Once | None,
        due_us: int,
    ) -> None:
        self.ledger = ledger
        self.tx = tx
        self.request = request
        self.once = once
        self.due_us = due_us
        self.work = str(request.work)

    def write_run(self) -> str:
        """Write the work as the open run, or as the one that follows it. Return that run's id."""
        ledger, tx, asked = self.ledger, self.tx, self.request
        with ledger.locking(tx, [("run", self.work)]):
            pass
        while True:
            run = ledger.run_of(asked, tx)
            if not run.found.joins:
                return run.found.work  # an earlier COMMIT got no answer
            if run.follows is not None and not run.found.opens:
                run.found = Resolved(run.follows, joins=True)
                run.request = replace(run.request, work=run.follows)
            self._ask(run.request)
            sent = self.write()
            if sent is None:
                return run.found.work
            if sent.follows or not ledger.has_just_ended(run):
                break
        run.request = sent.request
        if sent.follows:
            work = run_id(run.base, sent.request.message.name)
            run.request = replace(sent.request, work=work)
            tx.pointers[run.base] = Pointer(run.pointer.open, follows=work)
            join(tx.joined, run.request)
            self.once = None
            self._ask(run.request)
            self.write()
        else:
            ledger.settle(run, tx)
        return str(run.request.work)

    def _ask(self, request: ClaimRequest) -> None:
        self.request, self.work = request, str(request.work)

    def write(self) -> Sent | None:
        """Write the work, and return what is sent."""
        row = self._row()
        if row is not None and row.state is State.PROCESSING and self._is_alive(row):
            return self._tell(row)  # the row of a live holder is not locked
        with self.ledger.locking(self.tx, [("work", self.work)]):
            row = self._row()
            if row is None:
                new = self.ledger.new_work(self.request)
                row = waits_again(new, self.request, due=self.due_us, **self._place())
                self._put(row)
            else:
                row = self._again(row)
            return self._tell(row)

    def _place(self) -> dict[str, Any]:
        """Return the columns of its position, if the request is strict."""
        if not self.request.strict:
            return {}
        return position_of(self.request, self.ledger.now_us(), LineState.KEPT)

    def _row(self) -> Work | None:
        return self.tx.work_items.get(self.work) or self.ledger.work_items.get(self.work)

    def _put(self, row: Work) -> None:
        self.tx.work_items[self.work] = row

    def _is_alive(self, row: Work) -> bool:
        return row.lease_until > self.ledger.now_us()

    def _again(self, row: Work) -> Work:
        """Enqueue known work again: FAILED becomes NEW, and work that nothing would send gets this
        call."""
        request, known = self.request, row.fingerprint
        fits = known is None or request.fingerprint is None or known == request.fingerprint
        if self._was_replaced():
            return row
        resumed = request.resumes and row.final == FAILED_RUN
        if row.state is State.FAILED and (not row.final or resumed):
            replaces = self.once is not None and self.once.replaces
            promised = self.once is not None and self._is_promised(row)
            if not replaces and (promised or not fits):
                return row
            values: dict[str, Any] = {"fingerprint": request.fingerprint, **NO_POSITION}
            if not replaces:
                values = {"fingerprint": known or request.fingerprint}
            elif row.message != request.message.name:
                self._supersede(row.message)
            values |= {"final": 0, **self._place()}
            self._put(waits_again(row, request, due=self.due_us, **values))
        elif row.state is State.NEW or self._takes_over(row):
            unsent = row.call is None or (row.due is None and row.line is None)
            if fits and unsent:
                self._put(replace(row, call=request.call, sends=None, due=self.due_us))
        return self._row() or row

    def _was_replaced(self) -> bool:
        """Return whether the call of this message was replaced."""
        numbered = self.request.message.name, self.work
        return SUPERSEDED in (self.tx.numbers.get(numbered), self.ledger.numbers.get(numbered))

    def _supersede(self, message: str) -> None:
        self.tx.numbers[message, self.work] = SUPERSEDED

    def _takes_over(self, row: Work) -> bool:
        """Return whether the call is stored for work whose holder has gone. A replacing call gets a
        run of its own, because the late holder may still complete the run."""
        replaces = self.once is not None and self.once.replaces and self.request.base is not None
        return _left(row, self.ledger.now_us()) and not replaces

    def _is_promised(self, row: Work) -> bool:
        """Return whether a retry of the FAILED work's message is expected."""
        return row.state is State.FAILED and not row.final and self._is_alive(row)

    def _tell(self, row: Work) -> Sent | None:
        """Report the work on record if it has another message, and replace it if `duplicate=` says
        so. Return what is sent."""
        message, request, once = message_of(row), self.request, self.once
        is_open = row.state in _OPEN or self._is_promised(row)
        if once is None or not is_open or message == request.message.name:
            return Sent(request)
        if once.replaces and self._was_replaced():
            return Sent(request)
        begun = row.state is not State.NEW or row.progress is not None
        existing = Existing(row.id, message, row.call, row.fingerprint, begun)
        instead = once.found(existing)
        if instead is None:
            return None
        instead = replace(instead, work=request.work, base=request.base, by_run=False)
        if begun:
            return Sent(instead, follows=True)
        values: dict[str, Any] = {"fingerprint": instead.fingerprint, **NO_POSITION}
        kept = {"lease_until": row.lease_until, "owner": row.owner, "error": row.error}
        again = waits_again(row, instead, due=self.due_us, **kept)
        self._put(replace(again, **values))
        if message != instead.message.name:
            self._supersede(message)
        return Sent(instead)
