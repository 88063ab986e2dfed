"""Messages that wait for their key in the ledger: `busy="park"`.

A delivery that finds its key taken is stored with its call, and acknowledged: no worker, no thread
and no retry is held meanwhile. Whoever is done with the key calls the first in line: its message is
sent again. What was not called, because a process died, because the key was freed by something that
does not look, or because a call got lost, is called by a relay (`outbox/relay.py`).

Guarantees: a message is acknowledged only after it stands in the ledger, flushed; it goes on from
there until its work is claimed or ended. Who has stored one looks whether the key is free by now,
and who has released a key whether somebody waits: so nobody waits for a key that is free, but for
what dies in between. Nothing raises here once a body has run.

Where the lock server keeps hints, who has stored one leaves a hint before it looks, and who has
released takes it: a message that comes for the first time, and finds none, asks the ledger nothing.
With it the lock server keeps the key for whoever is called, so that those who come meanwhile, whom
the ledger would refuse, find it taken. If nobody can be called it is given back, and looked again.
Whoever was called, or delivered before, or stood in line, asks in any case, and so does a holder
whose lock was forgotten, for a hint may be gone with it. So a hint that alone got lost costs the
first of a line a relay's second, and those behind it nothing.

Does not guarantee order across what happens within a moment: whoever comes to the ledger while the
key is handed over to one that was sent after it goes next.

With `busy="latest"` and `"supersede"` one waits, the newest: a message whose place it takes is sent
again at once, and finds in the ledger that it never runs.

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
from taskguard.events import Called, Events, Parked
from taskguard.locks.base import CALLED, Granted, HintingLocks, LockProvider
from taskguard.model.bounds import NO_RATES, Bounds, Rate
from taskguard.model.claims import Answer, Busy, Claim, ClaimRequest, MessageRef, Overdue
from taskguard.model.delivery import NOT_BEFORE, Delivery, Parking, stored_call
from taskguard.model.lease import Lease, new_owner
from taskguard.run.tracked import TrackedLease

if TYPE_CHECKING:
    from taskguard.ledger.ports import LineLedger

__all__ = ["AHEAD_S", "CALLED_WAIT_S", "EXPECTED_S", "Line", "call_next", "send_stored"]

logger = logging.getLogger("taskguard")

Send = Callable[[dict[str, Any], MessageRef], None]

EXPECTED_S = 5.0
"""So long after it was sent a call keeps others of its key waiting, in seconds."""

AHEAD_S = 2.0
"""So long before its rate allows a start the next one is called, with that delay, in seconds: the
relay looks twice in that time."""

CALLED_WAIT_S = 1.0
"""So long who was called waits for the lock server, where others look whether the key is free."""

# So often a key is given back that somebody left another hint for.
_LOOKS = 3


class Line:
    """The lines of all keys, for the deliveries of one process."""

    def __init__(self, locks: LockProvider | None, ledger: LineLedger, events: Events) -> None:
        self._locks = locks
        self._ledger = ledger
        self._events = events
        self._hints = locks is not None and locks.traits.hints

    def takes_hint(self, delivery: Delivery) -> bool:
        """Whether who releases its key is told by the lock server that somebody waits.

        Not where one who lost the key would take the hint from who has it: he asks the ledger. Nor
        where it holds the keys of former guards, whose lines are in the ledger as well.
        """
        alone = len(delivery.keys) == 1 and delivery.policy.newest != "supersede"
        return alone and self._leaves_hint(delivery)

    def _leaves_hint(self, delivery: Delivery) -> bool:
        """Whether who waits tells the lock server so.

        Of a bounded key there is none: each of its slots is another key there.
        """
        return self._hints and delivery.bounds is None

    def park(self, delivery: Delivery, request: ClaimRequest, refused: Busy) -> bool | Answer:
        """Store it; False if that cannot be, or is not to be. Raises as a claim does.

        An Answer: it is superseded by a newer one.
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
        # Whoever holds the key looks for us when he has released it, which is after this.
        if self._is_free(delivery, request, refused):
            self.call_next(delivery)
        return True

    def _store(self, delivery: Delivery, request: ClaimRequest, *, only_new: bool) -> bool | Answer:
        if request.newest is None:
            return self._ledger.park(request, only_new=only_new)
        found = self._ledger.park_newest(request, only_new=only_new)
        if found is None or isinstance(found, Answer):
            return found or False
        self.tell(delivery, found.replaced)
        return True

    def tell(self, delivery: Delivery, replaced: Iterable[Overdue]) -> None:
        """Send messages again whose place this delivery took: their callers hear of it by that.

        A relay sends those that cannot be sent from here; nobody those that were taken back.
        """
        if delivery.parking is None:
            return
        senders = {delivery.parking.queue: delivery.parking.send}
        for work in replaced:
            try:
                send_stored(work, senders)
            except CallWithdrawnError:
                self._note_told(work.work)
            except Exception as error:  # noqa: BLE001  # whatever a broker raises
                logger.debug("%s is superseded; a relay will tell its caller: %s", work.work, error)

    def hear(self, delivery: Delivery) -> None:
        """Its caller hears now that it never runs: it is sent no more for that. Never raises."""
        self._note_told(str(delivery.work))

    def _note_told(self, work: str) -> None:
        try:
            self._ledger.told(work)
        except TaskguardError as error:
            logger.debug("%s: that it was told got no answer: %s", work, error)

    def _is_free(self, delivery: Delivery, request: ClaimRequest, refused: Busy) -> bool:
        """Whether the lock server would give the key now; True if it gives no answer.

        Also where the ledger refused it: the lock is its holder's again then, who may have released
        before he got it. But not where it asked for the keys of former guards, too: the ledger
        calls by one key, so that it would be called, and refused, without end. A relay calls it.
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
                if is_free:  # also where the answer was lost, or interrupted
                    self._locks.release(keys, owner)
        return is_free

    def begun(self, delivery: Delivery) -> None:
        """Promote the next message if its rate decides when it may start, not the end of this one.

        Never raises.
        """
        bounds = delivery.bounds
        if bounds is not None and bounds.limit > 1 and bounds.rate is not None:
            self.call_next(delivery)

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

    def released(self, delivery: Delivery, *, hint: bool | None, known: bool) -> None:
        """Call the first in line after a body, unless it is known that nobody waits.

        `hint`: whether one was left, and its key is kept for whoever is called; None: not known.
        `known`: the work had begun before, or waited, though this delivery does not know it: who
        released the key then may have taken the hint, and called nobody, for this one had a place.
        """
        if hint is False and delivery.is_first and not known:
            return
        if not self.call_next(delivery) and hint:
            self._give_back(delivery)

    def _give_back(self, delivery: Delivery) -> None:
        """Nobody was called for whom the key is kept: whoever was parked meanwhile relied on it.

        Who comes while another was called already leaves hints again and again: not for ever.
        Where it is not known to be kept any more, a hint may have been forgotten with it.
        """
        locks, key = cast("HintingLocks", self._locks), delivery.line
        for _ in range(_LOOKS):
            known, hint = False, True  # so that no answer counts as a hint
            with contextlib.suppress(LockServerUnavailableError):
                known, hint = locks.release_and_take_hint(key, CALLED)
            if known and not hint:
                return
            if self.call_next(delivery) or not hint:
                return

    def left(self, delivery: Delivery) -> None:
        """Call the next in line after a message that never runs: revoked, or expired. Never raises.

        Its call has used up the hint, and if it came by that the key is kept for it: whoever is
        parked meanwhile relies on that. Where somebody holds the key by now, who took it without
        looking at the line, that one is told again that others wait.
        """
        known = hint = False
        if self._leaves_hint(delivery):
            locks, key = cast("HintingLocks", self._locks), delivery.line
            if delivery.called:
                with contextlib.suppress(LockServerUnavailableError):
                    known, hint = locks.release_and_take_hint(key, CALLED)
            if not known:  # also where it took the hint of another holder, and no answer came
                with contextlib.suppress(LockServerUnavailableError):
                    locks.leave_hint(key)
        if not self.call_next(delivery) and known and hint:
            self._give_back(delivery)

    def call_next(self, delivery: Delivery) -> bool:
        """Call the first in line if its key is free. False if nobody was; never raises.

        Of a bounded key all for whom there is room. Of a guard that was changed also the first in
        the line of each former key, where workers with the former guard have parked.
        """
        assert delivery.parking is not None  # noqa: S101
        app, parking, bounds = delivery.app, delivery.parking, delivery.bounds
        called = [self._call_next(key, app, parking, bounds) for key in delivery.lines]
        return any(called)

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
        """The message of FAILED work was sent once more, to come in `in_s`; it keeps its place.

        Unless that is for another key, or other work: then it stands in its new line. `retries`:
        the number with which it comes, so that older copies of it are superseded. `call`: how to
        send it once more. `again`: what comes then; None: that is not known. Never raises: without
        an answer it is sent again.
        """
        if again is not None and (again.work, again.line) != (claim.work, claim.request.line):
            self._move(claim, again, parking, in_s=in_s)
            return
        text = None if call is None else stored_call(call, claim.message, app)
        try:
            due_in_s = in_s + EXPECTED_S
            self._ledger.keep(claim, retries=retries, call=text, due_in_s=due_in_s)
        except TaskguardError as error:
            logger.warning("%s: its retry is not noted: %s", claim.work, error)

    def _move(self, claim: Claim, again: Delivery, parking: Parking, *, in_s: float) -> None:
        """The FAILED work leaves its line, whose next one is called; `again` stands in its own.

        There its place is that of the moment at which its message was sent first.
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
            logger.warning("%s: that it left its line is not noted: %s", claim.work, error)
            return
        for key in was.lines:
            self._call_next(key, again.app, parking, was.bounds)

    def gave_up(self, claim: Claim, parking: Parking, *, retries: int, app: str) -> None:
        """The message of FAILED work does not come again: the next of its line is called.

        `retries`: the number with which it would come if somebody sent it anew. Never raises:
        without an answer it is sent again, and fails again.
        """
        try:
            self._ledger.leave(claim, retries=retries)
        except TaskguardError as error:
            logger.warning("%s: that it has failed for good is not noted: %s", claim.work, error)
            return
        for key in claim.request.lines:
            self._call_next(key, app, parking, claim.request.bounds)

    def _call_next(self, key: str, app: str, parking: Parking, bounds: Bounds | None) -> bool:
        senders = {parking.queue: parking.send}
        options: dict[str, Any] = {}
        if bounds is not None:
            options = {"bounds": bounds, "ahead_s": AHEAD_S, "most": bounds.limit}
        try:
            return call_next(self._ledger, key, senders, self._events, app=app, **options) > 0
        except TaskguardError as error:
            logger.debug("%s: whether somebody waits got no answer: %s", key, error)
            return False


def call_next(
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
    """Call the first in line, or `most` of them as there is room: how many were called.

    Nobody if the first one's queue is none of those that there are senders for: its own relay calls
    it. Whose call was withdrawn leaves the line, FAILED. Raises what the ledger does.

    Args:
        ledger: it notes who is called.
        key: whose line it is.
        senders: how to send, by the name of the queue that a stored call carries.
        events: who hears of it.
        app: the application's namespace.
        bounds: how many may hold the key, and how often it may be begun, if that is known.
        ahead_s: so long before its rate allows the start one is called, to come then; None: the key
            has no bounds.
        most: how many are called at most.
        rates: what tasks declare now, without `bounds`: it counts more than what is on record.
    """
    queues, called = list(senders), 0
    ask = functools.partial(ledger.call_next, key, expected_s=EXPECTED_S, app=app, queues=queues)
    while called < most:
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
            # Perhaps by this process, which may be of an older deploy: a relay has the last word.
            logger.debug("%s: its call is left to the relay: %s", found.work, error)
            break
        except Exception as error:  # noqa: BLE001  # whatever a broker raises
            logger.warning("%s: called, and not sent yet; a relay will: %s", found.work, error)
            break
        called += 1
        if events.hears(Called.level):
            events.emit(Called(key=key, task=found.task, message=found.message.id))
    return called


def send_stored(found: Overdue, senders: Mapping[str, Send]) -> None:
    """Send the message of stored work, by the sender of its queue. Raises whatever that does."""
    call = json.loads(found.call)
    call.pop(NOT_BEFORE, None)  # that is past, or it would not be sent from its line
    if found.wait_s > 0.0:
        call[NOT_BEFORE] = time.time() + found.wait_s
    senders[call["queue"]](call, found.message)
