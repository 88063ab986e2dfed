"""How far the clocks of the servers and of this machine are apart.

Guarantees: reports a difference only if the time that an answer took cannot explain it.
`docs/explanation/clocks.md` says what depends on which clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from taskguard.doctor import findings
from taskguard.errors import TaskguardError
from taskguard.findings import Finding
from taskguard.values import value

__all__ = ["HasClock", "Reading", "check_clocks", "judge_clocks"]

_FAR_S = 1.0
_READINGS = 3


@runtime_checkable
class HasClock(Protocol):
    """A part whose server tells the time."""

    def now_us(self) -> int:
        """Return the server's time, in µs since 1970."""
        ...


@value
class Reading:
    """Difference of a clock from this machine's, and the error of that figure."""

    whose: str
    ahead_s: float
    error_s: float = 0.0


def check_clocks(clocks: Mapping[str, Callable[[], int]]) -> list[Finding]:
    """Read each clock and judge them, together with this machine's."""
    readings = [Reading("this machine", 0.0)]
    for whose, now_us in clocks.items():
        try:
            readings.append(_reading(whose, now_us))
        except TaskguardError:
            continue  # this user may not read it, or another finding reports the server
    return judge_clocks(readings)


def _reading(whose: str, now_us: Callable[[], int]) -> Reading:
    """Return the reading whose answer took the least time."""
    found = []
    for _ in range(_READINGS):
        before_s, started_s = time.time(), time.monotonic()
        now_s = now_us() / 1e6
        half_s = (time.monotonic() - started_s) / 2
        found.append(Reading(whose, now_s - before_s - half_s, half_s))
    return min(found, key=lambda reading: reading.error_s)


def judge_clocks(readings: Sequence[Reading]) -> list[Finding]:
    """Return a finding if two clocks are more than a second apart."""
    first = min(readings, key=lambda each: each.ahead_s + each.error_s)
    last = max(readings, key=lambda each: each.ahead_s - each.error_s)
    apart_s = last.ahead_s - last.error_s - first.ahead_s - first.error_s
    if apart_s <= _FAR_S:
        return []
    where = f"{first.whose} and {last.whose}"
    return [findings.CLOCKS_APART.at(where, apart_s=apart_s)]
