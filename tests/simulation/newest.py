"""Messages that supersede each other, for the ledger in memory.

Guarantees what `taskguard/ledger/lines/newest.py` does in the databases, and passes the same
contract suite. Each change happens at one moment, over locked rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from simulation.stored_calls import Rows, is_in_line, is_unnotified, may_park, to_send, waits_again
from taskguard.ledger.decisions import Records
from taskguard.ledger.lines.newest import row_id_of
from taskguard.ledger.lines.park import position_of
from taskguard.ledger.records import expiry_of, overdue_of
from taskguard.model.claims import Answer, Busy, ClaimRequest, Overdue, ParkedNewest
from taskguard.model.line_states import LineState
from taskguard.model.states import OUTDATED, Decision, State, is_outdated, sent_at_us

if TYPE_CHECKING:
    from simulation.ledger import Work

__all__ = ["KeyRow", "NewestMessages"]

_FREE = ""
_NOTIFIED_US = 5_000_000
_SUPERSEDED = LineState.SUPERSEDED.value


@dataclass(frozen=True, slots=True)
class KeyRow:
    """A row of keys. Times are µs, as in the tables."""

    fence: int = 0
    owner: str = _FREE
    lease_until: int = 0
    slots: int | None = None
    next_start: int | None = None
    stamp: int | None = None


class _Rows(Rows, Protocol):
    """The parts of the ledger that this module uses."""

    def mark(self, request: ClaimRequest) -> KeyRow: ...
    def rows_beside(self, request: ClaimRequest) -> list[tuple[str, str | None]]: ...
    def is_outdated(self, sent_us: int, mark: KeyRow, waits: int | None) -> bool: ...
    def outdated(self, work: Work, by: str) -> Work: ...


class NewestMessages:
    """The part of a `LineLedger` by which a newer message supersedes an older one."""

    def rows_beside(self: _Rows, request: ClaimRequest) -> list[tuple[str, str | None]]:
        """Return the rows to lock in addition to key and work: the stamp, and work that may end."""
        others = [row.id for row in _others(self.work_items, request)]
        ends = [*others, self.mark(request).owner]
        return [("key", row_id_of(request)), *(("work", work) for work in ends if work)]

    def mark(self: _Rows, request: ClaimRequest) -> KeyRow:
        """Return the record of the newest message of the task and key that has begun."""
        return self.keys.get(row_id_of(request), KeyRow())

    def is_outdated(self: _Rows, sent_us: int, mark: KeyRow, waits: int | None) -> bool:
        """Return whether a newer message has begun, or waits."""
        return is_outdated(sent_us, others_us=[mark.stamp, waits])

    def outdated(self: _Rows, work: Work, by: str) -> Work:
        """Return the work's record after a newer message has superseded it."""
        return replace(
            work,
            state=State.FAILED,
            final=1,
            owner=_FREE,
            lease_until=0,
            error=f"{OUTDATED}: {by}",
            finished=self.now_us(),
        )

    def turn_away(self: _Rows, request: ClaimRequest, records: Records) -> Answer | Busy | None:
        """Refuse it as superseded for good, or as busy because the key has another holder than
        expected."""
        row: Any = records.own
        answer = _outdate(self, request, row, records.now_us)
        if answer is not None:
            return answer
        key, held_by = self.keys.get(request.keys[0], KeyRow()), request.held_by
        free = key.owner == str(request.owner) or key.lease_until <= records.now_us
        if held_by is not None and key.owner != str(held_by) and free:
            return Busy(None, None, same_work=False, started=row is not None and row.attempts > 0)
        return None

    def take_place(
        self: _Rows, request: ClaimRequest, records: Records, fence: int
    ) -> tuple[Overdue, ...]:
        """Record the message as the newest that has begun, and end older work that is not done."""
        mark, work = self.mark(request), str(request.work)
        older = self.work_items.get(mark.owner)
        begun = older is not None and older.state is State.PROCESSING
        if begun and older.id != work and older.fence == mark.fence:
            self.work_items[older.id] = replace(self.outdated(older, work), **_NOTIFIED)
        stamp_us = _sent_us(request, records.own, records.now_us)
        self.keys[row_id_of(request)] = KeyRow(fence, work, lease_until=0, stamp=stamp_us)
        return _replace_waiting(self, request)

    def park_newest(
        self: _Rows, request: ClaimRequest, *, only_new: bool = False
    ) -> ParkedNewest | Answer | None:
        by = object()
        try:
            with self.locking(by, [("work", request.work), *self.rows_beside(request)]):
                row = self.work_items.get(str(request.work))
                numbered = (request.message.name, request.work) in self.numbers
                if only_new and (row is not None or numbered):
                    return None
                if row is not None and not may_park(row, request):
                    return None
                now_us = self.now_us()
                answer = _outdate(self, request, row, now_us)
                if answer is not None:
                    return answer
                self.keys.setdefault(row_id_of(request), KeyRow())
                before = self.new_work(request) if row is None else row
                own = position_of(request, before.created, LineState.WAITING)
                place = {**own, "expires": expiry_of(before, request)}
                waits = waits_again(before, request, due=None)
                self.work_items[before.id] = replace(waits, **place)
                return ParkedNewest(_replace_waiting(self, request))
        finally:
            self.unlock(by)

    def note_notified(self: _Rows, work: str) -> None:
        by = object()
        try:
            with self.locking(by, [("work", work)]):
                row = self.work_items.get(work)
                if row is not None and is_unnotified(row):
                    self.work_items[work] = replace(row, **_NOTIFIED)
        finally:
            self.unlock(by)


_NOTIFIED: dict[str, Any] = {"due": None, "call": None, "sends": None, "line": None, "parked": None}


def _sent_us(request: ClaimRequest, row: Any, now_us: int) -> int:
    return sent_at_us(request.sent_us, created_us=now_us if row is None else row.created)


def _others(work_items: dict[str, Work], request: ClaimRequest) -> Iterator[Work]:
    """Return other work of the task that waits for the key."""
    for row in work_items.values():
        mine = row.id == request.work
        if is_in_line(row) and (row.key, row.task) == (request.keys[0], request.task) and not mine:
            yield row


def _outdate(ledger: _Rows, request: ClaimRequest, row: Work | None, now_us: int) -> Answer | None:
    """Set work to FAILED, final, if a newer message has begun or waits. No worker runs it."""
    mark, sent_us = ledger.mark(request), _sent_us(request, row, now_us)
    waiting = {each.id: each.parked or 0 for each in _others(ledger.work_items, request)}
    if not ledger.is_outdated(sent_us, mark, max(waiting.values(), default=None)):
        return None
    ended = ledger.new_work(request) if row is None else row
    newer = {mark.owner: mark.stamp or 0, **waiting}
    by = max(newer, key=lambda work: newer[work])
    ledger.work_items[ended.id] = replace(ledger.outdated(ended, by), **_NOTIFIED)
    return Answer(Decision.OUTDATED, error=ledger.work_items[ended.id].error)


def _replace_waiting(ledger: _Rows, request: ClaimRequest) -> tuple[Overdue, ...]:
    """Set waiting work to FAILED, final. Return the messages to send, so that their callers are
    notified."""
    to_notify = []
    for row in list(_others(ledger.work_items, request)):
        due = row.due or ledger.now_us() + _NOTIFIED_US
        ended = replace(ledger.outdated(row, str(request.work)), line=_SUPERSEDED, due=due)
        ledger.work_items[row.id] = ended
        if row.line == LineState.WAITING:
            to_notify.append(overdue_of(to_send(ledger, ended)))
    return tuple(to_notify)
