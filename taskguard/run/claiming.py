"""Claims in the ledger, which grants the key, names the holder, or answers the delivery.

Guarantees: no lease is left at the lock server unless the ledger granted it, too. That holds even
if the answer is interrupted (by a time limit) or never arrives. A key that the lock server forgot
is handed over to the owner that the ledger names, not freed.

Read next: `admission.py`, which calls the lock server before.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from taskguard.clock import Clock
from taskguard.errors import LedgerUnavailableError, LockServerUnavailableError, TaskguardError
from taskguard.events import Claimed as ClaimedEvent
from taskguard.events import Events, Takeover
from taskguard.locks.base import HintingLocks, LockProvider, Renewal
from taskguard.model.claims import Answer, Busy, Claim, Claimed, ClaimRequest
from taskguard.model.delivery import Delivery
from taskguard.model.lease import Owner, trusted_until_s
from taskguard.model.states import Decision
from taskguard.run import tracing
from taskguard.run.late import LateReports
from taskguard.run.names import Names
from taskguard.run.tally import Tally
from taskguard.run.tracked import TrackedLease
from taskguard.run.watchdog import Watchdog

if TYPE_CHECKING:
    from taskguard.ledger.ports import Ledger

__all__ = ["Admitted", "Claiming"]

logger = logging.getLogger("taskguard")

_LATE_RENEWALS = 2


@dataclass(slots=True)
class Admitted:
    """The delivery may run. `claimed` is None with locks only."""

    tracked: TrackedLease
    claimed: Claimed | None


class Claiming:
    """Claims keys in one ledger."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        locks: LockProvider | None,
        events: Events,
        clock: Clock,
        watchdog: Watchdog,
        late: LateReports,
        names: Names,
        tally: Tally,
    ) -> None:
        self._ledger = ledger
        self._locks = locks
        self._events = events
        self._clock = clock
        self._watchdog = watchdog
        self._late = late
        self._names = names
        self._tally = tally

    def claim(
        self, delivery: Delivery, tracked: TrackedLease, *, held_by: Owner | None = None
    ) -> Admitted | Answer | Busy:
        """Claim the key for the owner of this lease, which it may have at the lock server.

        `held_by`: with `busy="supersede"`, the holder whose claim it replaces.
        """
        lease = tracked.lease
        request = delivery.request(lease.owner, clock=self._clock)
        trace = tracing.traceparent()
        if trace is not None:
            request = replace(request, trace=trace)
        if held_by is not None:
            request = replace(request, held_by=held_by)
        if tracked.at_lock_server:
            request = _of_one_slot(request)
        requested_at_s = self._clock.monotonic_s()
        try:
            found = self._ledger.claim(request)
            took_s = self._clock.monotonic_s() - requested_at_s
            self._tally.answer("ledger", "claim", took_s)
            if isinstance(found, Claimed):
                self._note_claim(delivery, tracked, found, requested_at_s)
                self._names.register()
                self._renew_if_late(tracked, found.claim)
                return Admitted(tracked, found)
        except BaseException as error:
            if not isinstance(error, TaskguardError):
                self._late.settle(request)  # a time limit, for example
            elif isinstance(error, LedgerUnavailableError):
                self._tally.no_answer("ledger", "claim")
                self._late.pending.append(request)
            self._watchdog.release_lock(tracked)
            raise
        if isinstance(found, Busy) and found.owner is not None and found.retry_after_s:
            self._hand_over(delivery, tracked, to=found.owner, ttl_s=found.retry_after_s)
            return found
        answered_by_record = not tracked.at_lock_server
        self._watchdog.release_lock(tracked)
        if answered_by_record and isinstance(found, Answer):
            return _until_body_ends(found, lease.ttl_s)
        return found

    def _note_claim(
        self, delivery: Delivery, tracked: TrackedLease, found: Claimed, requested_at_s: float
    ) -> None:
        lease = tracked.lease
        lease.fence = found.claim.fence
        lease.keys = found.claim.keys  # the slot that it got, if the key has several
        tracked.claim = found.claim
        tracked.decided_by_ledger = True
        tracked.requested_at_s = requested_at_s
        lease.extend(trusted_until_s(requested_at_s=requested_at_s, ttl_s=lease.ttl_s))
        took_s = self._clock.monotonic_s() - requested_at_s
        fence, attempt = found.claim.fence, found.attempt
        self._events.about(delivery, ClaimedEvent, fence=fence, attempt=attempt, took_s=took_s)
        if found.takeover:
            self._tally.takeover(delivery.task)
            self._events.about(
                delivery,
                Takeover,
                fence=fence,
                attempt=attempt,
                crashes=found.crashes,
                **self._names.named(found.vanished),
            )

    def _renew_if_late(self, tracked: TrackedLease, claim: Claim) -> None:
        """Renew a claim whose answer came after its lease, because connecting took so long.

        The first renewal connects for renewals, so the second one is fast.
        """
        lease = tracked.lease
        for _ in range(_LATE_RENEWALS):
            if lease.remaining_s > 0.0:
                return
            requested_at_s = self._clock.monotonic_s()
            try:
                if self._ledger.renew([claim]) != [Renewal.RENEWED]:
                    return  # the watchdog finds it lost
            except TaskguardError as error:
                logger.debug("%s: a late grant is not renewed: %s", lease.key, error)
                return
            tracked.requested_at_s = requested_at_s
            lease.extend(trusted_until_s(requested_at_s=requested_at_s, ttl_s=lease.ttl_s))

    def _hand_over(
        self, delivery: Delivery, tracked: TrackedLease, *, to: Owner, ttl_s: float
    ) -> None:
        """Hand the lease over to its true owner, which the lock server forgot. Others wait there.

        The owner may have ended meanwhile, and not know this lease. In that case release it.
        """
        tracked.ended = True
        if not tracked.at_lock_server or self._locks is None:
            return
        tracked.at_lock_server = False
        lease = tracked.lease
        try:
            if delivery.parking is not None and self._locks.traits.hints:
                # The lock server may have forgotten a hint, too. Leave one before the owner is
                # known again, because it may end at any moment.
                for key in lease.keys:
                    cast("HintingLocks", self._locks).leave_hint(key)
            self._locks.hand_over(lease.keys, lease.owner, to=to, ttl_s=ttl_s)
            if not self._ledger.holds(lease.keys, to):
                self._locks.release(lease.keys, to)
        except (LockServerUnavailableError, LedgerUnavailableError) as error:
            logger.debug("handing %s over got no answer: %s", lease.key, error)

    def peek(self, delivery: Delivery, owner: Owner, refused: Busy) -> Answer | Busy:
        """Look up work whose key is taken at the lock server: it may be done or in progress.

        A new message that can be parked is not looked up, because parking finds its record.
        """
        request = delivery.request(owner, clock=self._clock)
        if delivery.parking is not None and delivery.is_first and _is_plain(request):
            return replace(refused, unread=True)
        return self._read(delivery, refused, request)

    def pause_of(self, delivery: Delivery) -> Owner | None:
        """Return the owner that stands for a pause of the delivery's key, or None.

        The lock server does not know pauses. A delivery that it refuses may have met another one
        there, which the ledger refuses at the same moment.
        """
        try:
            return self._ledger.pause_of((*delivery.keys, *delivery.lines))
        except LedgerUnavailableError as error:
            logger.debug("%s: whether it is paused got no answer: %s", delivery.key, error)
            return None

    def pause_of_share(self, tracked: TrackedLease) -> Owner | None:
        """Return the pause of a key that the lock server grants without a claim, or None.

        If the key is paused, or the ledger gives no answer, the lease ends at the lock server. The
        query comes after the grant, and a pause looks for such holders after it has closed the key.
        So at least one of them sees the other.
        """
        try:
            paused = self._ledger.pause_of(tracked.lease.keys)
        except BaseException:
            self._watchdog.release_lock(tracked)
            raise
        if paused is not None:
            self._watchdog.release_lock(tracked)
        return paused

    def read(self, delivery: Delivery, refused: Busy) -> Answer | Busy:
        """Return what `peek()` answers if it does not leave the record unread."""
        return self._read(delivery, refused, delivery.request(clock=self._clock))

    def _read(self, delivery: Delivery, refused: Busy, request: ClaimRequest) -> Answer | Busy:
        holder = refused.owner
        found = self._ledger.peek(request)
        if isinstance(found, Busy):
            same, started = found.same_work, found.started
            trace = found.trace
            return replace(refused, same_work=same, started=started, unread=False, trace=trace)
        assert isinstance(found, Answer)  # noqa: S101  # a peek never claims
        done = found.decision is Decision.DONE
        if done and found.result_json is None and holder is not None and found.owner == holder:
            # DONE is committed, but its body has not ended: its return value may still come.
            return replace(refused, same_work=True, started=True, unread=False, trace=found.trace)
        if holder is None:
            return _until_body_ends(found, delivery.policy.ttl_s)
        return found


def _of_one_slot(request: ClaimRequest) -> ClaimRequest:
    """Return the request for the one slot that the lock server has granted."""
    bounds = request.bounds
    if bounds is None or not bounds.slots:
        return request
    return replace(request, bounds=replace(bounds, slots=request.keys))


def _until_body_ends(found: Answer, ttl_s: float) -> Answer | Busy:
    """Let duplicates of DONE work wait for the end of its body, if no lock server shows that end.

    Each body stores a result at its end, which may be null. If the holder died between COMMIT and
    that, or its body goes on, duplicates are answered `ttl_s` after the COMMIT.
    """
    left_s = ttl_s - found.age_s
    ended = found.result_json is not None or found.owner is None or left_s <= 0
    if found.decision is not Decision.DONE or ended:
        return found
    return Busy(None, left_s, same_work=True, started=True, trace=found.trace)


def _is_plain(request: ClaimRequest) -> bool:
    """Return True if the record of the work is all that a peek would read."""
    unusual = request.row is not None or request.bounds is not None or request.formerly
    return request.may_create and not unusual
