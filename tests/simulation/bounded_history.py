"""Invariants of keys with a limit, a rate or a full line: S5 by the database's own record, S7 for
refused messages, S12, and all invariants of lines.

The checks read rows, and compute by themselves what a rate allows.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from simulation.history import ViolationError
from simulation.ledger import Work
from simulation.line_history import LineHistory
from simulation.newest import KeyRow
from simulation.stored_calls import is_in_line
from taskguard.errors import LineFullError
from taskguard.ledger.records import message_of
from taskguard.model.claims import ClaimRequest

if TYPE_CHECKING:
    from simulation.bounded_world import BoundedWorld
    from simulation.world import Message, Task

__all__ = ["BoundedHistory"]


class BoundedHistory(LineHistory):
    """Events of one schedule so far."""

    _world: BoundedWorld

    def __init__(self, world: BoundedWorld) -> None:
        super().__init__(world)
        # Starts of each key, by the database's clock.
        self._starts: dict[str, list[int]] = {}
        self._charged: Counter[str] = Counter()
        self._refused: set[tuple[str, str]] = set()

    # -- what happens -------------------------------------------------------------------------

    def granting(self, request: ClaimRequest) -> None:
        """S5: fewer hold its key than it says."""
        superseding = request.newest == "supersede"
        if request.bounds is not None and self.trusts_are_disjoint and not superseding:
            key, limit = request.bounds.key, request.bounds.limit
            held = len(self._world.ledger.holders(key, but=str(request.owner)))
            self._world.counts["begun beside others"] += held > 0
            if held >= limit:
                said = f"{key} is held by {held}, and claimed with limit={limit}"
                raise ViolationError("S5", said)
        super().granting(request)

    def granted(self, request: ClaimRequest) -> None:
        """S12: its rate allows that start."""
        super().granted(request)
        self._count_strict(request)
        if request.bounds is None or request.bounds.rate is None:
            return
        key, rate = request.bounds.key, request.bounds.rate
        starts = self._starts.setdefault(key, [])
        starts.append(self._world.ledger.now_us())
        self._charged[key] += 1
        self._world.counts["starts by a rate"] += 1
        if not self.trusts_are_disjoint:
            return  # a clock jumped: that much time has passed, or none
        for number, before_us in enumerate(reversed(starts), 1):
            allowed = (starts[-1] - before_us) // rate.interval_us + rate.burst
            if number > allowed:
                took_s = (starts[-1] - before_us) / 1e6
                raise ViolationError("S12", f"{key} was begun {number} times in {took_s} s")

    def _count_strict(self, request: ClaimRequest) -> None:
        row, counts = self._world.ledger.work_items.get(request.work or ""), self._world.counts
        if request.strict and row is not None and row.attempts > 1:
            name = "taken over" if row.crashed_owner else "retried"
            counts[f"strict work that was {name}"] += 1

    def promoted(self, before: dict[str, Work], row: Work) -> None:
        super().promoted(before, row)
        earlier = [
            each
            for each in before.values()
            if is_in_line(each) and each.key == row.key and (each.parked or 0) < (row.parked or 0)
        ]
        self._world.counts["promoted before a message that was sent earlier"] += bool(earlier)

    def refused(self, request: ClaimRequest, rows: dict[str, Work]) -> None:
        """S7: only a full line refuses a message, and never one that is queued, has begun, or was
        replaced."""
        self._refused.add((request.message.name, request.task))
        self._world.counts["messages refused by a full line"] += 1
        mine = rows.get(request.work or "")
        if mine is not None and (mine.parked is not None or mine.attempts):
            raise ViolationError("S7", f"{mine.id} has begun, or has a place, and is refused")
        if self._is_replaced(request.message.name, request.task):
            raise ViolationError("S7", f"{request.message.name} was replaced, and is refused")
        if _standing(rows, request) < (request.max_waiting or 0):
            raise ViolationError("S7", f"{request.work} is refused, and fewer wait")

    def parked(self, request: ClaimRequest, rows: dict[str, Work]) -> None:
        """S7: the line holds no more than `max_waiting` messages."""
        mine = rows.get(request.work or "")
        if request.max_waiting is None or (mine is not None and (mine.parked or mine.attempts)):
            return
        if _standing(rows, request) >= request.max_waiting:
            raise ViolationError("S7", f"{request.work} waits, and is one too many")

    def acknowledged(self, message: Message, outcome: Any) -> None:
        """S8: a message that reports a full line was refused by one."""
        if not isinstance(outcome, LineFullError):
            super().acknowledged(message, outcome)
        elif message.name not in self._refused:
            raise ViolationError("S8", f"{message.id} found its line full, and was not refused")
        else:
            self._answered.add(message.name)

    def _is_excused(self, message: str, task: Task) -> bool:
        """Return True also for a message that the line refused, or whose replacement it refused.

        Its caller was notified. Another message of the same work may have the record since then.
        """
        answered = any(
            name in self._refused and name in self._answered
            for name in ((message, task.name), (self._newest_of(message, task), task.name))
        )
        return answered or super()._is_excused(message, task)

    def _newest_of(self, message: str, task: Task) -> str:
        """Return the message that the work is for, if this message's call was replaced."""
        work = self._row(task, message)
        return message if work is None else message_of(work)

    # -- what is ------------------------------------------------------------------------------

    def check(self) -> None:
        before = self._keys
        super().check()
        if self._keys is not before:
            self._check_charges(before)

    def _check_charges(self, before: dict[str, KeyRow]) -> None:
        """S12: the next start moves to a later time only if a body starts."""
        for key, row in self._keys.items():
            known = before.get(key, row)
            later = (row.next_start or 0) > (known.next_start or 0)
            if later and not self._charged[key]:
                raise ViolationError("S12", f"{key} was charged, but no work has begun")
        self._charged.clear()


def _standing(rows: dict[str, Work], request: ClaimRequest) -> int:
    return sum(is_in_line(row) and row.key == request.line for row in rows.values())
