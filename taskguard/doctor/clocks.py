"""The clocks of the servers and of this machine: how far they are apart.

Guarantees: a distance is told only where the time that an answer took cannot explain it. Nothing is
set, and nothing depends on it: docs/explanation/clocks.md says what goes by which clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from taskguard.errors import TaskguardError
from taskguard.findings import Finding, Level
from taskguard.values import value

__all__ = ["HasClock", "Reading", "check_clocks", "judge_clocks"]

_FAR_S = 1.0
_ASKED = 3


@runtime_checkable
class HasClock(Protocol):
    """A part whose server says what time it is."""

    def now_us(self) -> int:
        """The server's clock, in µs since 1970."""
        ...


@value
class Reading:
    """By how much a clock differs from this machine's, give or take."""

    whose: str
    ahead_s: float
    error_s: float = 0.0


def check_clocks(clocks: Mapping[str, Callable[[], int]]) -> list[Finding]:
    """How far these are apart, and this machine's."""
    readings = [Reading("this machine", 0.0)]
    for whose, now_us in clocks.items():
        try:
            readings.append(_reading(whose, now_us))
        except TaskguardError:
            continue  # it may not be asked; whether it answers is told elsewhere
    return judge_clocks(readings)


def _reading(whose: str, now_us: Callable[[], int]) -> Reading:
    """The best of a few: the one whose answer took the least time."""
    found = []
    for _ in range(_ASKED):
        before_s, started_s = time.time(), time.monotonic()
        now_s = now_us() / 1e6
        half_s = (time.monotonic() - started_s) / 2
        found.append(Reading(whose, now_s - before_s - half_s, half_s))
    return min(found, key=lambda reading: reading.error_s)


def judge_clocks(readings: Sequence[Reading]) -> list[Finding]:
    """A finding if two of them are more than a second apart."""
    first = min(readings, key=lambda each: each.ahead_s + each.error_s)
    last = max(readings, key=lambda each: each.ahead_s - each.error_s)
    apart_s = last.ahead_s - last.error_s - first.ahead_s - first.error_s
    if apart_s <= _FAR_S:
        return []
    return [
        Finding(
            "clocks_apart",
            Level.WARNING,
            where=f"{first.whose} and {last.whose}",
            what=f"Their clocks are {apart_s:,.1f} s apart.",
            why="Ages of messages (retention_s), times on record and those of the queue are "
            "wrong by that; a lock server that takes another's place may give lower tokens.",
            mend="Let one service keep the time on all of them (chrony, systemd-timesyncd).",
        )
    ]
