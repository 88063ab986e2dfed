"""Choose which thread of the simulation runs next, one at a time, and keep its clock.

A thread is a greenlet. It runs until it calls `step()`, `sleep()` or `block()`. Then the scheduler
chooses the thread that goes on. Every choice is an index drawn from `Choices`, of which 0 is the
least eventful (the same thread goes on, no fault). So a schedule is the list of its choices,
replays exactly, and becomes smaller if choices are set to zero.

Guarantees: nothing depends on real time or real threads. A process that was killed does nothing
more: `Crashed` is raised in each of its threads, and again wherever they try to go on.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from greenlet import getcurrent, greenlet

__all__ = [
    "Choices",
    "Crashed",
    "IdleError",
    "Process",
    "Scheduler",
    "SimClock",
    "SimMutex",
    "SimWakeup",
    "StuckError",
]

STEP_S = 0.001


class Crashed(BaseException):
    """The process was killed; raised in its threads so that their frames go away."""


class StuckError(AssertionError):
    """No thread can go on, or the threads do not end."""


class IdleError(StuckError):
    """Every thread waits for another one."""


class Choices:
    """Source of every decision of a schedule: a seed, or the list of an earlier schedule."""

    def __init__(self, seed: int = 0, *, replay: Sequence[int] | None = None) -> None:
        self._random = random.Random(seed)
        self._replay = replay
        self.made: list[int] = []

    def pick(self, weights: Sequence[float]) -> int:
        """Return an index; 0 beyond the end of a replayed list."""
        if self._replay is not None:
            at = len(self.made)
            chosen = self._replay[at] if at < len(self._replay) else 0
            chosen = min(chosen, len(weights) - 1)
        else:
            left = self._random.random() * sum(weights)
            chosen = 0
            for index, weight in enumerate(weights):
                left -= weight
                if left < 0:
                    chosen = index
                    break
        self.made.append(chosen)
        return chosen

    def one_in(self, number: float) -> bool:
        """Return True once in `number` times."""
        return self.pick((number - 1, 1)) == 1


@dataclass(eq=False)
class Process:
    """A process of the operating system: all its threads are killed or paused together."""

    name: str
    dead: bool = False
    paused_until_s: float = 0.0
    threads: list[Thread] = field(default_factory=list)


@dataclass(eq=False)
class Thread:
    """One line of execution of a process."""

    process: Process
    greenlet: Any
    ready_at_s: float = 0.0
    until: Callable[[], bool] | None = None

    @property
    def wakes_at_s(self) -> float:
        return max(self.ready_at_s, self.process.paused_until_s)


class Scheduler:
    """Runs threads one at a time, by the given choices."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.now_s = 1_000.0
        self.steps = 0
        self._threads: list[Thread] = []
        self._current: Thread | None = None
        self._main = getcurrent()

    # -- for the scheduled --------------------------------------------------------------------

    @property
    def process(self) -> Process:
        """Return the process whose thread is running."""
        assert self._current is not None
        return self._current.process

    def spawn(self, process: Process, function: Callable[[], None]) -> None:
        """Start a thread of `process`."""

        def run() -> None:
            with contextlib.suppress(Crashed):
                function()

        made = Thread(process, greenlet(run, self._main), self.now_s)
        process.threads.append(made)
        self._threads.append(made)

    def step(self) -> None:
        """Let other threads go on."""
        self._give_way(self.now_s, None)

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self._give_way(self.now_s + seconds, None)

    def block(self, until: Callable[[], bool], timeout_s: float = float("inf")) -> bool:
        """Wait for a condition. Return False if the time is up."""
        if not until():
            self._give_way(self.now_s + timeout_s, until)
        return until()

    def _give_way(self, ready_at_s: float, until: Callable[[], bool] | None) -> None:
        thread = self._current
        assert thread is not None, "outside the simulation"
        if thread.process.dead:
            raise Crashed
        thread.ready_at_s, thread.until = ready_at_s, until
        self._main.switch()
        if thread.process.dead:
            raise Crashed

    # -- for the world ------------------------------------------------------------------------

    def kill(self, process: Process) -> None:
        """Kill the process at once. Its threads unwind without any further effect."""
        process.dead = True
        for thread in process.threads:
            if thread is not self._current:
                self._unwind(thread)

    def _unwind(self, thread: Thread) -> None:
        if thread in self._threads:
            self._threads.remove(thread)
        if thread.greenlet:  # started, and not at its end
            before, self._current = self._current, thread
            thread.greenlet.parent = getcurrent()
            thread.greenlet.throw(Crashed)
            self._current = before

    def run(self, *, after_step: Callable[[], None], until: Callable[[], bool], limit: int) -> None:
        """Run until a condition holds. Raise StuckError if it does not within `limit` steps."""
        while not until():
            if self.steps >= limit:
                raise StuckError(f"not quiet after {limit} steps, at {self.now_s - 1_000:.1f} s")
            now_s = self.now_s
            ready = [
                thread
                for thread in self._threads
                if (thread.ready_at_s <= now_s or (thread.until is not None and thread.until()))
                and thread.process.paused_until_s <= now_s
            ]
            if not ready:
                wakes_at_s = min((each.wakes_at_s for each in self._threads), default=float("inf"))
                if wakes_at_s == float("inf"):
                    raise IdleError("every thread waits for another one")
                self.now_s = max(self.now_s, wakes_at_s)
                continue
            self.steps += 1
            self.now_s += STEP_S
            self._switch_to(self._choose(ready))
            after_step()

    def _choose(self, ready: list[Thread]) -> Thread:
        """Choose a thread; 0 is the one that ran last."""
        if len(ready) == 1:
            return ready[0]
        if self._current in ready:
            ready.remove(self._current)
            ready.insert(0, self._current)
        return ready[self.choices.pick([1.0] * len(ready))]

    def _switch_to(self, thread: Thread) -> None:
        self._current = thread
        thread.greenlet.parent = getcurrent()
        thread.greenlet.switch()
        if thread.greenlet.dead and thread in self._threads:
            self._threads.remove(thread)

    def end(self) -> None:
        """End every thread."""
        for thread in list(self._threads):
            thread.process.dead = True
        for thread in list(self._threads):
            self._unwind(thread)
        self._current = None


class SimClock:
    """The scheduler's time as a `taskguard.clock.Clock`, with a wall clock `ahead_s` wrong."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.ahead_s = 0.0

    def monotonic_s(self) -> float:
        return self._scheduler.now_s

    def wall_s(self) -> float:
        return self._scheduler.now_s + self.ahead_s

    def sleep(self, seconds: float) -> None:
        self._scheduler.sleep(seconds)


class SimMutex:
    """Replaces a native lock: a thread that waits for it lets others go on."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._held = False

    def __enter__(self) -> None:
        while self._held:
            self._scheduler.block(lambda: not self._held)
        self._held = True

    def __exit__(self, *_: object) -> None:
        self._held = False


class SimWakeup:
    """Replaces `taskguard.native.Wakeup`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._ringing = False

    def wait(self, timeout_s: float | None) -> bool:
        timeout_s = float("inf") if timeout_s is None else max(0.0, timeout_s)
        self._scheduler.block(lambda: self._ringing, timeout_s)
        rang, self._ringing = self._ringing, False
        return rang

    def set(self) -> None:
        self._ringing = True
