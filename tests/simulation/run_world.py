"""Work that may be done again once it has ended: `once_per="run"`, in the shop of `line_world.py`.

Each schedule has one or two tasks whose messages share a work, and mostly a process that enqueues
calls of one of them with `duplicate=`. Bodies are so long that many calls come while one runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simulation.line_world import LineWorld
from simulation.run_history import RunHistory
from simulation.world import Message, Task
from taskguard.model.claims import ClaimRequest, Overdue
from taskguard.model.records import Once
from taskguard.outbox.enqueue import Duplicate

__all__ = ["RunWorld"]

_BODIES = ("transaction", "transaction", "plain", "atomic", "fails once", "exits once", "gives up")


class RunWorld(LineWorld):
    """One schedule."""

    history: RunHistory

    def __init__(self, choices: Any, **values: Any) -> None:
        super().__init__(choices, **values)
        self.history = RunHistory(self)
        self.bodies = _BODIES

    def _fill(self) -> None:
        super()._fill()
        # The other messages of a run wait for the one that is stored until a sweep abandons it.
        self.unreachable -= {name for (name, _), task in self.published.items() if task.by_run}
        if self.senders and self.choices.one_in(3):
            task = self.tasks["unique"]
            for number in range(1 + self.choices.pick((1, 1))):
                self.publish(Message(f"p{number}", task, sent_s=self.scheduler.now_s))

    def _task(self, name: str, keys: list[str], *, parks: bool) -> Task:
        task = super()._task(name, keys, parks=parks)
        if not self.choices.one_in(4):
            task = self.tasks[name] = replace(task, by_message=False, by_run=True)
        return task

    def _calls_of_sender(self) -> int:
        return 3 + self.choices.pick((1, 1, 1))

    def _duplicate_choice(self) -> Duplicate:
        return ("replace", "attach", "answer")[self.choices.pick((4, 1, 1))]

    def _unique_task(self, key: str) -> Task:
        key = "account:unique" if self.choices.one_in(2) else key
        task = super()._unique_task(key)
        takes_s = (0.02, 0.5, 2.5)[self.choices.pick((1, 2, 1))]
        body = self.bodies[self.choices.pick([1.0] * len(self.bodies))]
        policy = replace(task.policy, atomic=body == "atomic")
        return replace(task, body=body, takes_s=takes_s, policy=policy, by_run=True)

    def enqueue(self, db: None, request: ClaimRequest, *, once: Once | None, **how: Any) -> str:
        work = super().enqueue(db, request, once=once, **how)
        pointer = self.ledger.pointers.get(str(request.work))
        self.counts["runs that follow"] += pointer is not None and pointer.follows == work
        if request.by_run and once is not None and once.replaces:
            self.history.stored(work, request.message.name)
        return work

    def abandon(self, work: Overdue, *, error: str) -> bool:
        abandoned = super().abandon(work, error=error)
        if abandoned:
            self.history.abandoned(work.work)
        return abandoned
