"""Takes, extends and ends plain locks: those of `tg.lock()` and of leaders.

Guarantees: each acquisition has an owner and a fence of its own. A lease is ended by its owner's
name, so the release of a lost lock leaves the next holder's alone. A lock that was granted to a
caller that gave up waiting is released at once.

The token of a lock is the message of its owner, so any process finds its holder at the lock server
or in the ledger.

Read next: `lock.py`, the lock as users have it, and `watchdog.py`, which renews the leases.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from taskguard.clock import Clock
from taskguard.errors import (
    KeyBusyError,
    LeaseLostError,
    LedgerUnavailableError,
    LockServerUnavailableError,
)
from taskguard.locks.base import Hold, Holder, LockProvider, Renewal
from taskguard.model.claims import Claim
from taskguard.model.delivery import Delivery, Outcome
from taskguard.model.lease import Owner, limit_option
from taskguard.run.claiming import Admitted
from taskguard.run.current import running
from taskguard.run.holding import Holding, Releases
from taskguard.run.refusals import refuse_reentry
from taskguard.run.waiting import Waiting
from taskguard.run.watchdog import Watchdog

if TYPE_CHECKING:
    from taskguard.ledger.ports import Ledger, Records

__all__ = ["Locking", "lost"]

_Answer = TypeVar("_Answer")


class Locking:
    """Takes, renews and ends the plain locks of one runner."""

    def __init__(
        self,
        *,
        locks: LockProvider | None,
        ledger: Ledger | None,
        watchdog: Watchdog,
        releases: Releases,
        enter: Callable[[Delivery, Waiting | None], Admitted | Outcome],
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

    def take(self, delivery: Delivery, waiting: Waiting | None = None) -> Holding:
        """Acquire the keys, and renew their lease from now on. Raises KeyBusyError.

        `waiting`: the wait of a caller that may give up.
        """
        admitted = self._enter(delivery, waiting)
        if not isinstance(admitted, Admitted):
            raise KeyBusyError(f"{delivery.key} is held by another.", key=delivery.key)
        holding = self._holding(delivery, admitted)
        try:
            self._watchdog.track(holding.tracked)
        except BaseException:
            self.end(holding)
            raise
        if waiting is not None and not waiting.grant():
            self.undo(holding)
            raise KeyBusyError(f"{delivery.key} is wanted no more.", key=delivery.key)
        return holding

    def stop_waiting(self, delivery: Delivery, waiting: Waiting) -> None:
        """Leave the line of the lock server for a caller that gave up, while a thread waits."""
        if self._locks is not None and self._locks.traits.fair and waiting.owner is not None:
            with _unavailable_is_ignored():
                self._locks.release(delivery.keys, waiting.owner, **limit_option(delivery.limit))

    def undo(self, holding: Holding) -> None:
        """End a lease that no caller got. It is not reported as lost: see `stop_waiting()`."""
        self._releases.end_claim(holding, lambda ledger, claim: ledger.give_back(claim))
        self._releases.release(holding)

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
            self._watchdog.lose(tracked, "it expired", kind="expired")
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
        limit = limit_option(delivery.limit)
        ended = self._for_token(
            delivery,
            lambda ledger, claim: ledger.give_back(claim),
            lambda locks, owner: locks.release(delivery.keys, owner, **limit),
        )
        return bool(ended)

    def extend_by_token(self, delivery: Delivery) -> bool:
        """Renew the lease that the token has. Return False if it has none."""
        ttl_s, limit = delivery.policy.ttl_s, delivery.limit
        answers = self._for_token(
            delivery,
            lambda ledger, claim: ledger.renew([claim]),
            lambda locks, owner: locks.renew([Hold(delivery.keys, owner, ttl_s, limit)]),
        )
        if answers is None:
            return False
        if answers[0] in (Renewal.UNANSWERED, Renewal.SKIPPED):
            raise self._unanswered(delivery.key, self._deciding_ledger(delivery) is not None)
        return answers[0] == Renewal.RENEWED

    def _for_token(
        self,
        delivery: Delivery,
        in_ledger: Callable[[Ledger, Claim], _Answer],
        at_server: Callable[[LockProvider, Owner], _Answer],
    ) -> _Answer | None:
        """Change the lease that the token has. Return the answer of the server that decides.

        Return None if the token has no lease. If the ledger decides, the lock server may be down.
        """
        found, ledger = self._found(delivery), self._deciding_ledger(delivery)
        if found is None:
            return None
        if ledger is None:
            assert self._locks is not None  # noqa: S101  # it granted the lease
            return at_server(self._locks, found.owner)
        claim = Claim(delivery.request(found.owner, clock=self._clock), found.fence)
        answer = in_ledger(ledger, claim)
        if self._locks is not None:
            with _unavailable_is_ignored():
                at_server(self._locks, found.owner)
        return answer

    def _found(self, delivery: Delivery) -> Holder | None:
        """Return the token's hold on the first key: a lease has all of its keys or none."""
        key, token = delivery.keys[0], delivery.message.id
        by_ledger = self._deciding_ledger(delivery) is not None
        holders = self._on_record(key) if by_ledger else self._at_server(key)
        ours = (each for each in holders if each.owner.process and each.owner.message == token)
        return next(ours, None)

    def _deciding_ledger(self, delivery: Delivery) -> Ledger | None:
        """Return the ledger that grants the keys. None: the lock server alone grants them."""
        return None if delivery.is_shared else self._ledger

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
