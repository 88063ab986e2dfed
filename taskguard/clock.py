"""Time as the rest of the library sees it, so that tests and simulations can bring their own.

Guarantees: `monotonic_s` never goes back and, on Linux, goes on counting while the machine is
suspended, so that a laptop lid or a paused virtual machine cannot stretch a lease.
Does not guarantee: agreement with any other machine's clock. Nothing here decides who holds a
key; it only tells a holder when to stop trusting its lease.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["SYSTEM_CLOCK", "Clock", "SystemClock"]


class Clock(Protocol):
    """The three things that depend on time."""

    def monotonic_s(self) -> float:
        """Seconds since some fixed point; for deadlines."""
        ...

    def wall_s(self) -> float:
        """Seconds since 1970; for the age of messages and for people."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let `seconds` pass."""
        ...


_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", None)
_monotonic_s: Callable[[], float] = time.monotonic
if _BOOTTIME is not None:
    _monotonic_s = functools.partial(time.clock_gettime, _BOOTTIME)


class SystemClock:
    """The machine's clock: CLOCK_BOOTTIME where there is one, else CLOCK_MONOTONIC."""

    monotonic_s = staticmethod(_monotonic_s)

    def wall_s(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        # `time.sleep` is looked up at each call: gevent and eventlet replace it.
        time.sleep(seconds)


SYSTEM_CLOCK: Clock = SystemClock()
