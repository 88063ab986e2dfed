"""The invariant S15 of runs, in addition to those of `run_checks.py` and of lines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from simulation.line_history import LineHistory
from simulation.violations import ViolationError
from taskguard.ledger.records import message_of

if TYPE_CHECKING:
    from simulation.line_world import LineWorld
    from simulation.scheduler import Process
    from simulation.world import Message, Task
    from taskguard.model.claims import Claimed

__all__ = ["RunHistory"]


class RunHistory(LineHistory):
    """Events of one schedule so far."""

    def __init__(self, world: LineWorld) -> None:
        super().__init__(world)
        # The newest call that was enqueued with `replace`, and the newest call that has begun.
        self._wanted: tuple[str, Task] | None = None
        self._begun_call = -1
        # The number of the call that `replace` stored for a run, unless a sweep abandoned it.
        self._stored: dict[str, int] = {}
        # Messages that the broker has lost, and whose runs other messages continue.
        self._gone: set[tuple[str, str]] = set()

    def enqueued(self, task: Task, message: str, duplicate: str) -> None:
        if duplicate == "replace" and task.by_run:
            self._wanted = message, task

    def claimed(self, process: Process, found: Claimed) -> None:
        super().claimed(process, found)
        request = found.claim.request
        if request.task != "unique":
            return
        number = _number(request.message.name)
        self._begun_call = max(self._begun_call, number)
        if number < self._stored.get(str(request.work), -1):
            raise ViolationError("S15", f"{request.message.name} begins {request.work}")

    def stored(self, work: str, message: str) -> None:
        """Record that `replace` stored a call for a run."""
        self._stored[work] = _number(message)

    def abandoned(self, work: str) -> None:
        """Record that the call of a run is sent no more."""
        self._stored.pop(work, None)

    def lost(self, messages: Iterable[Message]) -> None:
        """Record that the broker lost these messages. A run goes on if it has a stored call."""
        for message in messages:
            row = self._row(message.task, message.id)
            if not message.task.by_run:
                super().lost([message])
            elif row is None or row.call is None or (row.due is None and row.parked is None):
                self._lost |= self._names(message.task, message.id)
            elif message_of(row) != message.id:
                self._gone.add(message.name)
            else:
                self._kept.add(message.name)

    def _is_excused(self, message: str, task: Task) -> bool:
        return (message, task.name) in self._gone or super()._is_excused(message, task)

    def at_the_end(self) -> None:
        super().at_the_end()
        if self._wanted is None:
            return
        message, task = self._wanted
        row = self._row(task, message)
        begun = max([self._begun_call, *map(_number, self.revoked)])
        if begun < _number(message) and not self._is_excused(message, task):
            raise ViolationError("S15", f"no run has begun with the arguments of {message}: {row}")


def _number(message: str) -> int:
    """Return the number of an enqueued call: a higher one has newer arguments. -1: it is none."""
    return int(message[1:]) if message.startswith("u") else -1
