"""Whether a delivery may run its body: the lock server is asked, then the ledger, for `wait_s`.

Guarantees: whatever the answer is, no lease is left behind but the one that was granted, and no
place in the line of those who wait, also where the answer is interrupted (by a time limit) or never
comes; a key that the lock server forgot is handed over to the owner whom the ledger names, not
freed. A value at the lock server that is no lease, or outlives every lease, keeps no delivery from
what the ledger grants, and is not touched.

Read next: `runner.py`, which decides what to do with the answer.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from taskguard.clock import Clock
from taskguard.errors import LedgerUnavailableError, LockServerUnavailableError, TaskguardError
from taskguard.events import (
    Acquired,
    Contended,
    Event,
    Events,
    LockOverruled,
    LockUnavailable,
    LockUndecided,
    Takeover,
)
from taskguard.events import Claimed as ClaimedEvent
from taskguard.locks.base import (
    CALLED,
    NOBODY,
    Granted,
    Held,
    HintingLocks,
    Hold,
    LockProvider,
    Renewal,
)
from taskguard.model.bounds import slots_of
from taskguard.model.claims import Answer, Busy, Claim, Claimed, ClaimRequest
from taskguard.model.delivery import Delivery
from taskguard.model.lease import Lease, Owner, asked, new_owner, trusted_until_s
from taskguard.model.states import Decision
from taskguard.run.watchdog import TrackedLease, Watchdog

if TYPE_CHECKING:
    from taskguard.ledger.ports import Ledger

__all__ = ["Admission", "Admitted"]

logger = logging.getLogger("taskguard")

_POLL_S = 0.25
_MOST_UNSETTLED = 1_000
_LATE_RENEWALS = 2


@dataclass(slots=True)
class _Asker:
    """Who asks: the same owner as long as it waits, so that it keeps its place in the line."""

    owner: Owner
    in_line: bool = False


@dataclass(slots=True)
class Admitted:
    """The delivery may run. `claimed` is None with locks only."""

    tracked: TrackedLease
    claimed: Claimed | None


class Admission:
    """Asks the lock server and the ledger on a delivery's behalf."""

    def __init__(
        self,
        *,
        locks: LockProvider | None,
        ledger: Ledger | None,
        events: Events,
        clock: Clock,
        watchdog: Watchdog,
        rng: random.Random,
    ) -> None:
        self._rng = rng
        self.locks = locks
        self.ledger = ledger
        self.events = events
        self.clock = clock
        self.watchdog = watchdog
        # Claims that may have been granted, and whose answer never arrived.
        self._unsettled: deque[ClaimRequest] = deque(maxlen=_MOST_UNSETTLED)

    def ask(self, delivery: Delivery, *, wait_s: float) -> Admitted | Answer | Busy:
        """Ask until the answer is no Busy, or `wait_s` is over."""
        started_s = self.clock.monotonic_s()
        asker = _Asker(new_owner(delivery.message.id))
        try:
            while True:
                left_s = max(0.0, started_s + wait_s - self.clock.monotonic_s())
                found = self._ask_each(delivery, asker, wait_s=left_s, started_s=started_s)
                if not isinstance(found, Busy):
                    return found
                self._emit_contended(delivery, found)
                left_s = started_s + wait_s - self.clock.monotonic_s()
                if left_s <= 0.0 or (delivery.called and not _comes_soon(found, left_s)):
                    return found
                self._wait(delivery, asker, found, left_s)
                if not asker.in_line:
                    # It has no place to keep. If the ledger refused it, its lease is given away.
                    asker = _Asker(new_owner(delivery.message.id))
        finally:
            self._leave_line(delivery, asker)

    def _leave_line(self, delivery: Delivery, asker: _Asker) -> None:
        """Give up its place at the lock server, if it has one."""
        if asker.in_line and self.locks is not None:
            asker.in_line = False
            # Without an answer it is found out that nobody waits.
            with contextlib.suppress(LockServerUnavailableError):
                self.locks.release(delivery.keys, asker.owner, **asked(delivery.limit))

    def _ask_each(
        self, delivery: Delivery, asker: _Asker, *, wait_s: float, started_s: float
    ) -> Admitted | Answer | Busy:
        """Ask once; where its key has slots for one after the other, until one is not taken.

        Each begins at another one, so that they do not all try the same. Nobody waits in the line
        of a slot: another one may be free before.
        """
        bounds = delivery.bounds
        if bounds is None or bounds.limit == 1:
            return self._ask(delivery, asker, wait_s=wait_s, started_s=started_s)
        slots = deque(slots_of(bounds.key, bounds.limit))
        slots.rotate(self._rng.randrange(len(slots)))
        bounds = replace(bounds, slots=tuple(slots))
        for slot in bounds.slots:
            one = replace(delivery, keys=(slot,), bounds=bounds)
            last = slot == bounds.slots[-1]
            found = self._ask(one, asker, wait_s=0.0, started_s=started_s, last=last)
            if last or not _is_slot_taken(found):
                return found
        raise AssertionError("unreachable")

    def _ask(
        self,
        delivery: Delivery,
        asker: _Asker,
        *,
        wait_s: float,
        started_s: float,
        last: bool = True,
    ) -> Admitted | Answer | Busy:
        """Ask the lock server, then the ledger, once each.

        Unless it is the `last` time, nobody wants to know yet what is known of the work.
        """
        owner, waits = asker.owner, asker.in_line or wait_s > 0.0
        asked_at_s = self.clock.monotonic_s()
        asker.in_line = False
        admitted = self._admit(delivery, owner, wait_s)
        if isinstance(admitted, Granted) and self._ledger_of(delivery) is None:
            until_s = trusted_until_s(asked_at_s=asked_at_s, ttl_s=admitted.ttl_s)
            if self.clock.monotonic_s() >= until_s:
                self._connect_for_renewals(delivery, owner)
                asked_at_s = self.clock.monotonic_s()
                admitted = self._admit(delivery, owner, wait_s)
        if isinstance(admitted, Held):
            asker.in_line = waits and self.locks is not None and self.locks.traits.fair
            if not last and self._is_lease(delivery, admitted):
                return Busy(admitted.owner, admitted.remaining_s, False, False, admitted.key)
            return self._heed_holder(delivery, asker, admitted, asked_at_s)
        if admitted is not None:
            waited_s = self.clock.monotonic_s() - started_s
            self.emit(Acquired, delivery, waited_s=waited_s)
        tracked = self._tracked(delivery, owner, asked_at_s, admitted)
        if self._ledger_of(delivery) is None:
            if admitted is None:
                raise LockServerUnavailableError(
                    f"The lock server gave no answer and no ledger decides on {delivery.key}. "
                    "Nothing was run.",
                    key=delivery.key,
                )
            return Admitted(tracked, None)
        return self._claim(delivery, tracked)

    def _heed_holder(
        self, delivery: Delivery, asker: _Asker, held: Held, asked_at_s: float
    ) -> Admitted | Answer | Busy:
        """The key is taken at the lock server: what the record says, or that it is ours even so."""
        found = self._peek(delivery, asker.owner, held)
        if self._ledger_of(delivery) is None or not isinstance(found, Busy):
            return found
        if not self._is_lease(delivery, held):
            return self._overrule(delivery, asker.owner, held, asked_at_s)
        if delivery.policy.newest != "supersede" or found.same_work or held.shared:
            return found
        self._leave_line(delivery, asker)
        return self._supersede(delivery, asker.owner, held, asked_at_s) or found

    def _admit(self, delivery: Delivery, owner: Owner, wait_s: float) -> Granted | Held | None:
        """The lock server's answer; None if it gives none, or there is no lock server."""
        if self.locks is None:
            return None
        asked_at_s = self.clock.monotonic_s()
        try:
            if delivery.called and self.locks.traits.hints and delivery.limit == 1:
                if len(delivery.keys) == 1:
                    return cast("HintingLocks", self.locks).acquire_called(
                        delivery.keys[0], owner, ttl_s=delivery.policy.ttl_s, wait_s=wait_s
                    )
                self.locks.release(delivery.keys, CALLED)  # one of them may be kept for it
            return self.locks.acquire(
                delivery.keys,
                owner,
                ttl_s=delivery.policy.ttl_s,
                with_fence=self._ledger_of(delivery) is None,
                wait_s=wait_s,
                **asked(delivery.limit),
            )
        except LockServerUnavailableError as error:
            took_s = self.clock.monotonic_s() - asked_at_s
            undecided = self._ledger_of(delivery) is None
            kind = LockUndecided if undecided else LockUnavailable
            self.emit(kind, delivery, error=str(error), took_s=took_s)
            if undecided:
                raise
            return None
        except BaseException:  # a time limit, for example: the lease may have been granted
            with contextlib.suppress(LockServerUnavailableError):
                self.locks.release(delivery.keys, owner, **asked(delivery.limit))
            raise

    def _ledger_of(self, delivery: Delivery) -> Ledger | None:
        """The ledger that decides on the delivery; None: the lock server does."""
        return self.ledger if delivery.limit == 1 else None

    def _peek(self, delivery: Delivery, owner: Owner, held: Held) -> Answer | Busy:
        """The key is taken at the lock server: is this work done already, or part of it?

        What comes for the first time and may be parked is not looked for: parking sees whether
        there is a record.
        """
        refused = _refused(held)
        request = self.request(delivery, owner)
        if delivery.parking is not None and delivery.is_first and _is_plain(request):
            return replace(refused, unread=True)
        return self._read(delivery, refused, request)

    def read(self, delivery: Delivery, refused: Busy) -> Answer | Busy:
        """What `ask()` would have answered if it had not left the record unread."""
        return self._read(delivery, refused, self.request(delivery, Owner("", "")))

    def _read(self, delivery: Delivery, refused: Busy, request: ClaimRequest) -> Answer | Busy:
        holder = refused.owner
        if self.ledger is None or delivery.work is None or delivery.is_lock:
            name = delivery.message.id
            same = bool(name) and holder is not None and holder.message == name
            return replace(refused, same_work=same, started=same)
        found = self.ledger.peek(request)
        if isinstance(found, Busy):
            same, started = found.same_work, found.started
            return replace(refused, same_work=same, started=started, unread=False)
        assert isinstance(found, Answer)  # noqa: S101  # looking never claims
        done = found.decision is Decision.DONE
        if done and found.result_json is None and holder is not None and found.owner == holder:
            # DONE is committed, but its body has not ended: its return value may still come.
            return replace(refused, same_work=True, started=True, unread=False)
        if holder is None:
            return _until_body_ends(found, delivery.policy.ttl_s)
        return found

    def _overrule(
        self, delivery: Delivery, owner: Owner, held: Held, asked_at_s: float
    ) -> Admitted | Answer | Busy:
        """The lock server's value is no lease: the ledger decides, as without a lock server."""
        found = self._claim(delivery, self._tracked(delivery, owner, asked_at_s, None))
        if isinstance(found, Admitted):
            holder = held.owner.message if held.owner.is_ours else ""
            self.emit(LockOverruled, delivery, holder=holder, remaining_s=held.remaining_s)
        return found

    def _supersede(
        self, delivery: Delivery, owner: Owner, held: Held, asked_at_s: float
    ) -> Admitted | Answer | None:
        """Take the key from its holder in the ledger, then at the lock server. None: it stays his.

        There it is never free in between.
        """
        tracked = self._tracked(delivery, owner, asked_at_s, None)
        found = self._claim(delivery, tracked, held_by=held.owner)
        if isinstance(found, Busy):
            return None
        over = found.claimed.over if isinstance(found, Admitted) and found.claimed else None
        if over is not None and self.locks is not None:
            ttl_s = delivery.policy.ttl_s
            with contextlib.suppress(LockServerUnavailableError):
                tracked.at_lock_server = self.locks.hand_over(
                    delivery.keys, over, to=owner, ttl_s=ttl_s
                )
        return found

    def _claim(
        self, delivery: Delivery, tracked: TrackedLease, *, held_by: Owner | None = None
    ) -> Admitted | Answer | Busy:
        """Ask the ledger. Whatever it answers, no lease is left behind but one that it granted."""
        assert self.ledger is not None  # noqa: S101
        lease = tracked.lease
        request = self.request(delivery, lease.owner)
        if held_by is not None:
            request = replace(request, held_by=held_by)
        if tracked.at_lock_server:
            request = _of_one_slot(request)
        asked_at_s = self.clock.monotonic_s()
        try:
            found = self.ledger.claim(request)
            if isinstance(found, Claimed):
                self._note_claim(delivery, tracked, found, asked_at_s)
                self._renew_if_late(tracked, found.claim)
                return Admitted(tracked, found)
        except BaseException as error:
            if not isinstance(error, TaskguardError):
                self._settle(request)  # a time limit, for example
            elif isinstance(error, LedgerUnavailableError):
                self._unsettled.append(request)
            self.watchdog.release_lock(tracked)
            raise
        if isinstance(found, Busy) and found.owner is not None and found.retry_after_s:
            self._hand_over(delivery, tracked, to=found.owner, ttl_s=found.retry_after_s)
            return found
        answered_by_record = not tracked.at_lock_server
        self.watchdog.release_lock(tracked)
        if answered_by_record and isinstance(found, Answer):
            return _until_body_ends(found, lease.ttl_s)
        return found

    def _connect_for_renewals(self, delivery: Delivery, owner: Owner) -> None:
        """Have a connection for renewals, before a lease that ran out on its way is taken again."""
        assert self.locks is not None  # noqa: S101  # it has granted
        hold = Hold(delivery.keys, owner, delivery.policy.ttl_s, delivery.limit)
        try:
            self.locks.renew([hold])
        except LockServerUnavailableError as error:
            logger.debug("%s: a late grant is not renewed: %s", delivery.key, error)
        except BaseException:  # a time limit, for example
            with contextlib.suppress(LockServerUnavailableError):
                self.locks.release(delivery.keys, owner, **asked(delivery.limit))
            raise

    def _renew_if_late(self, tracked: TrackedLease, claim: Claim) -> None:
        """Renew a claim that arrived after its lease: making a connection took that long.

        By the second renewal there is a connection for renewals as well.
        """
        assert self.ledger is not None  # noqa: S101  # it has granted
        lease = tracked.lease
        for _ in range(_LATE_RENEWALS):
            if lease.remaining_s > 0.0:
                return
            asked_at_s = self.clock.monotonic_s()
            try:
                if self.ledger.renew([claim]) != [Renewal.RENEWED]:
                    return  # the watchdog finds it lost
            except TaskguardError as error:
                logger.debug("%s: a late grant is not renewed: %s", lease.key, error)
                return
            tracked.asked_at_s = asked_at_s
            lease.extend(trusted_until_s(asked_at_s=asked_at_s, ttl_s=lease.ttl_s))

    def _settle(self, request: ClaimRequest) -> bool:
        """End a claim whose answer never arrived, if it was granted; that counts as no crash.

        False if the ledger gave no answer again, so that the claim is to be settled later. A claim
        that the database has not yet worked on is not found.
        """
        ledger = self.ledger
        assert ledger is not None  # noqa: S101
        try:
            if request.work is None:
                found = ledger.claim(request)  # by the same owner: the same grant
                if isinstance(found, Claimed):
                    ledger.give_back(found.claim)
                return True
            view = ledger.view(request.work)
            if view is None:
                return True
            claim = Claim(_of_any_slot(request), view.fence)
            if view.owner != str(request.owner) or not ledger.give_back(claim):
                ledger.uncount_crash(claim)
        except TaskguardError as error:
            logger.debug("%s: a claim is not settled: %s", ", ".join(request.keys), error)
            self._unsettled.append(request)
            return False
        return True

    def settle_late(self) -> None:
        """Settle claims that got no answer, now that the ledger may give one again.

        Other threads and greenlets may do this at the same time: each claim is taken by one.
        """
        for _ in range(len(self._unsettled)):
            try:
                request = self._unsettled.popleft()
            except IndexError:
                return
            if not self._settle(request):
                return

    def _note_claim(
        self, delivery: Delivery, tracked: TrackedLease, found: Claimed, asked_at_s: float
    ) -> None:
        lease = tracked.lease
        lease.fence = found.claim.fence
        lease.keys = found.claim.keys  # of several slots the one that it got
        tracked.claim = found.claim
        tracked.decided_by_ledger = True
        tracked.asked_at_s = asked_at_s
        lease.extend(trusted_until_s(asked_at_s=asked_at_s, ttl_s=lease.ttl_s))
        took_s = self.clock.monotonic_s() - asked_at_s
        fence, attempt = found.claim.fence, found.attempt
        self.emit(ClaimedEvent, delivery, fence=fence, attempt=attempt, took_s=took_s)
        if found.takeover:
            self.emit(
                Takeover,
                delivery,
                fence=fence,
                attempt=attempt,
                crashes=found.crashes,
                **_named(found.vanished),
            )

    def _hand_over(
        self, delivery: Delivery, tracked: TrackedLease, *, to: Owner, ttl_s: float
    ) -> None:
        """Hand the lease over to its true owner, whom the lock server forgot; others wait there.

        He may have ended meanwhile, and not have known of it: then nobody else would release it.
        """
        tracked.ended = True
        ledger = self.ledger
        if not tracked.at_lock_server or self.locks is None or ledger is None:
            return
        tracked.at_lock_server = False
        lease = tracked.lease
        try:
            if delivery.parking is not None and self.locks.traits.hints:
                # One that was left for him may be forgotten, too; before he is known again, for he
                # may end at any moment. Of a task that has no line nobody would take it.
                for key in lease.keys:
                    cast("HintingLocks", self.locks).leave_hint(key)
            self.locks.hand_over(lease.keys, lease.owner, to=to, ttl_s=ttl_s)
            if not ledger.holds(lease.keys, to):
                self.locks.release(lease.keys, to)
        except (LockServerUnavailableError, LedgerUnavailableError) as error:
            logger.debug("handing %s over got no answer: %s", tracked.lease.key, error)

    def _wait(self, delivery: Delivery, asker: _Asker, busy: Busy, left_s: float) -> None:
        """Wait until it may be our turn, the other holder's lease ends, or `left_s` are over."""
        timeout_s = min(left_s, 1.0)
        if busy.retry_after_s is not None:
            timeout_s = min(timeout_s, busy.retry_after_s + 0.01)
        alone = delivery.bounds is None or delivery.bounds.limit == 1
        if self.locks is not None and busy.key is not None and alone:
            try:
                self.locks.wait(busy.key, asker.owner, timeout_s=timeout_s, **asked(delivery.limit))
            except LockServerUnavailableError:
                self.clock.sleep(min(timeout_s, _POLL_S))
        else:
            self.clock.sleep(min(timeout_s, _POLL_S))

    def request(self, delivery: Delivery, owner: Owner) -> ClaimRequest:
        policy = delivery.policy
        age_s = (
            0.0
            if delivery.published_at_s is None
            else self.clock.wall_s() - delivery.published_at_s
        )
        return ClaimRequest(
            keys=delivery.keys,
            owner=owner,
            ttl_s=policy.ttl_s,
            work=delivery.work,
            task=delivery.task,
            message=delivery.message,
            max_crashes=policy.max_crashes,
            may_create=age_s <= policy.retention_s,
            fingerprint=delivery.fingerprint,
            call=delivery.call,
            row=delivery.row,
            formerly=delivery.formerly,
            redelivered=delivery.redelivered or delivery.called,
            in_line=delivery.parking is not None,
            bounds=delivery.bounds,
            sent_us=None if delivery.published_at_s is None else int(delivery.published_at_s * 1e6),
            newest=None if delivery.work is None else policy.newest,
            rank=delivery.rank,
            expires_us=None if delivery.expires_at_s is None else int(delivery.expires_at_s * 1e6),
            strict=delivery.strict,
            line_key=delivery.line_key,
            max_waiting=policy.max_waiting,
        )

    def _tracked(
        self, delivery: Delivery, owner: Owner, asked_at_s: float, granted: Granted | None
    ) -> TrackedLease:
        """A lease for the delivery; `granted`: what the lock server said, if it has it, too."""
        policy = delivery.policy
        # Where there is a ledger, it is the ledger's lease that counts.
        decides = granted is not None and self._ledger_of(delivery) is None
        ttl_s = granted.ttl_s if granted is not None and decides else policy.ttl_s
        lease = Lease(
            keys=delivery.keys,
            owner=owner,
            ttl_s=ttl_s,
            clock=self.clock,
            taken_at_s=asked_at_s,
            trusted_until_s=trusted_until_s(asked_at_s=asked_at_s, ttl_s=ttl_s),
            fence=0 if granted is None else granted.fence,
            limit=delivery.limit,
            of_work=self.ledger is not None and not delivery.is_lock,
            max_hold_until_s=None if policy.max_hold_s is None else asked_at_s + policy.max_hold_s,
        )
        return TrackedLease(
            lease,
            claim=None,
            at_lock_server=granted is not None,
            asked_at_s=asked_at_s,
            task=delivery.task,
            message=delivery.message.id,
            interrupt=policy.on_lost == "interrupt",
        )

    def _is_lease(self, delivery: Delivery, held: Held) -> bool:
        """Whether what the lock server holds may be a live lease, so that the delivery has to wait.

        Its holder may be about to claim or to end, which the ledger does not know. No lease of this
        task is what another application wrote, or what outlives `ttl_s` (no expiry, a server whose
        clock was set back). That may be another task's longer lease; then the ledger knows it. Of
        those who share a key it knows nothing. Where no owners are known, what is held is a lease.
        """
        assert self.locks is not None  # noqa: S101  # it is what holds
        # Some servers keep leases for whole seconds.
        traits = self.locks.traits
        longest_s = math.ceil(max(delivery.policy.ttl_s, traits.min_ttl_s))
        ours = held.owner.is_ours and held.remaining_s <= longest_s
        return ours or held.shared or not traits.owners

    def emit(self, kind: type[Event], delivery: Delivery, **values: Any) -> None:
        if self.events.hears(kind.level):
            self.events.emit(
                kind(key=delivery.key, task=delivery.task, message=delivery.message.id, **values)
            )

    def _emit_contended(self, delivery: Delivery, busy: Busy) -> None:
        self.emit(Contended, delivery, retry_after_s=busy.retry_after_s, **_named(busy.owner))


def _named(owner: Owner | None) -> dict[str, str]:
    """A holder as events name it. A value that taskguard did not write names no holder."""
    if owner is None or not owner.process:
        return {}
    return {"holder": owner.message, "held_by": owner.described}


def _refused(held: Held) -> Busy:
    """By a lock server, which may not know who holds the key, nor for how long."""
    if held.owner == NOBODY:
        return Busy(None, None, same_work=False, started=False, key=held.key)
    return Busy(held.owner, held.remaining_s, same_work=False, started=False, key=held.key)


def _comes_soon(found: Busy, left_s: float) -> bool:
    """Whether who was called is to wait: the lock server lags behind the ledger, or he is early."""
    early = found.too_early and (found.retry_after_s or 0.0) <= left_s
    return found.key is not None or early


def _is_slot_taken(found: Admitted | Answer | Busy) -> bool:
    """Whether another one may be free: this one is held, by other work."""
    taken = isinstance(found, Busy) and (found.key is not None or found.owner is not None)
    return taken and not found.same_work  # type: ignore[union-attr]  # Busy then


def _of_one_slot(request: ClaimRequest) -> ClaimRequest:
    """The request for the slot that the lock server has granted, and for no other."""
    bounds = request.bounds
    if bounds is None or not bounds.slots:
        return request
    return replace(request, bounds=replace(bounds, slots=request.keys))


def _of_any_slot(request: ClaimRequest) -> ClaimRequest:
    """The request as its holder's, where it is not known which of its slots he got."""
    slots = () if request.bounds is None else request.bounds.slots
    return replace(request, keys=slots) if slots else request


def _until_body_ends(found: Answer, ttl_s: float) -> Answer | Busy:
    """DONE is committed, and no lock server tells whether its body has ended.

    The end of a body stores a result, be it null. If the holder died between COMMIT and that, or
    its body goes on, duplicates are answered `ttl_s` after the COMMIT.
    """
    left_s = ttl_s - found.age_s
    ended = found.result_json is not None or found.owner is None or left_s <= 0
    if found.decision is not Decision.DONE or ended:
        return found
    return Busy(None, left_s, same_work=True, started=True)


def _is_plain(request: ClaimRequest) -> bool:
    """Whether there is nothing to be read of work but its own record."""
    unusual = request.row is not None or request.bounds is not None or request.formerly
    return request.may_create and not unusual
