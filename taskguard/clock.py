"""The clock of the library. Tests and simulations replace it.

Guarantees: `monotonic_s` never goes back. On Linux it counts while the machine is suspended, so
that a suspended laptop or a paused virtual machine cannot stretch a lease.
Does not guarantee agreement with any other machine's clock. This clock does not decide which
process holds a key. It only tells a holder when to stop trusting its lease.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["SYSTEM_CLOCK", "Clock", "SystemClock"]


class Clock(Protocol):
    """The functions that depend on time."""

    def monotonic_s(self) -> float:
        """Return seconds since a fixed point, for deadlines."""
        ...

    def wall_s(self) -> float:
        """Return seconds since 1970, for the age of messages and for people."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block for `seconds`."""
        ...


_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", None)
_monotonic_s: Callable[[], float] = time.monotonic
if _BOOTTIME is not None:
    _monotonic_s = functools.partial(time.clock_gettime, _BOOTTIME)


class SystemClock:
    """The machine's clock: CLOCK_BOOTTIME if it exists, otherwise CLOCK_MONOTONIC."""

    monotonic_s = staticmethod(_monotonic_s)

    def wall_s(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        # Look `time.sleep` up at each call, because gevent and eventlet replace it.
        time.sleep(seconds)


SYSTEM_CLOCK: Clock = SystemClock()
