"""Runs of work that may be done again (`once_per="run"`), for the ledger in memory.

Guarantees what `taskguard/ledger/runs.py` does in the databases, and passes the same contract
suite. `model/runs.py` decides for both. A pointer is locked like a row, and what a claim, a parking
or an enqueue writes of it changes at the moment of their other writes.

A membership is an entry of `numbers`, which also has the numbers of the message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from taskguard.errors import LedgerUnavailableError
from taskguard.ledger.records import message_of
from taskguard.ledger.runs import _NOBODY_CONTINUED, _has_ended, _open_run, will_be_sent
from taskguard.ledger.statements.runs import AWAITS_ANOTHER
from taskguard.ledger.tables import NO_POSITION
from taskguard.model.claims import Answer, Busy, ClaimAnswer, Claimed, ClaimRequest
from taskguard.model.lease import Owner
from taskguard.model.runs import FAILED_RUN, RUN, Resolved, resolve, run_id
from taskguard.model.states import Decision, State

if TYPE_CHECKING:
    from simulation.ledger import MemoryTransaction, Work

__all__ = ["Pointer", "RunOfMessage", "Runs"]

_FREE = ""


@dataclass(frozen=True, slots=True)
class Pointer:
    """A row of the table of runs."""

    open: str | None = None
    follows: str | None = None


class _Rows(Protocol):
    """The parts of the ledger that this module uses."""

    pointers: dict[str, Pointer]
    work_items: dict[str, Work]
    numbers: dict[tuple[str, str | None], tuple[int, int]]
    lock_timeout_s: float
    put_off_s: float

    def now_us(self) -> int: ...
    def locking(
        self, by: object, rows: Sequence[tuple[str, str | None]], timeout_s: float = ...
    ) -> AbstractContextManager[None]: ...
    def unlock(self, by: object) -> None: ...
    def claim_work(self, request: ClaimRequest) -> ClaimAnswer: ...
    def peek_work(self, request: ClaimRequest) -> ClaimAnswer: ...
    def run_of(
        self, request: ClaimRequest, tx: MemoryTransaction | None = None
    ) -> RunOfMessage: ...
    def settle(self, run: RunOfMessage, tx: MemoryTransaction | None = None) -> None: ...
    def has_just_ended(self, run: RunOfMessage) -> bool: ...
    def locked_run_of(self, by: object, request: ClaimRequest) -> RunOfMessage: ...
    def awaits_another(self, request: ClaimRequest) -> bool: ...
    def put_off(self, row: Work, request: ClaimRequest) -> None: ...
    def park_work(self, by: object, request: ClaimRequest, *, only_new: bool) -> bool: ...


@dataclass(slots=True)
class RunOfMessage:
    """The run of one request: see `taskguard.ledger.runs.Run`."""

    request: ClaimRequest
    found: Resolved
    base: str
    pointer: Pointer
    open_row: Work | None
    follows: str | None
    now_us: int

    @property
    def is_new(self) -> bool:
        return self.found.opens and self.found.joins and self.found.work != self.follows

    @property
    def busy(self) -> Busy:
        row = self.open_row
        assert row is not None
        holds = row.state is State.PROCESSING and row.lease_until > self.now_us
        if not holds:
            return Busy(None, None, same_work=True, started=True)
        after_s = (row.lease_until - self.now_us) / 1e6
        return Busy(Owner.parse(row.owner), after_s, same_work=True, started=True)

    def named(self, answer: ClaimAnswer) -> ClaimAnswer:
        """Return an Answer with the id of the run, and of a later one."""
        if not isinstance(answer, Answer):
            return answer
        newest = self.follows or self.pointer.open
        later = None
        if answer.decision is Decision.FAILED and newest != self.request.work:
            later = newest
        return replace(answer, recorded_as=self.request.work, later=later)


class Runs:
    """The part of a ledger that finds the run of a message, and keeps which run is open."""

    def run_of(
        self: _Rows, request: ClaimRequest, tx: MemoryTransaction | None = None
    ) -> RunOfMessage:
        """Return the run of a request, as the transaction `tx` sees it."""
        base, name = str(request.work), request.message.name
        pointer = self.pointers.get(base, Pointer())
        work_items, numbers = dict(self.work_items), dict(self.numbers)
        if tx is not None:
            pointer = tx.pointers.get(base, pointer)
            work_items.update(tx.work_items)
            numbers.update(tx.joined)
        now_us, open_row = self.now_us(), work_items.get(pointer.open or "")
        after = work_items.get(pointer.follows or "")
        follows = None if _has_ended(after) else pointer.follows
        joined = _run_joined(numbers, base, name)
        if joined is None and request.message.sending:
            joined = _failed_before(numbers, work_items, base, request)
            request = replace(request, resumes=request.resumes or joined is not None)
        if joined is None and base in work_items and work_items[base].message == name:
            joined = base
        found = resolve(
            run_id(base, name),
            member_of=joined,
            open_run=_open_run(pointer, open_row, now_us),
            follows=follows,
        )
        if request.resumes:
            found, request = _resumed(found, request, open_row, follows)
        of_run = None if found.work == base else base
        request = replace(request, work=found.work, base=of_run, by_run=False)
        row = work_items.get(found.work)
        if joined is not None and not found.waits:
            if row is None:
                request = replace(request, may_create=False, row=None)
            elif _has_ended(row) and not request.resumes:
                request = replace(request, row=None)
        return RunOfMessage(request, found, base, pointer, open_row, follows, now_us)

    def settle(self: _Rows, run: RunOfMessage, tx: MemoryTransaction | None = None) -> None:
        """Write what the claim, the parking or the enqueue means for the pointer and the member.

        In a transaction of the user's, others see it when that commits.
        """
        found = run.found
        if found.ends is not None:
            assert run.open_row is not None
            self.work_items[found.ends] = _not_continued(run.open_row, run.now_us)
        pointers = self.pointers if tx is None else tx.pointers
        if found.opens:
            pointers[run.base] = Pointer(open=found.work)
        if found.joins:
            join(self.numbers if tx is None else tx.joined, run.request)

    def claim_run(self: _Rows, request: ClaimRequest) -> ClaimAnswer:
        """Find the run of the message, and claim it, in one transaction."""
        by = object()
        try:
            with self.locking(by, [("run", request.work)], self.lock_timeout_s):
                pass
            while True:
                run = self.locked_run_of(by, request)
                if run.found.waits:
                    return run.busy
                peeked = self.peek_work(run.request)
                if not isinstance(peeked, Answer) and self.awaits_another(run.request):
                    return AWAITS_ANOTHER
                answer = self.claim_work(run.request)
                if isinstance(answer, Claimed) or _is_dead(answer):
                    self.settle(run)
                elif isinstance(answer, Answer) and self.has_just_ended(run):
                    continue  # it ended while this claim waited for its row
                return run.named(answer)
        except LedgerUnavailableError:
            return Busy(None, None, same_work=False, started=True)
        finally:
            self.unlock(by)

    def locked_run_of(self: _Rows, by: object, request: ClaimRequest) -> RunOfMessage:
        """Return the run of a request, and lock the record of a run that it would end."""
        run = self.run_of(request)
        if run.found.ends is None:
            return run
        with self.locking(by, [("work", run.found.ends)], self.lock_timeout_s):
            return self.run_of(request)

    def has_just_ended(self: _Rows, run: RunOfMessage) -> bool:
        """Return whether the open run ended while a message that is no member waited for it."""
        was_open = run.found.joins and not run.found.opens
        return was_open and _has_ended(self.work_items.get(run.found.work))

    def awaits_another(self: _Rows, request: ClaimRequest) -> bool:
        """Return whether a run waits for the message of its stored call, which is not this one."""
        row = self.work_items.get(str(request.work))
        return row is not None and _awaits_another(request, row, self.now_us())

    def park_run(self: _Rows, request: ClaimRequest, *, only_new: bool) -> bool:
        """Find the run of the message, and park it, in one transaction."""
        by = object()
        try:
            with self.locking(by, [("run", request.work)]):
                pass
            run = self.locked_run_of(by, request)
            parked = not run.found.waits and self.park_work(by, run.request, only_new=only_new)
            if parked:
                self.settle(run)
            return parked
        finally:
            self.unlock(by)

    def peek_run(self: _Rows, request: ClaimRequest) -> ClaimAnswer:
        """Return what a claim would find, without claiming."""
        run = self.run_of(request)
        found = self.peek_work(run.request)
        if isinstance(found, Answer) and found.decision is Decision.SUPERSEDED:
            return run.named(found)
        if run.found.waits:
            return run.busy
        if self.awaits_another(run.request):
            return AWAITS_ANOTHER
        if isinstance(found, Answer) and found.decision is Decision.DEAD and run.found.joins:
            return AWAITS_ANOTHER  # this message joins the run by a claim or a deferral
        return run.named(found)

    def of_run(self: _Rows, request: ClaimRequest) -> ClaimRequest:
        """Return the request with the id of the run that its message has joined, if it has."""
        base = str(request.work)
        joined = None
        if request.by_run:
            joined = _run_joined(self.numbers, base, request.message.name)
        return request if joined is None else replace(request, work=joined, base=base, by_run=False)

    def join(self: _Rows, request: ClaimRequest) -> None:
        """Make the message a member of the open run of its work, if there is one."""
        if not request.by_run:
            return
        by = object()
        try:
            with self.locking(by, [("run", request.work)]):
                run = self.run_of(request)
                row = self.work_items.get(run.found.work)
                if run.found.waits and row is not None:
                    self.put_off(row, request)
                elif run.found.joins and not run.is_new:
                    self.settle(run)
        finally:
            self.unlock(by)

    def later_run(self: _Rows, base: str, work: str) -> str | None:
        """Return the run that keeps this one from being resumed. Otherwise it is the open one."""
        pointer = self.pointers.get(base, Pointer())
        if pointer.open == work and not _has_ended(self.work_items.get(work)):
            return None
        for later in (pointer.follows, pointer.open):
            if later not in (None, work) and not _has_ended(self.work_items.get(str(later))):
                return later
        self.pointers[base] = Pointer(open=work)
        return None

    def put_off(self: _Rows, row: Work, request: ClaimRequest) -> None:
        """Let a sweep send the message of the run that follows only much later."""
        stored = row.state is State.NEW and row.due is not None
        if stored and row.message == request.message.name:
            due = self.now_us() + int(self.put_off_s * 1e6)
            self.work_items[row.id] = replace(row, due=due, sends=None)


def join(numbers: dict[tuple[str, str | None], tuple[int, int]], request: ClaimRequest) -> None:
    """Make the message a member of the run that is the request's work."""
    message = request.message
    numbers.setdefault((message.name, request.work), message.number)


def _is_dead(answer: ClaimAnswer) -> bool:
    return isinstance(answer, Answer) and answer.decision in (Decision.DEAD, Decision.BURY)


def _run_joined(numbers: Iterable[tuple[str, str | None]], base: str, message: str) -> str | None:
    """Return the run of this base that the message has joined, or None."""
    of_base = f"{base}{RUN}"
    return next((w for name, w in numbers if name == message and w and w.startswith(of_base)), None)


def _failed_before(
    numbers: Iterable[tuple[str, str | None]],
    work_items: Mapping[str, Work],
    base: str,
    request: ClaimRequest,
) -> str | None:
    """Return the run of another sending of this message id that has given up, or None."""
    id_, of_base = request.message.id, f"{base}{RUN}"
    for name, work in numbers:
        if name != id_ and not name.startswith(f"{id_}@"):
            continue
        row = work_items.get(work or "")
        if row is not None and row.id.startswith(of_base) and row.final == FAILED_RUN:
            return row.id
    return None


def _resumed(
    found: Resolved, request: ClaimRequest, open_row: Work | None, follows: str | None
) -> tuple[Resolved, ClaimRequest]:
    """Let a message resume its FAILED run, unless a later run is open or follows."""
    is_open = open_row is not None and open_row.id == found.work
    if follows is not None or not (is_open or _has_ended(open_row)):
        return found, replace(request, resumes=False)
    return replace(found, opens=True, joins=True), request


def _awaits_another(request: ClaimRequest, row: Work, now_us: int) -> bool:
    if not will_be_sent(row) or message_of(row) == request.message.name or _has_ended(row):
        return False
    works = row.state is State.PROCESSING and row.lease_until > now_us
    return not works and row.state is not State.DEAD


def _not_continued(row: Work, now_us: int) -> Work:
    """Return the record of a lapsed run after the run that follows took its place."""
    return replace(
        row,
        state=State.FAILED,
        final=FAILED_RUN,
        owner=_FREE,
        lease_until=0,
        error=_NOBODY_CONTINUED,
        call=None,
        due=None,
        finished=now_us,
        **NO_POSITION,
    )
