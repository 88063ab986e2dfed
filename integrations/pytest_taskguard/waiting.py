"""Waiting on conditions, so that tests need no sleeps.

Guarantees that a condition that comes true within the bound is seen, and that one that does not
fails with what was waited for and what was seen last. Polls: a condition must be cheap to ask.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["wait_until"]

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T],
    *,
    timeout_s: float = 15.0,
    message: str | Callable[[], str] = "",
    interval_s: float = 0.02,
) -> T:
    """Asks `condition` until its answer is true, and returns that answer.

    AssertionError after `timeout_s`. The bound is generous, for a loaded machine: a test that
    wants to say "soon" measures the time itself.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            text = message() if callable(message) else message
            text = text or getattr(condition, "__name__", "the condition")
            raise AssertionError(f"not within {timeout_s:g} s: {text} (last answer: {answer!r})")
        time.sleep(interval_s)
