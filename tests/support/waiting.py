"""Wait on conditions, so that tests need no sleeps. How long is decided here alone.

A test says what it waits for. How patient it is depends on how slow the machine is at this moment,
which each poll measures. A test adds `takes_s` if what it waits for takes long on an idle machine
too: a lease, a back-off.

Does not guarantee that anything is fast. A test of speed measures the time itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["patience_s", "slowness", "wait_until"]

T = TypeVar("T")

# On an idle machine. Less than the default lease of 30 s: a lease that expired there is not taken
# for one that was released.
_BASE_S = 25.0
# Less than the timeout of a test (`pyproject.toml`), so that a wait ends with its message.
_LIMIT_S = 240.0
# One poll never costs more: a machine that was suspended for a minute did nothing in it.
_LONGEST_POLL_S = 5.0


def slowness() -> float:
    """Return how many times longer work takes now than on an idle machine.

    This is the number of processes that want a processor, for each processor.
    """
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def patience_s(takes_s: float = 0.0) -> float:
    """Return the timeout for a call that blocks.

    The machine may become slower during the call, so this is twice the patience of `wait_until`.
    """
    return takes_s + min(2 * _BASE_S * slowness(), _LIMIT_S)


def wait_until(
    condition: Callable[[], T],
    *,
    takes_s: float = 0.0,
    message: str | Callable[[], str] = "",
    interval_s: float = 0.02,
) -> T:
    """Poll `condition` until its answer is true, and return that answer.

    Raise AssertionError with what was waited for and the last answer.

    Args:
        condition: must be cheap.
        takes_s: how long this takes on an idle machine.
        message: what is waited for.
        interval_s: the pause between two polls.
    """
    began_s = polled_s = time.monotonic()
    patience_left_s = _BASE_S
    while not (answer := condition()):
        now_s = time.monotonic()
        if now_s - began_s > takes_s:
            patience_left_s -= min(now_s - polled_s, _LONGEST_POLL_S) / slowness()
        polled_s = now_s
        if patience_left_s < 0 or now_s - began_s > takes_s + _LIMIT_S:
            text = message() if callable(message) else message
            text = text or getattr(condition, "__name__", "the condition")
            raise AssertionError(
                f"not within {now_s - began_s:.0f} s: {text} (last answer: {answer!r})"
            )
        time.sleep(interval_s)
    return answer
