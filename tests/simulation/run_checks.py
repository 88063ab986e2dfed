"""The invariants S13 and S14 of runs (`once_per="run"`), in every world.

S2 says that a run has at most one effect, and S6 that it never leaves DONE. S8 says that a message
is reported as done only if its own run is. The checks read rows, and use none of the code that they
judge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.violations import ViolationError
from taskguard.model.states import State

if TYPE_CHECKING:
    from simulation.ledger import Work
    from simulation.world import Task, World
    from taskguard.model.claims import Claim

__all__ = ["RunChecks", "has_ended"]

_RUN = " run:"


def has_ended(row: Work) -> bool:
    """Return whether a run has ended. DEAD stays open."""
    return row.state is State.DONE or (row.state is State.FAILED and row.final > 0)


class RunChecks:
    """The runs of one schedule so far."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._ended: set[str] = set()

    def of_message(self, task: Task, message: str) -> tuple[str, ...]:
        """Return the run that a message belongs to, if it belongs to one."""
        base = task.work(message)
        numbers = list(self._world.ledger.numbers)
        found = [work for name, work in numbers if name == message and _is_run(work, base)]
        if len(found) > 1:
            raise ViolationError("S14", f"{message} belongs to {found}")
        return tuple(map(str, found))

    def claimed(self, claim: Claim) -> None:
        """Check that no earlier run goes on, and that this one has not ended."""
        base, work = claim.request.base, str(claim.work)
        if base is None:
            return
        if work in self._ended:
            raise ViolationError("S14", f"{claim.message.name} begins {work}, which has ended")
        for row in self._of(base):
            if row.id != work and row.attempts and not has_ended(row):
                raise ViolationError("S13", f"{work} begins, and {row.id} is {row.state.value}")
        self._world.counts["runs begun"] += 1
        self._world.counts["later runs begun"] += any(run != work for run in self._ended_of(base))

    def resumed(self, works: tuple[str, ...]) -> None:
        """Record that an operator has requeued these runs, which go on."""
        self._ended.difference_update(works)

    def check(self) -> None:
        """Check that no run goes on that is neither open nor follows."""
        for base, pointer in self._world.ledger.pointers.items():
            for row in self._of(base):
                if has_ended(row):
                    self._ended.add(row.id)
                elif row.id not in (pointer.open, pointer.follows):
                    raise ViolationError("S13", f"{row.id} is neither open nor follows: {pointer}")
                elif row.id == pointer.follows and row.attempts:
                    raise ViolationError("S13", f"{row.id} follows, and has begun")

    def _of(self, base: str) -> list[Work]:
        return [row for row in self._world.ledger.work_items.values() if row.base == base]

    def _ended_of(self, base: str) -> list[str]:
        return [row.id for row in self._of(base) if row.id in self._ended]


def _is_run(work: str | None, base: str) -> bool:
    return work is not None and work.startswith(f"{base}{_RUN}")
