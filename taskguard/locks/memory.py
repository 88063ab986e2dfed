"""Locks in the memory of one process: for tests of programs that use taskguard.

Guarantees what every provider guarantees, among the threads of this process, and passes the same
contract suite. Waiters get a key or a share in the order in which they came. Does not guarantee
anything to another process: a forked worker has its own locks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from taskguard.clock import SYSTEM_CLOCK, Clock
from taskguard.findings import Finding
from taskguard.locks import findings
from taskguard.locks.base import KEPT_S, PROMOTED, Granted, Held, Hold, Holder, Renewal, Traits
from taskguard.model.lease import Owner

__all__ = ["MemoryLocks"]

_WAIT_SLICE_S = 1.0
_POLL_S = 0.005
# A freed key is reserved for its first waiter for this long.
_GRACE_S = 0.05
# A waiter tries again every second. A late one is passed over, and later removed from the line.
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
    limit: int


class MemoryLocks:
    """A `LockProvider` in the memory of one process, for tests: `memory://`.

    Args:
        clock: the clock by which leases end. By default the machine's.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._mutex = threading.Lock()
        self._locks: dict[str, _Lock] = {}
        # The owners that share a key, with the ends of their leases. Such a key is not in `_locks`.
        self._shares: dict[str, dict[Owner, float]] = {}
        self._fences: dict[str, int] = {}
        # The waiters of a key, in the order in which they came. If the owner of a lock or a share
        # is still in the line, the lock or share is only reserved for it.
        self._lines: dict[str, dict[Owner, _Waiter]] = {}
        self._hints: set[str] = set()

    def __repr__(self) -> str:
        return "<MemoryLocks>"

    @property
    def traits(self) -> Traits:
        """Fair leases with tokens and hints, which several owners can share."""
        return Traits(fair=True, shares=True, hints=True)

    def acquire(
        self,
        keys: tuple[str, ...],
        owner: Owner,
        *,
        ttl_s: float,
        with_fence: bool,
        wait_s: float,
        limit: int = 1,
    ) -> Granted | Held:
        """Take all keys or none, or a share of one."""
        with self._mutex:
            now_s = self._clock.monotonic_s()
            if limit != 1:
                (key,) = keys
                return self._share(key, owner, ttl_s, limit, now_s, with_fence, waits=wait_s > 0)
            again = True
            for key in keys:
                if held := self._sharing(key, now_s):
                    last = max(held, key=lambda each: held[each])
                    return self._refuse(
                        keys, key, owner, _Lock(last, held[last]), now_s, waits=wait_s > 0
                    )
                lock = self._unexpired(key, now_s)
                if lock is None:
                    self._hear(key, owner, now_s)
                    lock = self._keep_for_first(key, now_s)
                if lock is not None and not self._may_take(key, owner, lock):
                    return self._refuse(keys, key, owner, lock, now_s, waits=wait_s > 0)
                again = again and lock is not None and lock.owner == owner
            for key in keys:
                self._shares.pop(key, None)  # these were only reserved, for later waiters
                self._locks[key] = _Lock(owner, now_s + ttl_s)
                again = not self._leave(key, owner) and again  # a reserved key was not held
            return Granted(self._token(keys, again=again) if with_fence else 0, ttl_s)

    def release(self, keys: tuple[str, ...], owner: Owner, *, limit: int = 1) -> bool:
        """Free the keys that the owner still holds, and leave their lines.

        Return False if the owner held none.
        """
        del limit  # the shares are known here
        with self._mutex:
            now_s = self._clock.monotonic_s()
            freed = False
            for key in keys:
                had_share = self._sharing(key, now_s).pop(owner, None) is not None
                if had_share:
                    freed = freed or not self._leave(key, owner)
                    self._keep_for_first(key, now_s)
                    continue
                if not self._step_back(key, owner, now_s) and self._owned((key,), owner):
                    del self._locks[key]
                    self._keep_for_first(key, now_s)
                    freed = True
            return freed

    def leave_hint(self, key: str) -> bool:
        """Leave a hint for the next release of the key. Return whether the key is free."""
        with self._mutex:
            self._hints.add(key)
            return self._is_free(key, self._clock.monotonic_s())

    def _is_free(self, key: str, now_s: float) -> bool:
        return self._unexpired(key, now_s) is None and not self._sharing(key, now_s)

    def release_and_take_hint(self, key: str, owner: Owner) -> tuple[bool, bool]:
        """Release the key, and take its hint."""
        freed = self.release((key,), owner)
        with self._mutex:
            hint = key in self._hints
            self._hints.discard(key)
            now_s = self._clock.monotonic_s()
            if hint and freed and self._is_free(key, now_s):
                self._locks[key] = _Lock(PROMOTED, now_s + KEPT_S)
            return freed, hint

    def acquire_promoted(
        self, key: str, owner: Owner, *, ttl_s: float, wait_s: float
    ) -> Granted | Held:
        """Take a key, even if it is reserved for a promoted message."""
        self.hand_over((key,), PROMOTED, to=owner, ttl_s=ttl_s)
        return self.acquire((key,), owner, ttl_s=ttl_s, with_fence=False, wait_s=wait_s)

    def hand_over(self, keys: tuple[str, ...], owner: Owner, *, to: Owner, ttl_s: float) -> bool:
        """Hand the keys that are still `owner`'s over to their true owner for `ttl_s`."""
        with self._mutex:
            handed = self._owned(keys, to)
            mine = self._owned(keys, owner)
            for key in mine:
                self._locks[key] = _Lock(to, self._clock.monotonic_s() + ttl_s)
            return bool(mine or handed)

    def renew(self, holds: Sequence[Hold]) -> list[str]:
        """Renew many leases. Return one `Renewal` constant for each, in order."""
        with self._mutex:
            return [self._renew(hold) for hold in holds]

    def wait(self, key: str, owner: Owner, *, timeout_s: float, limit: int = 1) -> None:
        """Block until the owner may get the key, or for a second. Then try to acquire it."""
        del limit  # the line knows the waiter's limit
        # Sleep by this object's clock, so that a test's own clock advances.
        until_s = self._clock.monotonic_s() + min(timeout_s, _WAIT_SLICE_S)
        while (left_s := until_s - self._clock.monotonic_s()) > 0:
            if self._is_turn(key, owner):
                return
            self._clock.sleep(min(_POLL_S, left_s))

    def holders(self, key: str) -> list[Holder]:
        """Return the holders of a key."""
        with self._mutex:
            now_s, fence = self._clock.monotonic_s(), self._fences.get(key, 0)
            if shares := self._sharing(key, now_s):
                return [
                    Holder(key, owner, fence, until_s - now_s, shared=True)
                    for owner, until_s in shares.items()
                ]
            lock = self._unexpired(key, now_s)
            return [] if lock is None else [Holder(key, lock.owner, fence, lock.until_s - now_s)]

    def close(self) -> None:
        """Nothing to close: the locks stay."""

    def flush(self) -> None:
        """Forget every lock and token, like a lock server that lost its memory."""
        with self._mutex:
            self._locks.clear()
            self._shares.clear()
            self._fences.clear()
            self._lines.clear()
            self._hints.clear()

    def held(self) -> dict[str, Owner]:
        """Return the owner of each key that is held or reserved; one owner of a shared key."""
        with self._mutex:
            now_s = self._clock.monotonic_s()
            alone = {k: lock.owner for k, lock in self._locks.items() if now_s < lock.until_s}
            shared = {k: next(iter(self._sharing(k, now_s)), None) for k in list(self._shares)}
            return alone | {k: owner for k, owner in shared.items() if owner is not None}

    def check(self) -> list[Finding]:
        """Return that they are locks of one process."""
        return [findings.LOCKS_IN_MEMORY.at("the locks")]

    def _unexpired(self, key: str, now_s: float) -> _Lock | None:
        lock = self._locks.get(key)
        return lock if lock is not None and now_s < lock.until_s else None

    def _owned(self, keys: tuple[str, ...], owner: Owner) -> list[str]:
        now_s = self._clock.monotonic_s()
        unexpired = ((key, self._unexpired(key, now_s)) for key in keys)
        return [key for key, lock in unexpired if lock is not None and lock.owner == owner]

    def _renew(self, hold: Hold) -> str:
        now_s = self._clock.monotonic_s()
        if any(shares := [self._sharing(key, now_s) for key in hold.keys]):
            if not all(hold.owner in each for each in shares):
                return Renewal.TAKEN
            for each in shares:
                each[hold.owner] = now_s + hold.ttl_s
            return Renewal.RENEWED
        found = [self._unexpired(key, now_s) for key in hold.keys]
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

    # -- a key that is shared -----------------------------------------------------------------

    def _sharing(self, key: str, now_s: float) -> dict[Owner, float]:
        """Return the owners that share the key, or for which a share is reserved."""
        held = self._shares.get(key)
        if held is None:
            return {}
        for owner in [owner for owner, until_s in held.items() if until_s <= now_s]:
            del held[owner]
        if not held:
            del self._shares[key]
        return held

    def _share(
        self,
        key: str,
        owner: Owner,
        ttl_s: float,
        limit: int,
        now_s: float,
        with_fence: bool,
        *,
        waits: bool,
    ) -> Granted | Held:
        """Take a share if fewer than `limit` owners hold the key and no earlier waiter waits."""
        line = self._lines.get(key)
        held = self._sharing(key, now_s)
        may = owner in held
        if not may and line is not None:
            self._join(key, owner, limit, now_s)  # if it does not wait, it leaves again below
            if self._unexpired(key, now_s) is None:
                self._keep_for_first(key, now_s)
            may = owner in self._sharing(key, now_s)
        elif not may:
            may = self._unexpired(key, now_s) is None and len(held) < limit
        held = self._sharing(key, now_s)
        if not may:
            lock = self._unexpired(key, now_s)
            if lock is None:
                first = min(held, key=lambda each: held[each])  # its share ends first
                lock = _Lock(first, held[first])
            if not waits:
                self._leave(key, owner)
            return self._refuse((key,), key, owner, lock, now_s, waits=waits, limit=limit)
        kept = self._lines.get(key, {})
        # Whether any owner, this one included, holds a share that is not only reserved.
        beside = any(each not in kept for each in held)
        self._shares.setdefault(key, {})[owner] = now_s + ttl_s
        self._leave(key, owner)
        return Granted(self._token((key,), again=beside) if with_fence else 0, ttl_s)

    # -- the line of waiters ------------------------------------------------------------------

    def _keep_for_first(self, key: str, now_s: float) -> _Lock | None:
        """Reserve a key for the first waiter that is not late.

        If the waiter wants a share, reserve one if there is room, and continue with the waiters
        behind it. Return the first reservation.
        """
        line = self._lines.get(key, {})
        held = len(self._sharing(key, now_s))
        first = None
        for owner, waiter in list(line.items()):
            if now_s >= waiter.gone_at_s:
                self._leave(key, owner)
            elif now_s < waiter.late_at_s:
                if held >= waiter.limit:
                    break  # later waiters do not overtake it
                waiter.late_at_s = now_s  # no second reservation before it has tried again
                lock = _Lock(owner, now_s + _GRACE_S)
                first = first or lock
                if waiter.limit == 1:
                    self._locks[key] = lock
                    break
                self._shares.setdefault(key, {})[owner] = lock.until_s
                held += 1
        return first

    def _may_take(self, key: str, owner: Owner, lock: _Lock) -> bool:
        """Return whether the owner has the lock, or waits before the owner it is reserved for."""
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
        limit: int = 1,
    ) -> Held:
        """Let the owner wait for the taken key only, and give up reservations of other keys."""
        for key in keys:
            if key != taken:
                self._step_back(key, owner, now_s)
        if waits:
            self._join(taken, owner, limit, now_s)
        left_s = lock.until_s - now_s
        kept = lock.owner in self._lines.get(taken, ()) and left_s <= _WAIT_SLICE_S
        return Held(
            key=taken,
            owner=lock.owner,
            remaining_s=_WAIT_SLICE_S if kept and not waits else left_s,
            shared=bool(self._sharing(taken, now_s)),
        )

    def _join(self, key: str, owner: Owner, limit: int, now_s: float) -> None:
        self._lines.setdefault(key, {}).setdefault(owner, _Waiter(now_s, now_s, limit))
        self._hear(key, owner, now_s)

    def _hear(self, key: str, owner: Owner, now_s: float) -> None:
        waiter = self._lines.get(key, {}).get(owner)
        if waiter is not None:
            waiter.late_at_s, waiter.gone_at_s = now_s + _LATE_S, now_s + _GONE_S

    def _step_back(self, key: str, owner: Owner, now_s: float) -> bool:
        """Leave the line, and pass a reservation on. Return whether the owner was in the line."""
        waited = self._leave(key, owner)
        if waited and self._owned((key,), owner):
            del self._locks[key]
            self._keep_for_first(key, now_s)
        elif waited and self._unexpired(key, now_s) is None:
            self._keep_for_first(key, now_s)  # waiters behind it may get a share now
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
            lock = self._unexpired(key, now_s)
            if lock is None:
                lock = self._keep_for_first(key, now_s)
            shares = self._sharing(key, now_s)
            return owner in shares or (not shares and (lock is None or lock.owner == owner))
