"""Waiting on conditions, so that tests need no sleeps: what is installed, with more patience."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pytest_taskguard import waiting

__all__ = ["wait_until"]

T = TypeVar("T")

# For a machine that may be slow or stand still. Shorter than most leases of the tests, so that one
# that has ended is not taken for one that was released.
PATIENCE_S = 25.0


def wait_until(
    condition: Callable[[], T],
    *,
    timeout_s: float = PATIENCE_S,
    message: str | Callable[[], str] = "",
    interval_s: float = 0.02,
) -> T:
    """As `pytest_taskguard.waiting.wait_until`."""
    return waiting.wait_until(
        condition, timeout_s=timeout_s, message=message, interval_s=interval_s
    )
