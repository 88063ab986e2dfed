"""Locks in the memory of one process: for tests of programs that use taskguard.

Guarantees what every provider guarantees, among the threads of this process, and passes the same
contract suite; who waits is served in the order in which they came. Does not guarantee anything to
another process: a forked worker has its own locks.
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
# A key that was freed is kept for the first who waits, until it comes, for so long at most.
_GRACE_S = 0.05
# Whoever waits asks again every second. Who is late is passed over, and then out of the line.
_LATE_S = 1.5
_GONE_S = 3.0


@dataclass(slots=True)
class _Lock:
    owner: Owner
    until_s: float


@dataclass(slots=True)
class _Waiter:
    late_at_s: float
    gone_at_s: float


class MemoryLocks:
    """A `LockProvider` without a server. Leases run out by `clock`."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._mutex = threading.Lock()
        self._locks: dict[str, _Lock] = {}
        self._fences: dict[str, int] = {}
        # Who waits for a key, in the order in which they came. The lock of a key whose owner is
        # still in the line is only kept for it.
        self._lines: dict[str, dict[Owner, _Waiter]] = {}

    def __repr__(self) -> str:
        return "<MemoryLocks>"

    @property
    def traits(self) -> Traits:
        """Leases with tokens, first come, first served."""
        return Traits(fair=True)

    def acquire(
        self, keys: tuple[str, ...], owner: Owner, *, ttl_s: float, with_fence: bool, wait_s: float
    ) -> Granted | Held:
        """Take all keys or none."""
        with self._mutex:
            now_s = self._clock.monotonic_s()
            again = True
            for key in keys:
                lock = self._standing(key, now_s)
                if lock is None:
                    self._hear(key, owner, now_s)
                    lock = self._keep_for_first(key, now_s)
                if lock is not None and not self._may_take(key, owner, lock):
                    return self._refuse(keys, key, owner, lock, now_s, waits=wait_s > 0)
                again = again and lock is not None and lock.owner == owner
            for key in keys:
                self._locks[key] = _Lock(owner, now_s + ttl_s)
                again = not self._leave(key, owner) and again  # kept for it is not held
            return Granted(self._token(keys, again=again) if with_fence else 0, ttl_s)

    def release(self, keys: tuple[str, ...], owner: Owner) -> bool:
        """Free the keys that are still the owner's, and leave their lines; False if none was."""
        with self._mutex:
            now_s = self._clock.monotonic_s()
            freed = False
            for key in keys:
                if not self._step_back(key, owner, now_s) and self._owned((key,), owner):
                    del self._locks[key]
                    self._keep_for_first(key, now_s)
                    freed = True
            return freed

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

    def wait(self, key: str, owner: Owner, *, timeout_s: float) -> None:
        """Block until the key may be the owner's, a second at most: then ask again."""
        # Sleeps by the clock, so that a clock of a test's own moves on.
        until_s = self._clock.monotonic_s() + min(timeout_s, _WAIT_SLICE_S)
        while (left_s := until_s - self._clock.monotonic_s()) > 0:
            if self._is_turn(key, owner):
                return
            self._clock.sleep(min(_POLL_S, left_s))

    def close(self) -> None:
        """Nothing to close: the locks stay."""

    def flush(self) -> None:
        """Forget every lock and token, like a lock server that lost its memory."""
        with self._mutex:
            self._locks.clear()
            self._fences.clear()
            self._lines.clear()

    def held(self) -> dict[str, Owner]:
        """Who holds what just now, or has it kept until it comes."""
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

    # -- the line of those who wait -----------------------------------------------------------

    def _keep_for_first(self, key: str, now_s: float) -> _Lock | None:
        """Keep a key that is free for the first in its line who is not late."""
        line = self._lines.get(key, {})
        for owner, waiter in list(line.items()):
            if now_s >= waiter.gone_at_s:
                self._leave(key, owner)
            elif now_s < waiter.late_at_s:
                waiter.late_at_s = now_s  # it is not called again before it has asked
                self._locks[key] = _Lock(owner, now_s + _GRACE_S)
                return self._locks[key]
        return None

    def _may_take(self, key: str, owner: Owner, lock: _Lock) -> bool:
        """Whether it has the lock, or comes before the one in the line for whom it is kept."""
        line = list(self._lines.get(key, ()))
        if lock.owner == owner:
            return True
        both = owner in line and lock.owner in line
        return both and line.index(owner) < line.index(lock.owner)

    def _refuse(
        self,
        keys: tuple[str, ...],
        taken: str,
        owner: Owner,
        lock: _Lock,
        now_s: float,
        *,
        waits: bool,
    ) -> Held:
        """It waits for the key that is taken, and keeps no other one from those who wait."""
        for key in keys:
            if key != taken:
                self._step_back(key, owner, now_s)
        if waits:
            self._lines.setdefault(taken, {}).setdefault(owner, _Waiter(now_s, now_s))
            self._hear(taken, owner, now_s)
        kept = lock.owner in self._lines.get(taken, ())
        return Held(
            key=taken,
            owner=lock.owner,
            remaining_s=_WAIT_SLICE_S if kept and not waits else lock.until_s - now_s,
        )

    def _hear(self, key: str, owner: Owner, now_s: float) -> None:
        waiter = self._lines.get(key, {}).get(owner)
        if waiter is not None:
            waiter.late_at_s, waiter.gone_at_s = now_s + _LATE_S, now_s + _GONE_S

    def _step_back(self, key: str, owner: Owner, now_s: float) -> bool:
        """Wait no longer; what is kept for it goes to the next. Whether it was in the line."""
        waited = self._leave(key, owner)
        if waited and self._owned((key,), owner):
            del self._locks[key]
            self._keep_for_first(key, now_s)
        return waited

    def _leave(self, key: str, owner: Owner) -> bool:
        line = self._lines.get(key, {})
        waited = line.pop(owner, None) is not None
        if waited and not line:
            del self._lines[key]
        return waited

    def _is_turn(self, key: str, owner: Owner) -> bool:
        with self._mutex:
            now_s = self._clock.monotonic_s()
            lock = self._standing(key, now_s)
            if lock is None:
                lock = self._keep_for_first(key, now_s)
            return lock is None or lock.owner == owner
