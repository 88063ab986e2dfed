"""Locks in the memory of one process: for tests of programs that use taskguard.

Guarantees what every provider guarantees, among the threads of this process, and passes the same
contract suite. Does not guarantee anything to another process: a forked worker has its own locks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from taskguard.clock import SYSTEM_CLOCK, Clock
from taskguard.findings import Finding, Level
from taskguard.lease import Owner
from taskguard.locks.base import Granted, Held, Hold, Renewal, Traits

__all__ = ["MemoryLocks"]

_WAIT_SLICE_S = 1.0
_POLL_S = 0.005


@dataclass(slots=True)
class _Lock:
    owner: Owner
    until_s: float


class MemoryLocks:
    """A `LockProvider` without a server. Leases run out by `clock`."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._mutex = threading.Lock()
        self._locks: dict[str, _Lock] = {}
        self._fences: dict[str, int] = {}
        self._releases: dict[str, int] = {}

    def __repr__(self) -> str:
        return "<MemoryLocks>"

    @property
    def traits(self) -> Traits:
        """Leases with tokens."""
        return Traits()

    def acquire(
        self, keys: tuple[str, ...], owner: Owner, *, ttl_s: float, with_fence: bool, wait_s: float
    ) -> Granted | Held:
        """Take all keys or none."""
        del wait_s  # waiters look for themselves
        with self._mutex:
            now_s = self._clock.monotonic_s()
            found = {key: self._standing(key, now_s) for key in keys}
            for key, lock in found.items():
                if lock is not None and lock.owner != owner:
                    return Held(key=key, owner=lock.owner, remaining_s=lock.until_s - now_s)
            for key in keys:
                self._locks[key] = _Lock(owner, now_s + ttl_s)
            again = all(found.values())
            return Granted(self._token(keys, again=again) if with_fence else 0, ttl_s)

    def release(self, keys: tuple[str, ...], owner: Owner) -> bool:
        """Free the keys that are still the owner's; False if none was."""
        with self._mutex:
            mine = self._owned(keys, owner)
            for key in mine:
                del self._locks[key]
                self._releases[key] = self._releases.get(key, 0) + 1
            return bool(mine)

    def hand_over(self, keys: tuple[str, ...], owner: Owner, *, to: Owner, ttl_s: float) -> bool:
        """Hand the keys that are still `owner`'s over to their true owner for `ttl_s`."""
        with self._mutex:
            handed = self._owned(keys, to)
            mine = self._owned(keys, owner)
            for key in mine:
                self._locks[key] = _Lock(to, self._clock.monotonic_s() + ttl_s)
            return bool(mine or handed)

    def renew(self, holds: Sequence[Hold]) -> list[str]:
        """Renew many leases; one `Renewal` constant for each, in order."""
        with self._mutex:
            return [self._renew(hold) for hold in holds]

    def wait(self, key: str, *, timeout_s: float) -> None:
        """Block until the key may have been released, a second at most: then ask again."""
        # Sleeps by the clock, so that a clock of a test's own moves on.
        until_s = self._clock.monotonic_s() + min(timeout_s, _WAIT_SLICE_S)
        seen = self._releases.get(key, 0)
        while (left_s := until_s - self._clock.monotonic_s()) > 0:
            if self._releases.get(key, 0) != seen or self._is_free(key):
                return
            self._clock.sleep(min(_POLL_S, left_s))

    def close(self) -> None:
        """Nothing to close: the locks stay."""

    def flush(self) -> None:
        """Forget every lock and token, like a lock server that lost its memory."""
        with self._mutex:
            self._locks.clear()
            self._fences.clear()

    def held(self) -> dict[str, Owner]:
        """Who holds what just now."""
        with self._mutex:
            now_s = self._clock.monotonic_s()
            return {k: lock.owner for k, lock in self._locks.items() if now_s < lock.until_s}

    def check(self) -> list[Finding]:
        """What they are: locks of one process."""
        return [
            Finding(
                "locks_in_memory",
                Level.NOTE,
                where="the locks",
                what="They are in the memory of each process (memory://).",
                why="Two processes do not see each other's: with a ledger one effect stays one, "
                "with locks alone two may work at once.",
                mend="The URL of a lock server, but in tests.",
            )
        ]

    def _standing(self, key: str, now_s: float) -> _Lock | None:
        lock = self._locks.get(key)
        return lock if lock is not None and now_s < lock.until_s else None

    def _owned(self, keys: tuple[str, ...], owner: Owner) -> list[str]:
        now_s = self._clock.monotonic_s()
        standing = ((key, self._standing(key, now_s)) for key in keys)
        return [key for key, lock in standing if lock is not None and lock.owner == owner]

    def _renew(self, hold: Hold) -> str:
        now_s = self._clock.monotonic_s()
        found = [self._standing(key, now_s) for key in hold.keys]
        if any(lock is not None and lock.owner != hold.owner for lock in found):
            return Renewal.TAKEN
        if not all(found):
            return Renewal.GONE
        for key in hold.keys:
            self._locks[key].until_s = now_s + hold.ttl_s
        return Renewal.RENEWED

    def _token(self, keys: tuple[str, ...], *, again: bool) -> int:
        last = max((self._fences.get(key, 0) for key in keys), default=0)
        if again and last:
            return last
        token = max(last + 1, int(self._clock.wall_s() * 1_000_000))
        self._fences.update(dict.fromkeys(keys, token))
        return token

    def _is_free(self, key: str) -> bool:
        with self._mutex:
            return self._standing(key, self._clock.monotonic_s()) is None
