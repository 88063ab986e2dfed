"""Defers a delivery: publishes its message again with a delay, before it is acknowledged.

Guarantees: a delivery is reported as deferred only after the queue accepted the new copy, and as
dropped only if a newer copy or call is on record.
"""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING

from taskguard.clock import Clock
from taskguard.errors import (
    LedgerSchemaError,
    LedgerUnavailableError,
    TaskguardError,
    TransactionRetryError,
)
from taskguard.events import Deferred as DeferredEvent
from taskguard.events import Duplicate, Events
from taskguard.model.claims import Answer, Busy
from taskguard.model.delivery import Deferred, Delivery, Dropped

if TYPE_CHECKING:
    from taskguard.ledger.ports import Ledger

__all__ = ["NO_LEDGER", "TROUBLE", "Deferrals", "drop"]

logger = logging.getLogger("taskguard")

# Missing tables are treated as a database that is down: an operator has to fix either.
NO_LEDGER = (LedgerUnavailableError, LedgerSchemaError)
TROUBLE = (*NO_LEDGER, TransactionRetryError)

_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 30.0


class Deferrals:
    """Defers the deliveries of one process."""

    def __init__(
        self, *, ledger: Ledger | None, events: Events, clock: Clock, rng: random.Random
    ) -> None:
        self._ledger = ledger
        self._events = events
        self._clock = clock
        self._rng = rng

    def defer(
        self, delivery: Delivery, reason: str, *, retry_after_s: float | None = None
    ) -> Deferred | Dropped:
        """Defer a delivery. `retry_after_s`: for how long the holder's lease lasts, if known."""
        return self._defer(delivery, self._delay_s(delivery, retry_after_s), reason)

    def defer_until_start(self, delivery: Delivery, busy: Busy) -> Deferred | Dropped:
        """Defer a delivery until its rate allows a start.

        Later if it was deferred often, because other messages come, too.
        """
        queue = delivery.queue
        assert queue is not None  # noqa: S101
        after_s = busy.retry_after_s or 0.0
        if delivery.message.deferrals:
            after_s = max(after_s, self._delay_s(delivery, None))
        reason = f"its rate is {delivery.policy.rate}"
        return self._defer(delivery, min(after_s, queue.max_delay_s), reason)

    def defer_or_raise(self, delivery: Delivery, error: TaskguardError) -> Deferred | Dropped:
        """Defer a delivery because of an error. Raise the error if there is no queue."""
        if delivery.queue is None:
            raise error
        return self.defer(delivery, str(error))

    def _delay_s(self, delivery: Delivery, retry_after_s: float | None) -> float:
        """Return a delay that doubles from half a second, with jitter, up to that lease's end."""
        doubled_s = _FIRST_DELAY_S * 2.0 ** min(delivery.message.deferrals, 10)
        delay_s = min(doubled_s, _MAX_DELAY_S) * self._rng.uniform(0.5, 1.0)
        if retry_after_s is not None:
            delay_s = min(delay_s, retry_after_s + self._rng.uniform(0.0, 0.25))
        return min(delay_s, delivery.queue.max_delay_s if delivery.queue else delay_s)

    def _defer(self, delivery: Delivery, delay_s: float, reason: str) -> Deferred | Dropped:
        """Publish the message again, then record its number of deferrals."""
        queue = delivery.queue
        assert queue is not None  # noqa: S101
        deferrals = delivery.message.deferrals + 1
        published = False

        def publish(number: int) -> None:
            nonlocal published
            queue.publish_again(number, delay_s)
            published = True

        try:
            ledger, counted = self._ledger, queue.new_message_per_deferral
            if ledger is None or delivery.work is None or not (counted or delivery.by_run):
                publish(deferrals)
            else:
                request = delivery.request(clock=self._clock)
                if delivery.by_run:
                    ledger.join(request)
                if not counted:
                    publish(deferrals)
                elif not ledger.defer(request, publish):
                    return self._drop_old(delivery, ledger)
        except TROUBLE:
            if not published:
                publish(deferrals)
        self._events.about(
            delivery, DeferredEvent, reason=reason, delay_s=delay_s, deferrals=deferrals
        )
        return Deferred(delay_s, deferrals)

    def _drop_old(self, delivery: Delivery, ledger: Ledger) -> Dropped:
        """Drop a message whose number is lower than one on record: an old copy, or a replaced call.

        Without an answer it counts as an old copy. The live copy answers its caller.
        """
        by = None
        try:
            found = ledger.peek(delivery.request(clock=self._clock))
            by = found.replaced_by if isinstance(found, Answer) else None
        except TaskguardError as error:
            logger.debug("%s: whether its call was replaced got no answer: %s", delivery.key, error)
        return drop(self._events, delivery, "superseded" if by is None else "replaced", by=by)


def drop(events: Events, delivery: Delivery, reason: str, by: str | None = None) -> Dropped:
    """Drop a message that never runs."""
    events.about(delivery, Duplicate, reason=reason)
    return Dropped(reason, by)
