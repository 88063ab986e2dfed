"""Settles a delivery that does not get its key: it is answered, parked, deferred, or fails.

Guarantees: a delivery of work that was started is never dropped. It never fails if it can be
deferred, because its message may be the only one that is left.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from taskguard.clock import Clock
from taskguard.errors import (
    ConfigurationError,
    KeyAlreadyHeldError,
    KeyBusyError,
    TransactionRetryError,
)
from taskguard.events import Events
from taskguard.model.claims import Answer, Busy
from taskguard.model.delivery import Delivery, Outcome, Parked
from taskguard.model.lease import Owner
from taskguard.run import tracing
from taskguard.run.answers import Answers
from taskguard.run.attempt import Attempt
from taskguard.run.claiming import Claiming
from taskguard.run.current import holders_around
from taskguard.run.deferrals import Deferrals, drop
from taskguard.run.names import Names
from taskguard.run.parking import Line

__all__ = ["Refusals", "refuse_reentry", "refuse_without_ledger"]

logger = logging.getLogger("taskguard")


class Refusals:
    """Decides on deliveries that were not admitted."""

    def __init__(
        self,
        *,
        claiming: Claiming | None,
        line: Line,
        answers: Answers,
        deferrals: Deferrals,
        events: Events,
        clock: Clock,
        names: Names,
    ) -> None:
        self._claiming = claiming
        self._line = line
        self._answers = answers
        self._deferrals = deferrals
        self._events = events
        self._clock = clock
        self._names = names

    def settle(self, delivery: Delivery, found: Answer | Busy) -> Outcome:
        """Return the outcome of a delivery that was not admitted, or raise its error."""
        if isinstance(found, Answer):
            return self._answers.answer(delivery, found)
        return self._turn_away(delivery, found)

    def _turn_away(self, delivery: Delivery, busy: Busy) -> Outcome:
        """Do what `busy=` says about a held key. A delivery of started work is deferred."""
        may_end = not busy.same_work and not busy.started
        if not busy.same_work:
            parked = self._park(delivery, busy)
            if parked is not None:
                return parked
        if busy.unread:
            assert self._claiming is not None  # noqa: S101  # it left the record unread
            return self.settle(delivery, self._claiming.read(delivery, busy))
        busy = self._paused(delivery, busy)
        if delivery.queue is not None and busy.owner is not None and busy.owner.pause is not None:
            return self._deferrals.defer(delivery, f"the key is {busy.owner.pause}")
        if delivery.queue is not None and (delivery.policy.defers or not may_end):
            if busy.too_early:
                return self._deferrals.defer_until_start(delivery, busy)
            reason = "the same work is in progress" if busy.same_work else "the key is taken"
            return self._deferrals.defer(delivery, reason, retry_after_s=busy.retry_after_s)
        if delivery.policy.drops and may_end:
            return drop(self._events, delivery, "skipped")
        holders = holders_around(delivery.keys) if busy.same_work else []
        raise _already_held(delivery, holders[0]) if holders else self._busy_error(delivery, busy)

    def _paused(self, delivery: Delivery, busy: Busy) -> Busy:
        """Return Busy by the pause of the key, if the delivery would fail or be dropped without."""
        if self._claiming is None or delivery.queue is None or delivery.policy.defers:
            return busy
        if busy.key is None or busy.same_work or busy.started or delivery.is_lock:
            return busy  # the ledger refused it, or it is deferred in any case
        paused = self._claiming.pause_of(delivery)
        return busy if paused is None else replace(busy, owner=paused, retry_after_s=None)

    def _park(self, delivery: Delivery, busy: Busy) -> Outcome | None:
        """Park the message until the key is free. Return None if it cannot be parked."""
        if delivery.parking is None:
            return None
        request = delivery.request(clock=self._clock)
        try:
            with tracing.span("park", delivery):
                found = self._line.park(delivery, request, busy)
            if isinstance(found, Answer):
                return self._answers.answer(delivery, found)
            if found:
                return Parked()
        except TransactionRetryError as error:
            logger.debug("%s is deferred, not parked: %s", delivery.key, error)
        return None

    def _busy_error(self, delivery: Delivery, busy: Busy) -> KeyBusyError:
        after_s, owner = busy.retry_after_s, busy.owner
        if busy.too_early:
            what = f"{delivery.key} starts as often as its rate allows ({delivery.policy.rate})"
            when = f", and again in {after_s:.1f} s" if after_s else ""
        elif owner is not None and owner.pause is not None:
            what, when = f"{delivery.key} is {owner.pause}", ""
        elif delivery.policy.has_slots:
            what, owner = f"{delivery.key} is held by {delivery.policy.limit} deliveries", None
            when = f", one of them for at most {after_s:.1f} s" if after_s else ""
        else:
            what = f"{busy.key or delivery.key} is held by {self._holder(owner)}"
            when = f", for at most {after_s:.1f} s" if after_s else ""
        nothing = "The lock was not taken; try" if delivery.is_lock else "Nothing was run; call"
        return KeyBusyError(
            f"{what}{when}. {nothing} again later, or wait for it with wait_s.",
            key=delivery.key,
            retry_after_s=after_s,
            owner=str(owner) if owner is not None and owner.is_ours else None,
        )

    def _holder(self, owner: Owner | None) -> str:
        if owner is None:
            return "another delivery"
        if owner.process:
            return self._names.described(owner)
        if owner.is_ours:
            return "a message that was sent from its line and has not arrived"
        return "a value that taskguard did not write"


def refuse_reentry(delivery: Delivery) -> None:
    """Raise KeyAlreadyHeldError if a body or lock around this call holds its key."""
    holders = holders_around(delivery.keys)
    if holders and not _has_room_beside(holders, delivery):
        raise _already_held(delivery, holders[0])


def _has_room_beside(holders: list[Attempt], delivery: Delivery) -> bool:
    """Return True if `limit=` leaves a slot in addition to those that bodies around it hold."""
    bounds = delivery.bounds
    hold_slots = not any(set(delivery.keys).intersection(each.lease.keys) for each in holders)
    return bounds is not None and hold_slots and len(holders) < bounds.limit


def _already_held(delivery: Delivery, outer: Attempt) -> KeyAlreadyHeldError:
    """Return the error of a call that would wait for the body or lock around it."""
    key = ", ".join(sorted(outer.held.intersection(delivery.keys)))
    holder = "the lock around it" if outer.delivery.is_lock else "the guarded body around it"
    if delivery.is_lock:
        fix = "A lock cannot be taken twice, not even to read: use the lease that is held"
    else:
        fix = (
            "Call the function's own body, or send it to a worker: with is_async=False or "
            "task_always_eager a message runs inside the body that sends it"
        )
    return KeyAlreadyHeldError(
        f"{delivery.task or 'lock()'} requests {key}, which {holder} holds: it would wait for "
        f"itself. {fix}.",
        key=key,
    )


def refuse_without_ledger(delivery: Delivery) -> None:
    """Raise ConfigurationError if a delivery needs a ledger, of which there is none."""
    if delivery.row is not None:
        raise ConfigurationError(
            f"{delivery.task} has row=, and there is no ledger to move it in. Configure the "
            "database of that table as the ledger (TASKGUARD_LEDGER_URL)."
        )
    if delivery.policy.parks:
        raise ConfigurationError(
            f'{delivery.task} has busy="{delivery.policy.busy}", and there is no ledger to '
            'wait in. Configure one (TASKGUARD_LEDGER_URL), or say busy="retry".'
        )
    if delivery.bounds is not None:
        raise ConfigurationError(
            f"{delivery.task} has limit= or rate=, and there is no ledger to count in. "
            "Configure one (TASKGUARD_LEDGER_URL), or take tg.lock(…, limit=…) in the body."
        )
