"""Kill or overtake a task at each boundary of its delivery, and deliver its message again.

Guarantees: it tries each call of lock server and ledger, and each statement inside
`guard.transaction()`, before and after, in the order of an undisturbed delivery. A killed delivery
writes nothing more through its guard.

This differs from a real SIGKILL: the process lives on, so `finally:` blocks of the task run when it
"dies". Effects that such a block has outside of `guard.transaction()` count.
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
    """The result for one message whose first delivery was killed.

    Attributes:
        point: the boundary at which it was killed.
        deliveries: the number of deliveries until the message was answered.
        effects: the number of effects of all its deliveries.
    """

    point: str
    deliveries: int
    effects: int


@dataclass(frozen=True, slots=True)
class CrashReport:
    """The results for all boundaries.

    Attributes:
        task: the task's name.
        expected: the number of effects that each line should have.
        lines: one result for each boundary. The first is that of an undisturbed delivery.
    """

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
    """The results of two holders of one work.

    Attributes:
        result: the result that the late holder's caller got.
        overtaker: the result that the other holder's caller got.
        refused: True if the ledger refused the late holder's commit.
    """

    result: Any
    overtaker: Any
    refused: bool


class EffectsError(AssertionError):
    """The effects of a task are lost or doubled.

    Attributes:
        report: the results for all boundaries.
    """

    def __init__(self, report: CrashReport) -> None:
        self.report = report
        more = any(line.effects > report.expected for line in report.wrong)
        less = any(line.effects < report.expected for line in report.wrong)
        advice = []
        if more:
            advice.append(
                "Too many effects: an effect is outside `with guard.transaction()`. Move it "
                "inside, or pass `guard.idempotency_key` to the service that has the effect."
            )
        if less:
            advice.append(
                "Too few effects: DONE is committed before an effect, and no later delivery "
                "repeats what comes after `guard.transaction()`. Move the effect inside. Or the "
                "task found its effect of the line before: undo that in `before_each=`."
            )
        super().__init__(
            f"{report.task}: {len(report.wrong)} of {len(report.lines)} lines do not have "
            f"{report.expected} effect(s).\n\n{report}\n\n" + "\n".join(advice)
        )


class _PausedClock(SystemClock):
    """The clock of a process that goes on after a pause, in which its lease ran out."""

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
        """Deliver one message twice, one after the other. Return both results.

        Args:
            task: a Celery task, an RQ job or a guarded function.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
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
        """Pause a holder at a boundary until its lease has ended and another has done the work.

        Args:
            task: a Celery task, an RQ job or a guarded function.
            args: its positional arguments.
            kwargs: its keyword arguments.
            at: the boundary, by default just before the body. `explore_crashes` lists them. On
                SQLite, it must be outside of a transaction, because no other holder can write then.

        Returns:
            The results of both holders.

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
                    f"lose_lease_at() cannot overtake the holder at {at!r}: its transaction locks "
                    "out all other writers. Choose a boundary outside of it, for example "
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
            raise ValueError(
                f"The delivery did not reach {at!r}. Choose one of {', '.join(crashes.seen)}."
            )
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
        """Kill the task at each boundary in turn, deliver its message again, and count effects.

        Args:
            task: a Celery task, an RQ job or a guarded function.
            args: its positional arguments.
            kwargs: its keyword arguments.
            effects: returns the current number of effects (rows, mails, calls of a fake). The
                increase counts.
            expected: the number of effects of one run of the task. Default: 1.
            before_each: called before each line, to undo the task's changes.

        Returns:
            The table of boundaries and effects.

        Raises:
            EffectsError: a line has more or fewer effects than `expected`. It has the table.
            ValueError: a later run of the task does not reach a boundary of the first one.
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
                    f"A later delivery did not reach {point!r}: the task behaves differently once "
                    "it has run. Undo its changes in before_each=."
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
        gc.collect()  # a dead process leaves no half-read cursor, which would lock SQLite
        self._memory.expire_leases()
        with self._memory.process():
            message.deliver()
        return 2


def _in_a_thread(call: Callable[[], Any]) -> Any:
    """Run `call` in another thread, because this one is inside a guarded body. Return its value."""
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
