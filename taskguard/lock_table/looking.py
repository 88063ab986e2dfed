"""Polling: how a waiter finds a free key if no server notifies it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

__all__ = ["WAIT_SLICE_S", "longer_pauses_s", "look_until"]

# Longest time of one wait. The caller then tries again, so a lost notification or an expired lease
# costs at most a second.
WAIT_SLICE_S = 1.0
_FIRST_LOOK_S, _LAST_LOOK_S = 0.02, 0.25


def look_until(is_free: Callable[[], bool], *, ends_s: float) -> None:
    """Block until `is_free()` returns True, or until `ends_s` on the monotonic clock."""
    for pause_s in longer_pauses_s():
        if is_free():
            return
        left_s = ends_s - time.monotonic()
        if left_s <= 0:
            return
        time.sleep(min(pause_s, left_s))


def longer_pauses_s() -> Iterator[float]:
    """Yield pauses between two checks. Each is twice as long as the last, up to 0.25 s."""
    pause_s = _FIRST_LOOK_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, _LAST_LOOK_S)
