"""Decides whether a delivery may run its body: by the lock server, then by the ledger.

Guarantees: it leaves no lease behind except the granted one, and no position among the waiters of
the lock server. That holds even if an answer is interrupted (by a time limit) or never arrives. If
the value at the lock server is no lease, or outlives every lease, the ledger decides, and the value
stays.

Read next: `claiming.py` for the ledger's part, `runner.py` for what follows from the answer.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
from collections import deque
from dataclasses import dataclass, replace
from typing import cast

from taskguard.clock import Clock
from taskguard.errors import LockServerUnavailableError
from taskguard.events import (
    Acquired,
    Contended,
    Events,
    LockOverruled,
    LockUnavailable,
    LockUndecided,
)
from taskguard.locks.base import (
    NOBODY,
    PROMOTED,
    Granted,
    Held,
    HintingLocks,
    Hold,
    LockProvider,
)
from taskguard.model.bounds import slots_of
from taskguard.model.claims import Answer, Busy
from taskguard.model.counts import Noted
from taskguard.model.delivery import Delivery
from taskguard.model.history import Happened
from taskguard.model.lease import Lease, Owner, limit_option, new_owner, trusted_until_s
from taskguard.run import tracing
from taskguard.run.claiming import Admitted, Claiming
from taskguard.run.current import holders_around
from taskguard.run.names import Names
from taskguard.run.parking import PROMOTED_WAIT_S
from taskguard.run.tally import Tally
from taskguard.run.tracked import TrackedLease
from taskguard.run.waiting import Waiting

__all__ = ["Admission"]

logger = logging.getLogger("taskguard")

_POLL_S = 0.25


@dataclass(slots=True)
class _Waiter:
    """The owner for which a delivery wants its key.

    It stays the same as long as the lock server keeps its position among the waiters (`queued`).
    """

    owner: Owner
    queued: bool = False


class Admission:
    """Acquires the key of a delivery: at the lock server, then in the ledger."""

    def __init__(
        self,
        *,
        locks: LockProvider | None,
        claiming: Claiming | None,
        events: Events,
        clock: Clock,
        rng: random.Random,
        names: Names,
        tally: Tally,
    ) -> None:
        self._locks = locks
        self._claiming = claiming
        self._events = events
        self._clock = clock
        self._rng = rng
        self._names = names
        self._tally = tally

    def admit(self, delivery: Delivery, waiting: Waiting | None) -> Admitted | Answer | Busy:
        """Try until the key is granted, the record has an answer, or the time to wait is over."""
        with tracing.span("claim", delivery) as span:
            found = self._admit(delivery, waiting)
            if isinstance(found, Admitted):
                tracing.note_claim(span, found.claimed, found.tracked.lease)
            else:
                tracing.note_refusal(span, found)
            return found

    def _admit(self, delivery: Delivery, waiting: Waiting | None) -> Admitted | Answer | Busy:
        started_s, wait_s = self._clock.monotonic_s(), _wait_s(delivery, waiting)
        waiter = _Waiter(new_owner(delivery.message.id))
        try:
            while True:
                if waiting is not None:
                    waiting.owner = waiter.owner
                left_s = max(0.0, started_s + wait_s - self._clock.monotonic_s())
                found = self._try_slots(delivery, waiter, wait_s=left_s, started_s=started_s)
                if not isinstance(found, Busy):
                    return found
                if self._events.hears(Contended.level):
                    holder = self._names.named(found.owner)
                    self._events.about(
                        delivery, Contended, retry_after_s=found.retry_after_s, **holder
                    )
                left_s = started_s + wait_s - self._clock.monotonic_s()
                if left_s <= 0.0 or (delivery.promoted and not _comes_soon(found, left_s)):
                    return found
                if waiting is None or not waiting.given_up:
                    self._wait(delivery, waiter, found, left_s)
                if waiting is not None and waiting.given_up:
                    return found
                if not waiter.queued:
                    # It has no position to keep. If the ledger refused it, its lease is given away.
                    waiter = _Waiter(new_owner(delivery.message.id))
        finally:
            self._stop_waiting(delivery, waiter)

    # -- one attempt --------------------------------------------------------------------------

    def _try_slots(
        self, delivery: Delivery, waiter: _Waiter, *, wait_s: float, started_s: float
    ) -> Admitted | Answer | Busy:
        """Try once. If the key has slots, try one after the other, until one is free.

        Each delivery begins at another slot, so that they do not all try the same one. No delivery
        waits for one slot: another one may be free before.
        """
        bounds = delivery.bounds
        if bounds is None or not delivery.policy.has_slots:
            return self._try(delivery, waiter, wait_s=wait_s, started_s=started_s)
        slots = deque(slots_of(bounds.key, bounds.limit))
        slots.rotate(self._rng.randrange(len(slots)))
        bounds = replace(bounds, slots=tuple(slots))
        for slot in bounds.slots:
            one = replace(delivery, keys=(slot,), bounds=bounds)
            last = slot == bounds.slots[-1]
            found = self._try(one, waiter, wait_s=0.0, started_s=started_s, last=last)
            if last or not _is_slot_taken(found):
                return found
        raise AssertionError("unreachable")

    def _try(
        self,
        delivery: Delivery,
        waiter: _Waiter,
        *,
        wait_s: float,
        started_s: float,
        last: bool = True,
    ) -> Admitted | Answer | Busy:
        """Acquire the key at the lock server, then claim it, once each.

        Unless it is the `last` slot, the record of the work is not read.
        """
        owner, waits = waiter.owner, waiter.queued or wait_s > 0.0
        claiming = self._claiming_of(delivery)
        requested_at_s = self._clock.monotonic_s()
        waiter.queued = False
        granted = self._acquire(delivery, owner, wait_s)
        if isinstance(granted, Granted) and claiming is None:
            until_s = trusted_until_s(requested_at_s=requested_at_s, ttl_s=granted.ttl_s)
            if self._clock.monotonic_s() >= until_s:
                self._connect_for_renewals(delivery, owner)
                requested_at_s = self._clock.monotonic_s()
                granted = self._acquire(delivery, owner, wait_s)
        if isinstance(granted, Held):
            waiter.queued = waits and self._locks is not None and self._locks.traits.fair
            if not last and self._is_lease(delivery, granted):
                return Busy(granted.owner, granted.remaining_s, False, False, granted.key)
            return self._refuse(delivery, waiter, granted, requested_at_s)
        if granted is not None:
            waited_s = self._clock.monotonic_s() - started_s
            self._events.about(delivery, Acquired, waited_s=waited_s)
        tracked = self._tracked(delivery, owner, requested_at_s, granted)
        if claiming is not None:
            return claiming.claim(delivery, tracked)
        if granted is None:
            raise LockServerUnavailableError(
                f"The lock server gave no answer and no ledger decides on {delivery.key}. "
                "Nothing was run.",
                key=delivery.key,
            )
        paused = self._claiming and self._claiming.pause_of_share(tracked)
        return Busy(paused, None, False, False) if paused else Admitted(tracked, None)

    def _claiming_of(self, delivery: Delivery) -> Claiming | None:
        """How to claim in the ledger. None: the lock server alone decides."""
        return None if delivery.is_shared else self._claiming

    def _acquire(self, delivery: Delivery, owner: Owner, wait_s: float) -> Granted | Held | None:
        """Return the lock server's answer. None: it gave no answer, or there is no lock server."""
        if self._locks is None:
            return None
        requested_at_s = self._clock.monotonic_s()
        undecided = self._claiming_of(delivery) is None
        try:
            if delivery.promoted and self._locks.traits.hints and not delivery.is_shared:
                if len(delivery.keys) == 1:
                    return cast("HintingLocks", self._locks).acquire_promoted(
                        delivery.keys[0], owner, ttl_s=delivery.policy.ttl_s, wait_s=wait_s
                    )
                self._locks.release(delivery.keys, PROMOTED)  # one of them may be reserved for it
            found = self._locks.acquire(
                delivery.keys,
                owner,
                ttl_s=delivery.policy.ttl_s,
                with_fence=undecided,
                wait_s=wait_s,
                **limit_option(delivery.limit),
            )
            if wait_s <= 0.0:  # otherwise it was the holder that took the time
                took_s = self._clock.monotonic_s() - requested_at_s
                self._tally.answer("locks", "acquire", took_s)
            return found
        except LockServerUnavailableError as error:
            took_s = self._clock.monotonic_s() - requested_at_s
            self._tally.no_answer("locks", "acquire")
            kind = LockUndecided if undecided else LockUnavailable
            self._events.about(delivery, kind, error=str(error), took_s=took_s)
            if undecided:
                raise
            return None
        except BaseException:  # a time limit, for example: the lease may have been granted
            self._release(delivery, owner)
            raise

    def _release(self, delivery: Delivery, owner: Owner) -> None:
        """Release what the owner may hold, and its position. If there is no answer, both expire."""
        assert self._locks is not None  # noqa: S101  # it was requested to grant the key
        with contextlib.suppress(LockServerUnavailableError):
            self._locks.release(delivery.keys, owner, **limit_option(delivery.limit))

    def _connect_for_renewals(self, delivery: Delivery, owner: Owner) -> None:
        """Connect for renewals, before a lease that expired on its way is acquired again."""
        assert self._locks is not None  # noqa: S101  # it has granted
        hold = Hold(delivery.keys, owner, delivery.policy.ttl_s, delivery.limit)
        try:
            self._locks.renew([hold])
        except LockServerUnavailableError as error:
            logger.debug("%s: a late grant is not renewed: %s", delivery.key, error)
        except BaseException:  # a time limit, for example
            self._release(delivery, owner)
            raise

    def _tracked(
        self, delivery: Delivery, owner: Owner, requested_at_s: float, granted: Granted | None
    ) -> TrackedLease:
        """Return a lease for the delivery. `granted`: the lock server's grant, if any."""
        policy = delivery.policy
        # With a ledger, the ledger's lease counts.
        decides = granted is not None and self._claiming_of(delivery) is None
        ttl_s = granted.ttl_s if granted is not None and decides else policy.ttl_s
        lease = Lease(
            keys=delivery.keys,
            owner=owner,
            ttl_s=ttl_s,
            clock=self._clock,
            taken_at_s=requested_at_s,
            trusted_until_s=trusted_until_s(requested_at_s=requested_at_s, ttl_s=ttl_s),
            fence=0 if granted is None else granted.fence,
            limit=delivery.limit,
            of_work=self._claiming is not None and not delivery.is_lock,
            max_hold_until_s=None
            if policy.max_hold_s is None
            else requested_at_s + policy.max_hold_s,
        )
        return TrackedLease(
            lease,
            claim=None,
            at_lock_server=granted is not None,
            requested_at_s=requested_at_s,
            task=delivery.task,
            message=delivery.message.id,
            interrupt=policy.interrupts,
            by_token=delivery.is_lock and bool(delivery.message.id),
        )

    # -- the lock server says that the key is held ----------------------------------------------

    def _refuse(
        self, delivery: Delivery, waiter: _Waiter, held: Held, requested_at_s: float
    ) -> Admitted | Answer | Busy:
        """Return the record's answer, or a grant of the ledger if it decides against the server."""
        found = self._peek(delivery, waiter.owner, held)
        claiming = self._claiming_of(delivery)
        if claiming is None or not isinstance(found, Busy):
            return found
        tracked = self._tracked(delivery, waiter.owner, requested_at_s, None)
        if not self._is_lease(delivery, held):
            return self._overrule(claiming, delivery, tracked, held)
        if not delivery.policy.replaces_holder or found.same_work or held.shared:
            return found
        self._stop_waiting(delivery, waiter)
        return self._supersede(claiming, delivery, tracked, held) or found

    def _peek(self, delivery: Delivery, owner: Owner, held: Held) -> Answer | Busy:
        """Read whether this work is done already, or in progress."""
        refused = _refused(held)
        if self._claiming is not None and delivery.work is not None and not delivery.is_lock:
            return self._claiming.peek(delivery, owner, refused)
        name, holder = delivery.message.id, refused.owner
        same = bool(name) and holder is not None and holder.message == name
        return replace(refused, same_work=same, started=same)

    def _is_lease(self, delivery: Delivery, held: Held) -> bool:
        """Whether the value at the lock server may be a live lease, for which the delivery waits.

        Its holder may be about to claim or to end, which the ledger does not know. It is no lease
        of this task if another application wrote it, or if it outlives `ttl_s` (no expiry, a server
        whose clock was set back). If it is another task's longer lease, the ledger knows it. The
        ledger does not know holders that share a key. If the provider knows no owners, the value
        counts as a lease.
        """
        assert self._locks is not None  # noqa: S101  # it holds the value
        # Some servers keep leases for whole seconds.
        traits = self._locks.traits
        longest_s = math.ceil(max(delivery.policy.ttl_s, traits.min_ttl_s))
        ours = held.owner.is_ours and held.remaining_s <= longest_s
        return ours or held.shared or not traits.owners

    def _overrule(
        self, claiming: Claiming, delivery: Delivery, tracked: TrackedLease, held: Held
    ) -> Admitted | Answer | Busy:
        """The lock server's value is no lease: the ledger decides, as without a lock server."""
        found = claiming.claim(delivery, tracked)
        if isinstance(found, Admitted):
            holder = held.owner.message if held.owner.is_ours else ""
            self._events.about(delivery, LockOverruled, holder=holder, remaining_s=held.remaining_s)
            self._tally.happened(
                Noted(
                    what=Happened.OVERRULED,
                    key=delivery.key,
                    task=delivery.task,
                    work=delivery.work,
                    owner=str(tracked.lease.owner),
                    fence=tracked.lease.fence,
                    detail=f"message {holder}" if holder else None,
                )
            )
        return found

    def _supersede(
        self, claiming: Claiming, delivery: Delivery, tracked: TrackedLease, held: Held
    ) -> Admitted | Answer | None:
        """Take the key from its holder in the ledger, then at the lock server.

        Return None if the holder keeps it. At the lock server the key is never free in between.
        """
        found = claiming.claim(delivery, tracked, held_by=held.owner)
        if isinstance(found, Busy):
            return None
        over = found.claimed.over if isinstance(found, Admitted) and found.claimed else None
        if over is not None and self._locks is not None:
            ttl_s, owner = delivery.policy.ttl_s, tracked.lease.owner
            with contextlib.suppress(LockServerUnavailableError):
                tracked.at_lock_server = self._locks.hand_over(
                    delivery.keys, over, to=owner, ttl_s=ttl_s
                )
        return found

    # -- waiting ------------------------------------------------------------------------------

    def _wait(self, delivery: Delivery, waiter: _Waiter, busy: Busy, left_s: float) -> None:
        """Wait until the key may be free, the holder's lease ends, or `left_s` are over."""
        timeout_s = min(left_s, 1.0)
        if busy.retry_after_s is not None:
            timeout_s = min(timeout_s, busy.retry_after_s + 0.01)
        if self._locks is not None and busy.key is not None and not delivery.policy.has_slots:
            limit = limit_option(delivery.limit)
            try:
                self._locks.wait(busy.key, waiter.owner, timeout_s=timeout_s, **limit)
            except LockServerUnavailableError:
                self._clock.sleep(min(timeout_s, _POLL_S))
        else:
            self._clock.sleep(min(timeout_s, _POLL_S))

    def _stop_waiting(self, delivery: Delivery, waiter: _Waiter) -> None:
        """Give up its position at the lock server, if it has one."""
        if waiter.queued and self._locks is not None:
            waiter.queued = False
            self._release(delivery, waiter.owner)


def _wait_s(delivery: Delivery, waiting: Waiting | None) -> float:
    """How long a delivery waits for a held key before it is deferred, in seconds."""
    policy, queue = delivery.policy, delivery.queue
    # The key of a promoted message is free, unless another process is probing it.
    wait_s = PROMOTED_WAIT_S if delivery.promoted else policy.waits_up_to_s
    if waiting is not None:
        wait_s = waiting.wait_s
    if wait_s and holders_around(delivery.keys):
        return 0.0  # a body that holds a slot of its key does not wait for another one
    return min(wait_s, queue.longest_wait_s) if wait_s and queue is not None else wait_s


def _refused(held: Held) -> Busy:
    """Return Busy for a lock server's refusal. It may not know the holder or the lease's end."""
    if held.owner == NOBODY:
        return Busy(None, None, same_work=False, started=False, key=held.key)
    return Busy(held.owner, held.remaining_s, same_work=False, started=False, key=held.key)


def _comes_soon(found: Busy, left_s: float) -> bool:
    """Return True if a promoted message should wait.

    Either the lock server lags behind the ledger, or the message is early for its rate.
    """
    early = found.too_early and (found.retry_after_s or 0.0) <= left_s
    return found.key is not None or early


def _is_slot_taken(found: Admitted | Answer | Busy) -> bool:
    """Whether another slot may be free: this one is held, by other work."""
    if not isinstance(found, Busy) or found.same_work:
        return False
    if found.owner is not None:
        return not found.owner.is_pause  # which has all slots
    return found.key is not None
