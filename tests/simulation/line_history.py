"""The invariants of messages that wait for their key, S7, S9, S10 and L6, and all others.

The checks read rows, and use none of the code that they judge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from simulation.history import GaveUpError, History, ViolationError, is_outdated
from simulation.ledger import Work
from simulation.stored_calls import SUPERSEDED, is_expected, is_in_line, is_unnotified, keeps
from taskguard.errors import WorkDeadError, WorkFailedError
from taskguard.ledger.records import message_of
from taskguard.model.claims import ClaimRequest
from taskguard.model.delivery import Answered, Completed, Dropped, Parked
from taskguard.model.states import State

if TYPE_CHECKING:
    from simulation.line_world import LineWorld
    from simulation.world import Message, Task

__all__ = ["LineHistory"]

# Sort position of work that is not queued: last within its rank.
_LAST = 2**63 - 1
_ANSWERS = Completed | Answered | WorkDeadError | WorkFailedError | GaveUpError


class LineHistory(History):
    """Events of one schedule so far."""

    _world: LineWorld

    def __init__(self, world: LineWorld) -> None:
        super().__init__(world)
        self._answered: set[tuple[str, str]] = set()
        # Work whose message the broker lost while it did not wait in the ledger.
        self._lost: set[str] = set()
        # Messages that the broker has lost, but that the ledger could send again.
        self._kept: set[tuple[str, str]] = set()
        self._replaced: set[tuple[str, str]] = set()
        self._gave_up: set[tuple[str, str]] = set()
        self.revoked: set[str] = set()
        # Messages whose callers read that they expired, and those that the ledger knows of.
        self._reported_expired: set[tuple[str, str]] = set()
        # And the number of retries that had expired. A worker may hold a later retry.
        self._expired: dict[tuple[str, str], int] = {}
        self._waited_for: set[str] = set()
        self._ranks: dict[tuple[str, str], int] = {}
        # Strict work that has begun: how often its message had been retried, and its position.
        self._begun: dict[str, int] = {}
        self._places: dict[str, int] = {}

    # -- what happens -------------------------------------------------------------------------

    def published(self, message: Message) -> None:
        self._ranks[message.name] = message.rank
        super().published(message)

    def granting(self, request: ClaimRequest) -> None:
        """S9: no earlier message waits. S10: the message was not replaced, and the ledger has not
        recorded that it expired."""
        name = request.message.name
        if (name, request.task) in self._replaced:
            raise ViolationError("S10", f"{name} was replaced, and begins {request.work}")
        if request.message.retries <= self._expired.get((name, request.task), -1):
            raise ViolationError("S10", f"{name} has expired, and begins {request.work}")
        mine = self._world.ledger.work_items.get(request.work or "")
        if not request.in_line or (mine is not None and mine.state is State.PROCESSING):
            return
        own = mine is not None and mine.parked is not None and mine.message == name
        place = self._place(mine) if own and mine else (self._ranks[name, request.task], _LAST)
        before = [
            row
            for row in self._world.ledger.work_items.values()
            if row.key == request.line and row is not (mine if own else None)
            if self._place(row) < place
        ]
        self._expect_ended(before, request.work or "")
        self._expect_turn(before, request)

    def _expect_turn(self, before: list[Work], request: ClaimRequest) -> None:
        """Check that no earlier message waits, except those that may begin beside it."""
        now_us = self._world.ledger.now_us()
        if request.newest is not None:  # of its own task they are older
            before = [row for row in before if row.task != request.task]
        if request.newest == "supersede" and self._world.ledger.holders(request.line):
            return  # it takes no other message's turn
        waits = [row.id for row in before if is_in_line(row) and row.due is None]
        promoted = [row.id for row in before if is_expected(row, now_us)]
        room = 1 if request.bounds is None else request.bounds.limit
        room -= len(self._world.ledger.holders(request.line, but=str(request.owner)))
        if waits or len(promoted) >= room:
            raise ViolationError("S9", f"{request.work} begins before {waits or promoted}")

    def _expect_ended(self, before: list[Work], work: str) -> None:
        """Check that no earlier strict work has begun without having ended."""
        for row in before:
            if row.id in self._begun and row.id != work and self._goes_on(row):
                raise ViolationError("S9", f"{work} begins before {row.id} has ended")

    def _goes_on(self, row: Work) -> bool:
        """Return whether work that has begun goes on. Its retry may be on its way."""
        if row.state is State.FAILED and not row.final:
            alive = self._world.broker.alive(message_of(row))
            return any(each.retries > self._begun[row.id] for each in alive)
        return row.state in (State.NEW, State.PROCESSING)

    def _place(self, row: Work) -> tuple[int, int]:
        """Return the sort position, by its message's rank and its position when it began."""
        rank = self._ranks.get((message_of(row), row.task), 0)
        return rank, self._places.get(row.id, row.parked or 0)

    def granted(self, request: ClaimRequest) -> None:
        """Record that it has begun. Strict work keeps its position from now on, other work has
        none."""
        row = self._world.ledger.work_items.get(request.work or "")
        if request.strict and row is not None:
            self._begun[row.id] = request.message.retries
            self._places.setdefault(row.id, row.parked or 0)
        elif row is not None:
            self._begun.pop(row.id, None)
            self._places.pop(row.id, None)

    def promoted(self, before: dict[str, Work], row: Work) -> None:
        """S9: it was the first waiting message, and no earlier strict work goes on."""
        line = [each for each in before.values() if each.key == row.key]
        waiting = [each for each in line if is_in_line(each) and each.due is None]
        if min(map(self._place, waiting)) < self._place(row):
            raise ViolationError("S9", f"{row.id} was promoted before others that wait")
        self._expect_ended([each for each in line if self._place(each) < self._place(row)], row.id)

    def gave_up(self, message: Message) -> None:
        """It has failed, and is not retried."""
        self._gave_up.add(message.name)
        self._answered.add(message.name)
        self._leave(message.name)

    def _leave(self, name: tuple[str, str]) -> None:
        """Record that its work has ended, and keeps no position."""
        for work in self.ids_of(self._world.published[name], name[0]):
            self._begun.pop(work, None)
            self._places.pop(work, None)

    def acknowledged(self, message: Message, outcome: Any) -> None:
        """S7: a parked message is in the ledger's line."""
        dropped = outcome.reason if isinstance(outcome, Dropped) else ""
        if dropped == "expired":
            self._reported_expired.add(message.name)
            return
        if dropped == "superseded" and message.retries <= self._expired.get(message.name, -1):
            return  # its caller was notified, and its state agrees with that
        if isinstance(outcome, _ANSWERS) or dropped in ("revoked", "outdated"):
            self._answered.add(message.name)
        if isinstance(outcome, Parked):
            self._world.counts["reported Parked"] += 1
            self._expect_stored(message)
        elif dropped == "replaced" and not self._is_replaced(*message.name):
            raise ViolationError("S7", f"{message.id} was reported as replaced")
        elif dropped == "replaced":
            self._world.counts["reported as replaced"] += 1
        elif dropped == "superseded" and self._is_replaced(*message.name):
            self._world.counts["replaced, and not reported"] += 1  # the ledger gave no answer
        elif dropped == "superseded" and message.name in self._gave_up:
            pass  # a copy of a message that was reported as failed
        else:
            super().acknowledged(message, outcome)

    def _expect_stored(self, message: Message) -> None:
        row = self._row(message.task, message.id)
        if row is None:
            raise ViolationError("S7", f"{message.id} was parked, and is in no line")
        own = row.state is State.NEW and message_of(row) == message.id
        own = own and row.id not in self._lost  # the work was claimed and deferred since
        if own and not is_in_line(row) and len(self._world.broker.alive(message.id)) < 2:
            raise ViolationError("S7", f"{message.id} was parked, and waits in no line")

    def _has_newer(self, message: str, task: Task, work: Work | None) -> bool:
        """Return True also if the record names a newer message, which waited and may be gone."""
        named = "" if work is None else (work.error or "").partition(": ")[2]
        by = self._world.ledger.work_items.get(named)
        if by is not None and by.task == task.name:
            return self.sent_s[message_of(by), by.task] >= self.sent_s[message, task.name]
        return super()._has_newer(message, task, work)

    def expired(self, name: tuple[str, str], retries: int) -> None:
        """Record that the ledger has recorded the expiry of the message's work."""
        self._expired[name] = max(retries, self._expired.get(name, 0))
        self._leave(name)

    def enqueued(self, task: Task, message: str, duplicate: str) -> None:
        """A call was enqueued, and that is committed."""

    def replaced(self, message: str, task: Task) -> None:
        """Record that a newer message replaced it, and that its caller was notified."""
        self._replaced.add((message, task.name))

    def lost(self, messages: Iterable[Message]) -> None:
        """Record that the broker lost these messages. Those in the ledger's line are not lost."""
        for message in messages:
            row = self._row(message.task, message.id)
            kept = row is not None and (is_in_line(row) or keeps(row))
            if row is None or not kept or message_of(row) != message.id:
                self._lost |= self._names(message.task, message.id)
            else:
                self._kept.add((message.id, message.task.name))

    def awaited(self) -> bool:
        """Return whether work waits in line or for being sent again, and no worker will get its
        message.

        Ignore a message whose caller read that it has expired while a slow holder was alive: a
        relay ends that state.
        """
        return any(
            (_is_unfinished(row) or keeps(row) or is_unnotified(row))
            and (row.due is not None or row.parked is not None)
            and row.id not in self._lost
            and message_of(row) not in self._world.unreachable
            and (message_of(row), row.task) not in self._reported_expired
            for row in self._world.ledger.work_items.values()
        )

    def _row(self, task: Task, message: str) -> Work | None:
        return self.record(self._world.ledger.work_items, task, message)

    def _names(self, task: Task, message: str) -> set[str]:
        """Return the ids of a message's work, or a name of its own if it has joined no run."""
        return {*self.ids_of(task, message)} or {f"{task.work(message)} {message}"}

    def _is_replaced(self, message: str, task: str) -> bool:
        numbers = self._world.ledger.numbers
        ids = self.ids_of(self._world.tasks[task], message)
        return any(numbers.get((message, work)) == SUPERSEDED for work in ids)

    # -- what is ------------------------------------------------------------------------------

    def check(self) -> None:
        world, before = self._world, self._work_items
        super().check()
        if self._work_items is not before:  # a transaction has written since
            self._check_rows(before)
        if not world.needs_relay and not world.relays:
            for key in self._waited_for:
                self._expect_progress(key)

    def _check_rows(self, before: dict[str, Work]) -> None:
        now_us = self._world.ledger.now_us()
        rows = [row for row in self._work_items.values() if row.parked is not None]
        for row in rows:
            if before.get(row.id) is not row:
                self._check_place(before.get(row.id), row)
        self._waited_for = {row.key for row in rows if is_in_line(row)}
        promoted = Counter(row.key for row in rows if is_expected(row, now_us))
        for key, count in promoted.items():
            if self.trusts_are_disjoint and count > self._world.most_at_once(key):
                raise ViolationError("S9", f"{count} are promoted at once for {key}")

    def _check_place(self, before: Work | None, after: Work) -> None:
        placed = (State.DONE,) if after.strict else (State.PROCESSING, State.DONE)
        if after.parked is not None and after.state in placed:
            raise ViolationError("S9", f"{after.id} is {after.state}, and is in a line")
        if before is None or not (in_line(before) and in_line(after)):
            return
        if before.message == after.message and before.parked != after.parked:
            raise ViolationError("S9", f"{after.id} has lost its place")

    def _expect_progress(self, key: str) -> None:
        """L6: a line moves on. It does if as many deliveries hold the key as may, a further
        delivery of it is in a worker's hands, or a promoted message is on its way. The message that
        keeps the first position counts too."""
        world, broker = self._world, self._world.broker
        taken = [each.message for each in broker.taken.values() if not each.process.dead]
        in_hand = sum(each.task.key == key for each in taken)
        comes = any(each.task.key == key and self._comes(each) for each in broker.waiting)
        held = len(world.ledger.holders(key))
        comes = comes or world.sending[key] > 0
        if comes or in_hand > held or held >= world.fewest_at_once(key):
            return
        if world.counts["lock server emptied"] and key in world.locks.held():
            # After the lock server was emptied, the key was given to a holder that had just ended.
            # Until that lease expires, all workers take the key for held.
            world.need_relay()
        else:
            raise ViolationError("L6", f"{key} is free and has a line, but no message comes")

    def _comes(self, message: Message) -> bool:
        """Return whether its delivery will promote from the line."""
        row = self._row(message.task, message.id)
        return (
            message.promoted
            or self._keeps_first(row, message)
            or self._ran_elsewhere(message)
            or self._was_put_off_after_its_call(row, message)
        )

    def _was_put_off_after_its_call(self, row: Work | None, message: Message) -> bool:
        """Return whether the work was promoted, and an earlier delivery of it was deferred
        afterwards.

        That delivery's process was paused between its decision and its publish. The deferred copy
        has a higher number than the promoted message, which is dropped. The copy claims when it
        arrives. The promotion's time limits how long the line waits for it.
        """
        if row is None or message_of(row) != message.id or not message.deferrals:
            return False
        return is_expected(row, self._world.ledger.now_us())

    def _keeps_first(self, row: Work | None, message: Message) -> bool:
        """Return whether no waiting message goes before it."""
        if row is None or not keeps(row) or message_of(row) != message.id:
            return False
        waiting = [
            self._place(each)
            for each in self._world.ledger.work_items.values()
            if each.key == row.key and is_in_line(each) and each.due is None
        ]
        return all(self._place(row) < place for place in waiting)

    def _ran_elsewhere(self, message: Message) -> bool:
        """Return whether another copy, which was not promoted, has run instead.

        That copy relies on the hint, which the promotion has consumed. The next waiting message is
        promoted when the copy arrives that was deferred meanwhile.
        """
        row = self._row(message.task, message.id)
        ended = row is not None and row.state is not State.NEW
        return self._world.hints and message.deferrals > 0 and ended

    def at_the_end(self) -> None:
        """L1: each parked message also got an answer."""
        super().at_the_end()
        for (message, name), task in self._world.published.items():
            work = self._row(task, message)
            revoked = work is not None and work.final and not is_outdated(work)
            if revoked or self._is_excused(message, task):
                continue
            if (message, name) not in self._answered and not self._is_replaced(message, name):
                raise ViolationError("L1", f"{message} was never answered")

    def _is_excused(self, message: str, task: Task) -> bool:
        """Return whether the message may go without an answer.

        That is so if it may be lost, if a late claim took work that had failed for good, or if its
        caller read that it has expired.

        A record keeps the message that claimed last. If the broker has lost an earlier message of
        the same work, nothing can send that one again. Nothing sends a message of work that is DONE
        either: the broker may have lost its deferred copy, and the late COMMIT of a killed worker
        may have succeeded after the redelivery was dropped in favour of that copy.
        """
        name = (message, task.name)
        row = self._row(task, message)
        kept = name in self._kept and row is not None
        if kept and (message_of(row) != message or row.state is State.DONE):
            return True
        if name in self._reported_expired:
            return True
        if name in self._gave_up and self._world.counts["messages lost on the way"]:
            return True
        unreachable = self._world.unreachable
        if row is not None and message_of(row) in unreachable and is_in_line(row):
            return True  # the work waits for a message that nothing can send
        return bool(self._names(task, message) & self._lost) or message in unreachable


def _is_unfinished(row: Work) -> bool:
    """Return whether it is NEW or PROCESSING, or a FAILED run that has not ended."""
    is_run = row.base is not None and row.state is State.FAILED and not row.final
    return is_run or row.state in (State.NEW, State.PROCESSING)


def in_line(row: Work) -> bool:
    """Return whether it has a position: it waits, was promoted, or keeps its position."""
    return is_in_line(row) or keeps(row)
