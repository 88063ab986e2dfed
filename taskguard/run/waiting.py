"""A wait for a key that another thread may give up: that of a caller which was cancelled.

Guarantees: the wait is either granted or given up, and both threads learn which.
"""

from __future__ import annotations

from taskguard.model.lease import Owner
from taskguard.native import allocate_lock

__all__ = ["Waiting"]


class Waiting:
    """A wait for a key in one thread that another thread may give up.

    Attributes:
        wait_s: how long it waits, in seconds.
        owner: the waiter as the lock server knows it. None: it has not asked yet.
        given_up: whether its caller has given up.
    """

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        self.owner: Owner | None = None
        self.given_up = False
        self._granted = False
        self._mutex = allocate_lock()

    def grant(self) -> bool:
        """Note that the key is granted. Return False if the caller has given up."""
        with self._mutex:
            self._granted = not self.given_up
            return self._granted

    def give_up(self) -> bool:
        """Note that the caller gives up. Return False if the key was granted before."""
        with self._mutex:
            self.given_up = not self._granted
            return self.given_up
