"""Who waits for a key where nobody can tell of its release looks for itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

__all__ = ["WAIT_SLICE_S", "longer_pauses_s", "look_until"]

# One wait lasts so long at most: the caller then asks again, so that a wake-up that got lost, or a
# lease that ran out, costs a second and no more.
WAIT_SLICE_S = 1.0
_FIRST_LOOK_S, _LAST_LOOK_S = 0.02, 0.25


def look_until(is_free: Callable[[], bool], *, ends_s: float) -> None:
    """Block until it is free, or until `ends_s` on the monotonic clock."""
    for pause_s in longer_pauses_s():
        if is_free():
            return
        left_s = ends_s - time.monotonic()
        if left_s <= 0:
            return
        time.sleep(min(pause_s, left_s))


def longer_pauses_s() -> Iterator[float]:
    """For how long to wait between two looks: each time twice as long, up to four a second."""
    pause_s = _FIRST_LOOK_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, _LAST_LOOK_S)
