"""Lines with an order, a limit or a rate, in the shop of `line_world.py` with all its faults.

The options are `order="strict"` and `"priority"`, `limit=`, `rate=` and `burst=`, and
`max_waiting=`; also `busy="latest"` and `"supersede"`, mostly with a rate.

All tasks of a key have the same kind of line. Some have a different limit, as after a deploy, and
some have no order although others have one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import taskguard.run.parking
from simulation.bounded_history import BoundedHistory
from simulation.line_world import LineWorld
from simulation.scheduler import Process
from simulation.stored_calls import is_expected
from simulation.world import Message, Task
from taskguard.errors import LineFullError
from taskguard.model.bounds import Bounds, rate_of
from taskguard.model.claims import Busy, ClaimAnswer, Claimed, ClaimRequest, Overdue
from taskguard.model.delivery import MessageRef, stored_call
from taskguard.model.policy import Newest, Policy

__all__ = ["BoundedWorld"]

_KINDS = ("strict", "priority", "limit", "rate", "both", "strict rate", "newest")
_NEWEST: tuple[Newest, ...] = ("latest", "supersede")
_RATES = ("2/s", "1/s", "20/m")
_BODIES = ("gives up", "always exits")
# The time after which the highest burst of the lowest rate may begin at once again.
_RETENTION_US = 6_000_000


@dataclass(frozen=True)
class _Clock:
    """Replaces `time` for messages that are sent with a delay."""

    time: Callable[[], float]


class BoundedWorld(LineWorld):
    """One schedule."""

    history: BoundedHistory

    def __init__(self, choices: Any, **values: Any) -> None:
        super().__init__(choices, **values)
        self.history = BoundedHistory(self)
        self.bodies = (*self.bodies, *_BODIES)
        self.ledger.starts_kept_us = _RETENTION_US
        self._lines: dict[str, dict[str, Any]] = {}

    # -- a schedule ---------------------------------------------------------------------------

    def _policy(self, key: str, **options: Any) -> Policy:
        pick, one_in = self.choices.pick, self.choices.one_in
        if key not in self._lines:
            self._lines[key] = self._line()
        line = {**self._lines[key]}
        del line["newest"]
        if options["busy"] != "park" or (line["order"] == "strict" and one_in(6)):
            line["order"] = "best_effort"
        if options["busy"] != "park":
            line["max_waiting"] = None
        if line["limit"] > 1 and one_in(2):
            line["limit"] = 3
        # Work that has begun is put off again and again until a start is allowed.
        options["max_crashes"] = 2 if line["rate"] else (5, 2)[pick((2, 1))]
        return Policy(**options, **line)

    def _line(self) -> dict[str, Any]:
        pick, one_in = self.choices.pick, self.choices.one_in
        kind = _KINDS[pick((4, 2, 2, 3, 2, 2, 4))]
        rated = kind in ("rate", "both", "strict rate") or (kind == "newest" and not one_in(4))
        rate = _RATES[pick((2, 2, 1))] if rated else None
        order = kind.partition(" ")[0]
        return {
            "order": order if order in ("strict", "priority") else "best_effort",
            "limit": 2 if kind in ("limit", "both") else 1,
            "rate": rate,
            "burst": 1 if rate is None else 1 + pick((2, 1, 1)),
            "max_waiting": 1 + pick((1, 1, 1)) if one_in(3) else None,
            "newest": _NEWEST[pick((2, 1))] if kind == "newest" else None,
        }

    def _task(self, name: str, keys: list[str], *, parks: bool) -> Task:
        task = super()._task(name, keys, parks=parks)
        newest = self._lines[task.key]["newest"]
        if newest is not None and task.policy.busy == "park" and not self.choices.one_in(6):
            policy = replace(task.policy, busy=newest, max_waiting=None)
            task = self.tasks[name] = replace(task, policy=policy, by_message=True)
        return task

    def _message(self, name: str, task: Task) -> Message:
        rank = self.choices.pick((1, 1, 1)) if task.policy.order == "priority" else 0
        message = replace(super()._message(name, task), rank=rank)
        if task.policy.newest is None:
            return message
        # Long enough ago for a clock that is set back: a message from its future is as old as it.
        return replace(message, sent_s=self.scheduler.now_s - 60.0)

    def _fill(self) -> None:
        super()._fill()
        # A strict message that keeps its position and never arrives blocks the others for over an
        # hour.
        strict = {task.key for task in self.tasks.values() if task.policy.order == "strict"}
        self.unreachable -= {
            name for (name, _), task in self.published.items() if task.key in strict
        }

    def options_of(self, message: Message) -> dict[str, Any]:
        task, policy = message.task, message.task.policy
        options: dict[str, Any] = {"rank": message.rank}
        if policy.bounded:
            options["bounds"] = Bounds(task.key, policy.limit, policy.starts)
        if policy.order == "strict":
            ref = MessageRef(message.id, *message.number)
            call = stored_call(self.call_of(message), ref, "")
            options |= {"strict": True, "call": call}
        return options

    # -- what servers do ----------------------------------------------------------------------

    def park(self, request: ClaimRequest, *, only_new: bool) -> bool:
        rows = dict(self.ledger.work_items)
        try:
            parked = super().park(request, only_new=only_new)
        except LineFullError:
            self.history.refused(request, rows)
            raise
        if parked:
            self.history.parked(request, rows)
        return parked

    def claim(self, process: Process, request: ClaimRequest) -> ClaimAnswer:
        found = super().claim(process, request)
        if isinstance(found, Claimed):
            self.tells(request, found.replaced)
        too_early = isinstance(found, Busy) and found.too_early
        self.counts["starts that were too early"] += too_early
        return found

    def promote_next(self, key: str, **asked: Any) -> Overdue | None:
        found = super().promote_next(key, **asked)
        if found is None and self._comes_later(key, asked.get("ahead_s") or 0.0):
            self.need_relay()
        return found

    def _comes_later(self, key: str, ahead_s: float) -> bool:
        """Return whether the key's rate puts its next start so late that a relay has to promote."""
        rate, row = self._lines.get(key, {}).get("rate"), self.ledger.keys.get(key)
        if rate is None or row is None:
            return False
        now_us, rows = self.ledger.now_us(), self.ledger.work_items.values()
        expected = sum(each.key == key and is_expected(each, now_us) for each in rows)
        opens_us = (row.next_start or 0) + expected * rate_of(rate, 1).interval_us
        return opens_us > now_us + ahead_s * 1e6

    # -- in place of the operating system -----------------------------------------------------

    def _replace_the_system(self) -> None:
        super()._replace_the_system()
        self._patches.put(taskguard.run.parking, "time", _Clock(self.clock.wall_s))
