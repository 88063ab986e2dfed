"""Plain locks: `tg.lock()` as an object, and what a leader holds.

Guarantees: each acquisition has an owner and a fence of its own. A lease is ended by its owner's
name, so the release of a lost lock leaves the next holder's alone. A forked child holds none of its
parent's locks.

A lock with a token belongs to the token instead of a thread. The token is the message of the owner,
so any process finds the holder at the lock server or in the ledger.

Read next: `watchdog.py`, which renews the leases.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from taskguard.clock import Clock
from taskguard.errors import (
    KeyAlreadyHeldError,
    KeyBusyError,
    LeaseLostError,
    LedgerUnavailableError,
    LockNotOwnedError,
    LockServerUnavailableError,
)
from taskguard.locks.base import Hold, Holder, LockProvider, Renewal
from taskguard.model.claims import Claim
from taskguard.model.delivery import Delivery, Outcome
from taskguard.model.lease import Lease, limit_option
from taskguard.run.claiming import Admitted
from taskguard.run.current import Running, begin, current_task, end, running
from taskguard.run.holding import Holding, Releases
from taskguard.run.refusals import refuse_reentry
from taskguard.run.watchdog import Watchdog

if TYPE_CHECKING:
    from taskguard.ledger.ports import Ledger, Records

__all__ = ["Lock", "Locking"]


class Locking:
    """Takes, renews and ends the plain locks of one runner."""

    def __init__(
        self,
        *,
        locks: LockProvider | None,
        ledger: Ledger | None,
        watchdog: Watchdog,
        releases: Releases,
        enter: Callable[[Delivery], Admitted | Outcome],
        holding: Callable[[Delivery, Admitted], Holding],
        clock: Clock,
    ) -> None:
        self._locks = locks
        self._ledger = ledger
        self._watchdog = watchdog
        self._releases = releases
        self._enter = enter
        self._holding = holding
        self._clock = clock

    @contextmanager
    def hold(self, delivery: Delivery) -> Iterator[Holding]:
        """Hold a plain lock during a `with` block."""
        refuse_reentry(delivery)
        holding = self.take(delivery)
        try:
            with running(holding.attempt):
                yield holding
        except BaseException:
            # A lost lease is not reported, because the caller gets the exception of the block.
            self.end(holding)
            raise
        if not self.end(holding):
            raise lost(holding)

    def take(self, delivery: Delivery) -> Holding:
        """Acquire the keys, and renew their lease from now on. Raises KeyBusyError."""
        admitted = self._enter(delivery)
        if not isinstance(admitted, Admitted):
            raise KeyBusyError(f"{delivery.key} is held by another.", key=delivery.key)
        holding = self._holding(delivery, admitted)
        try:
            self._watchdog.track(holding.tracked)
        except BaseException:
            self.end(holding)
            raise
        return holding

    def end(self, holding: Holding) -> bool:
        """End the lease. Return False if it is known to have been lost before."""
        tracked, lease = holding.tracked, holding.tracked.lease
        ran_out = lease.remaining_s <= 0.0
        ended: list[bool] = []
        self._releases.end_claim(
            holding, lambda ledger, claim: ended.append(ledger.give_back(claim))
        )
        released = self._releases.release(holding)
        if lease.is_parents:
            return True  # the child of a fork ends nothing, and has lost nothing
        if ran_out:
            self._watchdog.lose(tracked, "it expired")
        elif ended == [False] or (not tracked.decided_by_ledger and released is False):
            forgotten = "the lock server no longer knows it"
            shared = holding.delivery.is_shared
            reason = forgotten if shared else "another holder took it over"
            self._watchdog.lose(tracked, reason, by_server=True)
        return not lease.is_lost

    def extend(self, holding: Holding) -> None:
        """Renew the lease now. Raises LeaseLostError, or that a server gave no answer."""
        tracked = holding.tracked
        if not tracked.lease.is_lost and not self._watchdog.renew_now(tracked):
            raise self._unanswered(tracked.lease.key, tracked.decided_by_ledger)
        tracked.lease.check()

    def owns(self, holding: Holding) -> bool:
        """Return True if the lease can be trusted, and a server confirms it."""
        tracked, lease = holding.tracked, holding.tracked.lease
        if lease.remaining_s <= 0.0:
            return False
        if tracked.decided_by_ledger and self._ledger is not None:
            return self._ledger.holds(lease.keys, lease.owner)
        assert self._locks is not None  # noqa: S101  # it granted the lease
        locks = self._locks
        return all(lease.owner in {each.owner for each in locks.holders(k)} for k in lease.keys)

    def is_held(self, delivery: Delivery) -> bool:
        """Return True if any holder has one of the keys."""
        return any(self._at_server(key) or self._on_record(key) for key in delivery.keys)

    # -- locks of a token that another thread or process has acquired ---------------------------

    def owns_by_token(self, delivery: Delivery) -> bool:
        """Return True if the token holds the keys."""
        return self._found(delivery) is not None

    def release_by_token(self, delivery: Delivery) -> bool:
        """End the lease that the token has. Return False if it has none."""
        found = self._found(delivery)
        if found is None:
            return False
        claim = self._claim(delivery, found)
        known = claim is not None and self._ledger is not None and self._ledger.give_back(claim)
        if self._locks is not None:
            limit = limit_option(delivery.limit)
            with contextlib.nullcontext() if claim is None else _unavailable_is_ignored():
                freed = self._locks.release(delivery.keys, found.owner, **limit)
                known = freed if claim is None else known
        return known

    def extend_by_token(self, delivery: Delivery) -> bool:
        """Renew the lease that the token has. Return False if it has none."""
        found = self._found(delivery)
        if found is None:
            return False
        claim, answers = self._claim(delivery, found), [Renewal.UNANSWERED]
        if claim is not None and self._ledger is not None:
            answers = self._ledger.renew([claim])
        if self._locks is not None:
            hold = Hold(delivery.keys, found.owner, delivery.policy.ttl_s, delivery.limit)
            with contextlib.nullcontext() if claim is None else _unavailable_is_ignored():
                at_server = self._locks.renew([hold])
                answers = at_server if claim is None else answers
        if answers[0] in (Renewal.UNANSWERED, Renewal.SKIPPED):
            raise self._unanswered(delivery.key, claim is not None)
        return answers[0] == Renewal.RENEWED

    def _found(self, delivery: Delivery) -> Holder | None:
        """Return the token's hold on the first key: a lease has all of its keys or none."""
        key, token = delivery.keys[0], delivery.message.id
        decides = self._ledger is not None and not delivery.is_shared
        holders = self._on_record(key) if decides else self._at_server(key)
        ours = (each for each in holders if each.owner.process and each.owner.message == token)
        return next(ours, None)

    def _claim(self, delivery: Delivery, found: Holder) -> Claim | None:
        """Return the token's claim in the ledger. None: the lock server alone granted the keys."""
        if self._ledger is None or delivery.is_shared:
            return None
        return Claim(delivery.request(found.owner, clock=self._clock), found.fence)

    def _at_server(self, key: str) -> list[Holder]:
        if self._locks is None:
            return []
        try:
            return self._locks.holders(key)
        except LockServerUnavailableError:
            if self._ledger is None:
                raise
            return []  # the ledger decides

    def _on_record(self, key: str) -> list[Holder]:
        records: Records | None = self._ledger  # type: ignore[assignment]  # each ledger keeps them
        return [] if records is None else records.holders(key)

    def _unanswered(self, key: str, by_ledger: bool) -> Exception:
        kind = LedgerUnavailableError if by_ledger else LockServerUnavailableError
        who = "The ledger" if by_ledger else "The lock server"
        return kind(
            f"{who} did not renew the lease on {key}, which keeps its present end. Try again.",
            key=key,
        )


def _unavailable_is_ignored() -> contextlib.suppress:
    """Return a block in which the lock server may be down, because the ledger has decided."""
    return contextlib.suppress(LockServerUnavailableError)


def lost(holding: Holding) -> LeaseLostError:
    """Return the error for a holder that releases a lease which was lost before."""
    lease = holding.tracked.lease
    return LeaseLostError(
        f"The lease on {lease.key} was lost before it was released: {lease.lost_reason}. Another "
        "holder may have run at the same time. Call lease.check() before important writes, and "
        "pass lease.fence to servers that can refuse an older one.",
        key=lease.key,
        fence=lease.fence or None,
    )


@dataclass(slots=True, eq=False)
class _Held:
    """One lease of a lock.

    Attributes:
        by: the asyncio task or the thread that acquired it. With a token None.
        of_block: whether a `with` statement acquired it, whose end needs to find it.
        locking: what ends the lease. Tests replace the runner.
        running: what tells calls of this thread that the lock is around them. None: it is around
            none, because another process may release it.
        ended: whether it was released, or given up as lost.
    """

    by: object
    of_block: bool
    locking: Locking
    holding: Holding
    running: Running | None
    ended: bool = False

    @property
    def lease(self) -> Lease:
        return self.holding.tracked.lease


class Lock:
    """A lock on keys, which may be acquired any number of times. Made by `TaskGuard.lock()`.

    `with lock as lease:` acquires it for a block. It raises `KeyBusyError` if the keys stay taken
    for `wait_s`, and at the end `LeaseLostError` if the lease was lost meanwhile. Then the block
    may have overlapped with another holder's. An exception of the block itself is raised instead.

    Threads can share the object: each thread, and each asyncio task, has a lease of its own. With
    `token=` the lease belongs to the token. Any thread or process with that token owns it.

    taskguard renews a lease until it is released, or until this object is garbage collected.
    """

    def __init__(self, locking: Callable[[], Locking], delivery: Delivery) -> None:
        self._locking = locking
        self._delivery = delivery
        self._by_token = bool(delivery.message.id)
        # Appended to and removed from without a mutex, which a fork could leave locked.
        self._held: list[_Held] = []

    def __repr__(self) -> str:
        token = f" token={self._delivery.message.id!r}" if self._by_token else ""
        return f"<Lock {self._delivery.key}{token}>"

    def acquire(self) -> Lease | None:
        """Acquire the keys, and return the lease. Return None if they stay taken for `wait_s`.

        Raises:
            KeyAlreadyHeldError: it would wait for this thread, this token, or a body around it.
            LockServerUnavailableError, LedgerUnavailableError: a server gave no answer.
        """
        try:
            return self._acquire(of_block=False)
        except KeyBusyError:
            return None
        except KeyAlreadyHeldError:
            if self._delivery.policy.waits_up_to_s:
                raise
            return None

    def release(self) -> None:
        """Release the keys. With a token, also if another thread or process acquired them.

        The holder then stops renewing the lease. Its `lease.lost` is set, and no event `lost` is
        emitted.

        Raises:
            LeaseLostError: the lease was lost meanwhile. A new holder's lease stays.
            LockNotOwnedError: this thread, or this token, does not hold the keys.
        """
        held = self._mine()
        if held is not None:
            self._end(held)
        elif not (self._by_token and self._locking().release_by_token(self._delivery)):
            raise self._not_owned()

    def extend(self) -> None:
        """Renew the lease now, for a whole `ttl_s`, and check with the server that it is held.

        taskguard renews a lease by itself. Call this before a step that stops all threads of the
        process, and with a token for a lease whose holder has ended.

        Raises:
            LeaseLostError: the lease was lost meanwhile.
            LockNotOwnedError: this thread, or this token, does not hold the keys.
            LockServerUnavailableError, LedgerUnavailableError: a server gave no answer.
        """
        held = self._mine()
        if held is not None:
            held.locking.extend(held.holding)
        elif not (self._by_token and self._locking().extend_by_token(self._delivery)):
            raise self._not_owned()

    def locked(self) -> bool:
        """Return True if any holder, in any process, has one of the keys."""
        return self._locking().is_held(self._delivery)

    def owned(self) -> bool:
        """Return True if this thread, or this token, holds the keys. A server is asked."""
        held = self._mine()
        if held is not None:
            return held.locking.owns(held.holding)
        return self._by_token and self._locking().owns_by_token(self._delivery)

    def __enter__(self) -> Lease:
        return self._acquire(of_block=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # A block may end in another thread than it began in: a `yield` dependency of FastAPI.
        by = self._by()
        blocks = [each for each in reversed(self._held) if each.of_block]
        block = next((each for each in blocks if each.by is by), next(iter(blocks), None))
        if block is not None:
            self._held.remove(block)
        held = self._mine() if block is None or block.ended else block
        try:
            if held is None:
                raise self._not_owned()
            self._end(held)
        except (LeaseLostError, LockNotOwnedError):
            if error is None:
                raise

    def __del__(self) -> None:
        # The watchdog ends the renewal. A mutex must not be taken here: this thread may have it.
        for held in getattr(self, "_held", ()):
            held.holding.tracked.abandoned = True
            if held.running is not None:
                held.running.ended = True

    def _acquire(self, *, of_block: bool) -> Lease:
        held = self._mine()
        if held is not None and held.lease.remaining_s <= 0.0:
            with contextlib.suppress(LeaseLostError):
                self._end(held)  # the event `lost` tells of it
        elif held is not None:
            raise KeyAlreadyHeldError(
                f"{self!r} is acquired already, so acquire() would wait for itself. Use the lease "
                "that is held, or release it first.",
                key=self._delivery.key,
                fence=held.lease.fence or None,
            )
        refuse_reentry(self._delivery)
        locking = self._locking()
        holding = locking.take(self._delivery)
        around = begin(holding.attempt) if of_block or not self._by_token else None
        held = _Held(self._by(), of_block, locking, holding, around)
        self._held.append(held)
        return held.lease

    def _end(self, held: _Held) -> None:
        held.ended = True
        if held in self._held and not held.of_block:
            self._held.remove(held)
        if held.running is not None:
            end(held.running)
        if not held.locking.end(held.holding):
            raise lost(held.holding)

    def _mine(self) -> _Held | None:
        """Return the caller's lease. None if it has none, or if its parent process has it."""
        by = self._by()
        for each in reversed(self._held):
            if each.by is by and not each.ended and not each.lease.is_parents:
                return each
        return None

    def _by(self) -> Any:
        return None if self._by_token else current_task() or threading.current_thread()

    def _not_owned(self) -> LockNotOwnedError:
        holder = f"token {self._delivery.message.id!r}" if self._by_token else "this thread"
        return LockNotOwnedError(
            f"{self._delivery.key} is not held by {holder}: it was not acquired, or its lease has "
            "ended since.",
            key=self._delivery.key,
        )
