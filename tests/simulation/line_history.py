"""What must hold of messages that wait for their key: S7, S9, S10 and L6, beside all the rest.

It reads rows, and asks nothing of the code that it judges.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from simulation.history import History, ViolationError
from simulation.ledger import Work
from simulation.stored_calls import SUPERSEDED, is_expected, stands
from taskguard.delivery import Answered, Completed, Dropped, Parked
from taskguard.ledger.protocol import ClaimRequest
from taskguard.ledger.records import message_of
from taskguard.states import State

if TYPE_CHECKING:
    from simulation.line_world import LineWorld
    from simulation.world import Message, Task

__all__ = ["LineHistory"]


class LineHistory(History):
    """One schedule's, so far."""

    _world: LineWorld

    def __init__(self, world: LineWorld) -> None:
        super().__init__(world)
        self._answered: set[tuple[str, str]] = set()
        # Work whose message the broker has lost, and that did not wait in the ledger then.
        self._lost: set[str] = set()
        self._replaced: set[tuple[str, str]] = set()
        # Messages whose callers were told so, and those of them of which the ledger has heard.
        self._told_expired: set[tuple[str, str]] = set()
        self._expired: set[tuple[str, str]] = set()
        self._waited_for: set[str] = set()

    # -- what happens -------------------------------------------------------------------------

    def granting(self, request: ClaimRequest) -> None:
        """S9: nobody who came before it waits. S10: nobody has replaced its message, nor has the
        ledger heard that it has expired."""
        ledger, now_us = self._world.ledger, self._world.ledger.now_us()
        name = request.message.name
        if (name, request.task) in self._replaced:
            raise ViolationError("S10", f"{name} was replaced, and begins {request.work}")
        if (name, request.task) in self._expired:
            raise ViolationError("S10", f"{name} has expired, and begins {request.work}")
        mine = ledger.work_items.get(request.work or "")
        if not request.in_line or (mine is not None and mine.state is State.PROCESSING):
            return
        own = mine is not None and stands(mine) and mine.message == name
        for row in ledger.work_items.values():
            if row.key != request.keys[0] or not stands(row) or row is (mine if own else None):
                continue
            waits = row.due is None or is_expected(row, now_us)
            before = not own or (row.parked or 0) < (mine.parked or 0 if mine else 0)
            if waits and before:
                raise ViolationError("S9", f"{request.work} begins before {row.id}")

    def acknowledged(self, message: Message, told: Any) -> None:
        """S7: who is parked stands in the ledger."""
        dropped = told.reason if isinstance(told, Dropped) else ""
        if dropped == "expired":
            self._told_expired.add(message.name)
            return
        if dropped == "superseded" and message.name in self._expired:
            return  # by what its caller was told
        if isinstance(told, Completed | Answered) or dropped == "revoked":
            self._answered.add(message.name)
        if isinstance(told, Parked):
            self._world.counts["told Parked"] += 1
            self._expect_stored(message)
        elif dropped == "superseded" and self._is_replaced(*message.name):
            self._world.counts["told that it was replaced"] += 1
        else:
            super().acknowledged(message, told)

    def _expect_stored(self, message: Message) -> None:
        row = self._row(message.task, message.id)
        if row is None:
            raise ViolationError("S7", f"{message.id} was parked, and is in no line")
        own = row.state is State.NEW and message_of(row) == message.id
        own = own and row.id not in self._lost  # what was claimed and put off since
        if own and not stands(row) and len(self._world.broker.alive(message.id)) < 2:
            raise ViolationError("S7", f"{message.id} was parked, and waits in no line")

    def expired(self, name: tuple[str, str], *, ended: bool) -> None:
        """As the ledger was told, which had work of that message or not."""
        if ended:
            self._expired.add(name)

    def replaced(self, message: str, task: Task) -> None:
        """By a newer call, as who enqueued that was told."""
        self._replaced.add((message, task.name))

    def lost(self, messages: Iterable[Message]) -> None:
        """By the broker. Who stands in the ledger is not lost."""
        for message in messages:
            row = self._row(message.task, message.id)
            if row is None or not stands(row) or message_of(row) != message.id:
                self._lost.add(message.task.work(message.id))

    def awaited(self) -> bool:
        """Whether somebody waits in line, or is to be sent again, for nobody has his message."""
        return any(
            row.state in (State.NEW, State.PROCESSING)
            and (row.due is not None or row.parked is not None)
            and row.id not in self._lost
            and message_of(row) not in self._world.unreachable
            for row in self._world.ledger.work_items.values()
        )

    def _row(self, task: Task, message: str) -> Work | None:
        return self._world.ledger.work_items.get(task.work(message))

    def _is_replaced(self, message: str, task: str) -> bool:
        work = self._world.tasks[task].work(message)
        return self._world.ledger.numbers.get((message, work)) == SUPERSEDED

    # -- what is ------------------------------------------------------------------------------

    def check(self) -> None:
        world, before = self._world, self._work_items
        super().check()
        if self._work_items is not before:  # something was written
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
        self._waited_for = {row.key for row in rows if stands(row)}
        called = [row.key for row in rows if is_expected(row, now_us)]
        if self.trusts_are_disjoint and len(called) > len(set(called)):
            raise ViolationError("S9", f"two were called at once: {called}")

    def _check_place(self, before: Work | None, after: Work) -> None:
        if after.parked is not None and after.state in (State.PROCESSING, State.DONE):
            raise ViolationError("S9", f"{after.id} is {after.state}, and stands in line")
        if before is None or not (stands(before) and stands(after)):
            return
        if before.message == after.message and before.parked != after.parked:
            raise ViolationError("S9", f"{after.id} has lost its place")

    def _expect_progress(self, key: str) -> None:
        """L6: somebody holds the key, or has a delivery of it in hand, or was called and comes."""
        world, broker = self._world, self._world.broker
        in_hand = (each.message for each in broker.taken.values() if not each.process.dead)
        called = (each for each in broker.waiting if each.called or self._ran_elsewhere(each))
        busy = any(each.task.key == key for each in [*in_hand, *called])
        if busy or world.ledger.is_held(key):
            return
        if world.counts["lock server emptied"] and key in world.locks.held():
            # Handed over, after it was emptied, to a holder who had just ended: until its lease
            # ends everybody takes it for held.
            world.need_relay()
        else:
            raise ViolationError("L6", f"{key} is free, somebody waits for it, and nobody comes")

    def _ran_elsewhere(self, message: Message) -> bool:
        """Whether another copy, which was not called, has run in its place.

        That one goes by the hint, which the call has used up; whoever waits is called when the
        copy comes that was put off meanwhile.
        """
        row = self._row(message.task, message.id)
        ended = row is not None and row.state is not State.NEW
        return self._world.hints and message.deferrals > 0 and ended

    def at_the_end(self) -> None:
        """L1: and whoever was parked got an answer."""
        super().at_the_end()
        for (message, name), task in self._world.published.items():
            work = self._row(task, message)
            if self._is_excused(message, task) or (work is not None and work.final):
                continue
            if (message, name) not in self._answered and not self._is_replaced(message, name):
                raise ViolationError("L1", f"{message} was never answered")

    def _is_excused(self, message: str, task: Task) -> bool:
        told = (message, task.name) in self._told_expired
        return told or task.work(message) in self._lost or message in self._world.unreachable
