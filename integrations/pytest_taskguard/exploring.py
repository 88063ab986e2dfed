"""A task killed, or overtaken, at each boundary of its delivery, and delivered again.

Guarantees: every call of lock server and ledger, and every statement inside `guard.transaction()`,
is tried, asked and done, in the order in which an undisturbed delivery reaches them. A delivery
that was killed writes nothing more through its guard.

Does not guarantee what a real SIGKILL shows: the process lives on here, so that `finally:` blocks
of the task run as it "dies". Effects that such a block has outside of `guard.transaction()` count.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from pytest_taskguard.crashes import Crashes, Killed
from pytest_taskguard.delivering import Message
from pytest_taskguard.memory import Memory
from taskguard.integration import SystemClock

__all__ = ["CrashReport", "Crashed", "EffectsError", "Explorer", "LostLease"]

_UNDISTURBED = "(none)"
_LONG_S = 1e9  # longer than any lease


@dataclass(frozen=True, slots=True)
class Crashed:
    """The result for one message whose first delivery was killed at `point`."""

    point: str
    deliveries: int
    effects: int


@dataclass(frozen=True, slots=True)
class CrashReport:
    """One line for each boundary, the first for an undisturbed delivery."""

    task: str
    expected: int
    lines: tuple[Crashed, ...]

    @property
    def wrong(self) -> list[Crashed]:
        """The lines whose effects are not those of one undisturbed delivery."""
        return [line for line in self.lines if line.effects != self.expected]

    def __str__(self) -> str:
        width = max(len(line.point) for line in self.lines)
        rows = [f"{'killed at':{width}}  deliveries  effects"]
        for line in self.lines:
            mark = "" if line.effects == self.expected else f"  <- not {self.expected}"
            rows.append(f"{line.point:{width}}  {line.deliveries:10}  {line.effects:7}{mark}")
        return "\n".join(rows)


@dataclass(frozen=True, slots=True)
class LostLease:
    """Two holders of one work.

    Attributes:
        result: what the late holder's caller got.
        overtaker: what the other holder's caller got.
        refused: whether the late holder tried to commit and was refused.
    """

    result: Any
    overtaker: Any
    refused: bool


class EffectsError(AssertionError):
    """The effects of a task are lost or double. `report` has all lines."""

    def __init__(self, report: CrashReport) -> None:
        self.report = report
        more = any(line.effects > report.expected for line in report.wrong)
        less = any(line.effects < report.expected for line in report.wrong)
        advice = []
        if more:
            advice.append(
                "Where there are more, an effect is outside `with guard.transaction()`: move it "
                "in, or hand `guard.idempotency_key` to whoever has it done."
            )
        if less:
            advice.append(
                "Where there are fewer, DONE is committed before an effect is: no delivery makes "
                "up for what comes after `guard.transaction()`. Or the task found its effect from "
                "the line before: `before_each` puts it back."
            )
        super().__init__(
            f"{report.task}: {len(report.wrong)} of {len(report.lines)} lines have not "
            f"{report.expected} effect(s).\n\n{report}\n\n" + "\n".join(advice)
        )


class _PausedClock(SystemClock):
    """A paused process goes on: its lease ran out meanwhile, which it can tell by its clock."""

    paused_s = 0.0

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.paused_s


def _die() -> None:
    raise Killed


class Explorer:
    """The functions behind the fixtures."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def deliver_twice(
        self, task: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> tuple[Any, Any]:
        """Deliver one message twice, one after the other; returns both answers."""
        message = Message(task, args, kwargs)
        with self._memory.process():
            first = message.deliver()
        with self._memory.process():
            return first, message.deliver()

    def lose_lease_at(
        self,
        task: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        at: str = "ledger.claim done",
    ) -> LostLease:
        """Pause a holder at a boundary; its lease ends, another does the work; then it goes on.

        Args:
            task: a Celery task, an RQ job or a guarded function.
            args: its positional arguments.
            kwargs: its keyword arguments.
            at: the boundary; by default just before the body. `explore_crashes` lists them.
                On SQLite not inside a transaction, for no other holder can write then.

        Raises:
            ValueError: the delivery does not reach `at`.
        """
        message = Message(task, args, kwargs)
        answers: list[Any] = []
        clock = _PausedClock()

        def overtake() -> None:
            clock.paused_s = _LONG_S
            try:
                self._memory.expire_leases()
            except sa.exc.OperationalError as error:
                raise ValueError(
                    f"At {at!r} the holder's transaction keeps everybody else out, so it cannot "
                    "be overtaken there. Choose a boundary outside of it, for example "
                    '"transaction.begin asked".'
                ) from error
            with self._memory.process():
                answers.append(_in_a_thread(message.deliver))

        crashes = Crashes(overtake)
        crashes.reset(at)
        seen = len(self._memory.events)
        with self._memory.process(crashes, clock):
            result = message.deliver()
        if not crashes.struck:
            raise ValueError(f"No delivery came by {at!r}, but by {', '.join(crashes.seen)}.")
        refused = any(event.name == "stale_refused" for event in self._memory.events[seen:])
        return LostLease(result, answers[0], refused)

    def explore_crashes(
        self,
        task: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        effects: Callable[[], int],
        expected: int = 1,
        before_each: Callable[[], object] = lambda: None,
    ) -> CrashReport:
        """Run the task once for each boundary, killed there, and deliver the message again.

        Args:
            task: a Celery task, an RQ job or a guarded function.
            args: its positional arguments.
            kwargs: its keyword arguments.
            effects: returns how many effects there are now (rows, mails, calls of a fake). What
                counts is by how many they grow.
            expected: how many effects one run of the task has.
            before_each: called before each line, to put back what the task changes.

        Returns:
            The table of boundaries and effects.

        Raises:
            EffectsError: a line has more or fewer effects than `expected`; it carries the table.
        """
        undisturbed = Crashes(_die)
        lines = []

        def run(point: str, crashes: Crashes) -> None:
            self._memory.forget()
            before_each()
            before = effects()
            deliveries = self._deliver_until_answered(Message(task, args, kwargs), crashes)
            if crashes.at is not None and not crashes.struck:
                raise ValueError(
                    f"No delivery came by {point!r} again: the task goes another way once it has "
                    "run. Put back what it finds changed: before_each=…"
                )
            lines.append(Crashed(point, deliveries, effects() - before))

        run(_UNDISTURBED, undisturbed)
        for point in undisturbed.seen:
            crashes = Crashes(_die)
            crashes.reset(point)
            run(point, crashes)
        report = CrashReport(getattr(task, "__name__", repr(task)), expected, tuple(lines))
        if report.wrong:
            raise EffectsError(report)
        return report

    def _deliver_until_answered(self, message: Message, crashes: Crashes) -> int:
        try:
            with self._memory.process(crashes):
                message.deliver()
            return 1
        except Killed:
            pass
        gc.collect()  # as a dead process leaves no half-read cursor behind, which locks SQLite
        self._memory.expire_leases()
        with self._memory.process():
            message.deliver()
        return 2


def _in_a_thread(call: Callable[[], Any]) -> Any:
    """The value of `call`, run by another thread: the one at hand is inside a guarded body."""
    answers: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(call())
        except BaseException as error:  # noqa: BLE001  # raised again below
            errors.append(error)
        finally:
            if "taskguard_django" in sys.modules:
                from django.db import connections

                connections.close_all()  # Django's connections of this thread

    thread = threading.Thread(target=run, name="taskguard-overtaker")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return answers[0]
