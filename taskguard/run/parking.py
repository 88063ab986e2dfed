"""Messages that wait for their key in the ledger: `busy="park"`.

A delivery that finds its key held is stored with its call, and acknowledged. Until its key is free
it occupies no worker and no thread, and costs no retry. The holder of the key promotes the first
message of the line after its release: taskguard sends that message again. A relay
(`outbox/relay.py`) promotes messages that no holder promoted: because a process died, because the
release did not look at the line, or because a sent message got lost.

Guarantees: a message is acknowledged only after its record is in the ledger, flushed. It stays
there until its work is claimed or ended. A delivery that has parked a message checks whether the
key is free by then, and a holder checks after its release whether a message waits. So no message
waits for a free key, unless a process dies in between. Nothing raises here after a body has run.

If the lock server keeps hints, a parking delivery leaves a hint before it checks the key, and a
holder takes the hint with its release. A message that comes for the first time, and whose holder
finds no hint, costs the ledger no query. With a hint, the lock server reserves the key for the
promoted message, so that other deliveries, which the ledger would refuse, find it held. If no
message can be promoted, the reservation is released, and the line is checked again. Promoted,
redelivered and formerly parked messages always query the ledger. So does a holder whose lock the
lock server forgot, because a hint may be lost, too. If a hint alone got lost, the first
message of a line waits for the next round of a relay, about a second. Later ones lose nothing.

Does not guarantee order between messages that come within a moment: a delivery that reaches the
ledger while the key passes to a message that was sent later goes next.

With `busy="latest"` and `"supersede"` one message waits, the newest. A message that it superseded
is sent again at once, and its delivery finds in the ledger that it never runs.

Read next: `ledger/lines/`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from taskguard.errors import (
    CallWithdrawnError,
    LockServerUnavailableError,
    StoredCallError,
    TaskguardError,
)
from taskguard.events import Events, Parked, Promoted
from taskguard.locks.base import PROMOTED, Granted, HintingLocks, LockProvider
from taskguard.model.bounds import NO_RATES, Bounds, Rate
from taskguard.model.claims import Answer, Busy, Claim, ClaimRequest, MessageRef, Overdue
from taskguard.model.delivery import NOT_BEFORE, Delivery, Parking, stored_call
from taskguard.model.lease import Lease, new_owner
from taskguard.run.tracked import TrackedLease

if TYPE_CHECKING:
    from taskguard.ledger.ports import LineLedger

__all__ = ["AHEAD_S", "EXPECTED_S", "PROMOTED_WAIT_S", "Line", "promote_next", "send_stored"]

logger = logging.getLogger("taskguard")

Send = Callable[[dict[str, Any], MessageRef], None]

EXPECTED_S = 5.0
"""For how many seconds after it was sent a promoted message blocks others of its key."""

AHEAD_S = 2.0
"""How many seconds before its start, by its rate, the next message is promoted with that delay.

A relay checks twice in that time.
"""

PROMOTED_WAIT_S = 1.0
"""For how many seconds a promoted message waits for the lock server, while others probe the key."""

# How often a reserved key is released again because of another hint.
_LOOKS = 3


class Line:
    """The lines of all keys, for the deliveries of one process."""

    def __init__(self, locks: LockProvider | None, ledger: LineLedger, events: Events) -> None:
        self._locks = locks
        self._ledger = ledger
        self._events = events
        self._hints = locks is not None and locks.traits.hints

    def takes_hint(self, delivery: Delivery) -> bool:
        """Whether the lock server says at the release of its key that a message waits.

        There is no hint with `busy="supersede"`, because a former holder could take the new
        holder's hint. With the keys of former guards there is none either: the ledger has several
        lines.
        """
        alone = len(delivery.keys) == 1 and not delivery.policy.replaces_holder
        return alone and self._leaves_hint(delivery)

    def _leaves_hint(self, delivery: Delivery) -> bool:
        """Whether a parked message leaves a hint at the lock server.

        Not for a key with a limit or a rate: each of its slots is another key there.
        """
        return self._hints and delivery.bounds is None

    def park(self, delivery: Delivery, request: ClaimRequest, refused: Busy) -> bool | Answer:
        """Store the message. Raises as a claim does.

        Return False if it cannot be parked. Return an Answer if a newer message superseded it.
        """
        assert delivery.parking is not None  # noqa: S101
        call = delivery.parking.call()
        if call is None:
            return False
        text = stored_call(call, delivery.message, delivery.app)
        request = replace(request, call=text)
        if isinstance(parked := self._store(delivery, request, only_new=refused.unread), Answer):
            return parked
        if not parked:
            return False
        self._events.about(delivery, Parked)
        # Otherwise the holder of the key checks the line after its release, later than this.
        if self._is_free(delivery, request, refused):
            self.promote_next(delivery)
        return True

    def _store(self, delivery: Delivery, request: ClaimRequest, *, only_new: bool) -> bool | Answer:
        if request.newest is None:
            return self._ledger.park(request, only_new=only_new)
        found = self._ledger.park_newest(request, only_new=only_new)
        if found is None or isinstance(found, Answer):
            return found or False
        self.send_superseded(delivery, found.replaced)
        return True

    def send_superseded(self, delivery: Delivery, replaced: Iterable[Overdue]) -> None:
        """Send messages again that this delivery superseded, so that their callers are notified.

        A relay sends those that cannot be sent from here, except withdrawn ones.
        """
        if delivery.parking is None:
            return
        senders = {delivery.parking.queue: delivery.parking.send}
        for work in replaced:
            try:
                send_stored(work, senders)
            except CallWithdrawnError:
                self.notified(work.work)
            except Exception as error:  # noqa: BLE001  # whatever a broker raises
                logger.debug("%s is superseded; a relay notifies its caller: %s", work.work, error)

    def notified(self, work: str) -> None:
        """Note that the caller of ended work is notified: no relay sends it again. Never raises."""
        try:
            self._ledger.note_notified(work)
        except TaskguardError as error:
            logger.debug("%s: whether its caller was notified got no answer: %s", work, error)

    def _is_free(self, delivery: Delivery, request: ClaimRequest, refused: Busy) -> bool:
        """Whether the lock server would grant the key now; True if it gives no answer.

        If the ledger refused the key, the lock was handed over to its holder, which may have ended
        before. With the keys of former guards, too, a relay has to promote the message: the ledger
        promotes by one key, so the message would be promoted and refused without end.
        """
        by_ledger = refused.key is None
        if self._leaves_hint(delivery):
            try:
                leave = cast("HintingLocks", self._locks).leave_hint
                left = [leave(key) for key in request.keys]  # one at each
                is_free = all(left)
            except LockServerUnavailableError:
                is_free = True
            return is_free or (by_ledger and len(request.keys) == 1)
        if by_ledger and len(request.keys) > 1:
            return False
        if self._locks is None or by_ledger or delivery.bounds is not None:
            return True
        keys, owner, is_free = request.keys, new_owner(request.message.id), True
        with contextlib.suppress(LockServerUnavailableError):
            try:
                found = self._locks.acquire(
                    keys, owner, ttl_s=request.ttl_s, with_fence=False, wait_s=0.0
                )
                is_free = isinstance(found, Granted)
            finally:
                if is_free:  # even if the answer was lost, or interrupted
                    self._locks.release(keys, owner)
        return is_free

    def begun(self, delivery: Delivery) -> None:
        """Promote the next message if its rate decides when it may start, not the end of this one.

        Never raises.
        """
        if delivery.policy.has_slots and delivery.policy.rate is not None:
            self.promote_next(delivery)

    def release(self, tracked: TrackedLease) -> tuple[bool | None, bool | None]:
        """Release a key and take its hint, where `takes_hint()` says that there may be one.

        Return what `TrackedLease.end()` does, and whether there was a hint. None: unknown.
        """
        locks, hint = cast("HintingLocks", self._locks), False

        def free(lease: Lease) -> bool:
            nonlocal hint
            known, hint = locks.release_and_take_hint(lease.keys[0], lease.owner)
            return known

        known = tracked.end(free, handed=tracked.decided_by_ledger)
        if known is None:
            return None, None
        # A server that forgot the lease may have forgotten a hint beside it.
        return known, hint or (None if tracked.forgotten else False)

    def released(
        self, delivery: Delivery, tracked: TrackedLease, *, hint: bool | None, known: bool
    ) -> None:
        """Promote the first message after a body, unless it is known that no message waits.

        `hint`: whether there was one, so that the key is reserved. None: unknown. `known`: the work
        had begun before, or waited, though this delivery does not know it. Then an earlier holder
        may have taken the hint, and promoted no message, because this one was first in line. A
        lock server that forgot the lease may have granted the key again: leave a hint for it.
        """
        if hint is False and delivery.is_first and not known:
            return
        if self.promote_next(delivery):
            return
        if hint:
            self._give_back(delivery)
        elif tracked.forgotten and self._leaves_hint(delivery):
            self._hint_to_holder(delivery)

    def _give_back(self, delivery: Delivery) -> None:
        """Release a key that is reserved for no message, then check the line again.

        Messages that were parked meanwhile relied on the reservation. While another one was
        promoted already, each new message leaves a hint, so the number of rounds is limited.
        Without a reservation, another delivery may hold the key. The release took its hint if it
        was sent again after its reply was lost. So leave a hint for that delivery.
        """
        locks, key = cast("HintingLocks", self._locks), delivery.line
        for _ in range(_LOOKS):
            known, hint = False, True  # a missing answer counts as a hint
            with contextlib.suppress(LockServerUnavailableError):
                known, hint = locks.release_and_take_hint(key, PROMOTED)
            if known and not hint:
                return
            if not known:
                self._hint_to_holder(delivery)
                return
            if self.promote_next(delivery):
                return

    def _hint_to_holder(self, delivery: Delivery) -> None:
        """Leave a hint for the delivery that holds the key by now. It may have ended meanwhile."""
        with contextlib.suppress(LockServerUnavailableError):
            cast("HintingLocks", self._locks).leave_hint(delivery.line)
        self.promote_next(delivery)

    def left(self, delivery: Delivery) -> None:
        """Promote the next message after one that never runs: revoked, or expired. Never raises.

        Its own promotion used up the hint, and reserved the key, which messages that were parked
        meanwhile rely on. If another delivery holds the key by now, leave it a new hint.
        """
        known = hint = False
        if self._leaves_hint(delivery):
            locks, key = cast("HintingLocks", self._locks), delivery.line
            if delivery.promoted:
                with contextlib.suppress(LockServerUnavailableError):
                    known, hint = locks.release_and_take_hint(key, PROMOTED)
            if not known:  # even if it took the hint of another holder, or got no answer
                with contextlib.suppress(LockServerUnavailableError):
                    locks.leave_hint(key)
        if not self.promote_next(delivery) and known and hint:
            self._give_back(delivery)

    def promote_next(self, delivery: Delivery) -> bool:
        """Promote the first message if its key is free. False if none was promoted; never raises.

        With a limit or a rate, promote all messages for which there is room. After a change of the
        guard, promote in the line of each former key, too: workers with the former guard park
        there.
        """
        assert delivery.parking is not None  # noqa: S101
        app, parking, bounds = delivery.app, delivery.parking, delivery.bounds
        promoted = [self._promote_next(key, app, parking, bounds) for key in delivery.lines]
        return any(promoted)

    def retried(
        self,
        claim: Claim,
        parking: Parking,
        *,
        retries: int,
        call: Mapping[str, Any] | None,
        again: Delivery | None,
        app: str,
        in_s: float,
    ) -> None:
        """Note that the queue sends the message of FAILED work again. Never raises.

        The message keeps its position, unless its retry is for another key, or other work: then it
        joins that line. Without an answer a relay sends it again.

        Args:
            claim: what `Parking.failed()` was given.
            parking: how to send the next message of its line.
            retries: its number of retries when it arrives. Older copies of it are superseded.
            call: how to send it again. None: unknown.
            again: its next delivery. None: unknown.
            app: the application's namespace.
            in_s: in how many seconds it arrives.
        """
        if again is not None and (again.work, again.line) != (claim.work, claim.request.line):
            self._move(claim, again, parking, in_s=in_s)
            return
        text = None if call is None else stored_call(call, claim.message, app)
        try:
            due_in_s = in_s + EXPECTED_S
            self._ledger.keep(claim, retries=retries, call=text, due_in_s=due_in_s)
        except TaskguardError as error:
            logger.warning("%s: the ledger did not record its retry: %s", claim.work, error)

    def _move(self, claim: Claim, again: Delivery, parking: Parking, *, in_s: float) -> None:
        """Take FAILED work out of its line, promote the next message, and let `again` join a line.

        Its position there is by the time at which its message was first sent.
        """
        was, message = claim.request, again.message
        request = replace(
            was,
            keys=again.keys,
            line_key=again.line_key,
            work=again.work,
            formerly=again.formerly,
            message=message,
            fingerprint=again.fingerprint,
            row=again.row,
            call=again.call,
            bounds=again.bounds,
        )
        try:
            self._ledger.leave(claim, retries=message.retries)
            self._ledger.enqueue(None, request, due_in_s=in_s + EXPECTED_S)
        except TaskguardError as error:
            logger.warning(
                "%s: the ledger did not record that it left its line: %s", claim.work, error
            )
            return
        for key in was.lines:
            self._promote_next(key, again.app, parking, was.bounds)

    def gave_up(self, claim: Claim, parking: Parking, *, retries: int, app: str) -> None:
        """Promote the next message, because that of FAILED work does not come again. Never raises.

        If the ledger gives no answer, a relay sends the message again, and it fails again.
        `retries`: the message's number of retries if a caller sends it again.
        """
        try:
            self._ledger.leave(claim, retries=retries)
        except TaskguardError as error:
            logger.warning(
                "%s: the ledger did not record that it has failed for good: %s", claim.work, error
            )
            return
        for key in claim.request.lines:
            self._promote_next(key, app, parking, claim.request.bounds)

    def _promote_next(self, key: str, app: str, parking: Parking, bounds: Bounds | None) -> bool:
        senders = {parking.queue: parking.send}
        options: dict[str, Any] = {}
        if bounds is not None:
            options = {"bounds": bounds, "ahead_s": AHEAD_S, "most": bounds.limit}
        try:
            return promote_next(self._ledger, key, senders, self._events, app=app, **options) > 0
        except TaskguardError as error:
            logger.debug("%s: whether a message waits got no answer: %s", key, error)
            return False


def promote_next(
    ledger: LineLedger,
    key: str,
    senders: Mapping[str, Send],
    events: Events,
    *,
    app: str,
    bounds: Bounds | None = None,
    ahead_s: float | None = None,
    most: int = 1,
    rates: Mapping[str, Rate | None] = NO_RATES,
) -> int:
    """Promote the first message of a line, or up to `most`. Return how many were promoted.

    If no sender has the queue of the first message, promote none: the relay of that queue does. A
    message that was withdrawn leaves the line, FAILED. Raises what the ledger does.

    Args:
        ledger: it records which messages are promoted.
        key: the key of the line.
        senders: how to send, by the name of the queue that a stored call carries.
        events: notifies listeners of each promotion.
        app: the application's namespace.
        bounds: the limit and the rate of the key. None: unknown, or it has neither.
        ahead_s: how many seconds before its rate allows a start a message is promoted, with that
            delay. None: the key has no limit and no rate.
        most: how many are promoted at most.
        rates: the rates that tasks declare now; without `bounds` they win over those on record.
    """
    queues, promoted = list(senders), 0
    ask = functools.partial(ledger.promote_next, key, expected_s=EXPECTED_S, app=app, queues=queues)
    while promoted < most:
        found = ask(bounds=bounds, ahead_s=ahead_s, rates=rates)
        if found is None:
            break
        try:
            send_stored(found, senders)
        except CallWithdrawnError as error:
            logger.warning("%s leaves the line of %s, and is FAILED: %s", found.work, key, error)
            ledger.abandon(found, error=str(error))
            continue
        except StoredCallError as error:
            # Perhaps only this process, of an older deploy, cannot send it: the relay decides.
            logger.debug("%s: its call is left to the relay: %s", found.work, error)
            break
        except Exception as error:  # noqa: BLE001  # whatever a broker raises
            logger.warning(
                "%s: promoted, but not sent yet; a relay sends it: %s", found.work, error
            )
            break
        promoted += 1
        if events.hears(Promoted.level):
            events.emit(Promoted(key=key, task=found.task, message=found.message.id))
    return promoted


def send_stored(found: Overdue, senders: Mapping[str, Send]) -> None:
    """Send the message of stored work, by the sender of its queue. Raises whatever that does."""
    call = json.loads(found.call)
    call.pop(NOT_BEFORE, None)  # it has passed, because the message is sent from its line
    if found.wait_s > 0.0:
        call[NOT_BEFORE] = time.time() + found.wait_s
    senders[call["queue"]](call, found.message)
