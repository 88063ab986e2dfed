"""Warns that a redelivered message has done another work of its task before.

That happens if a key is made of a value that differs between deliveries.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from taskguard.clock import Clock
from taskguard.errors import TaskguardError
from taskguard.events import DoneElsewhere, Events
from taskguard.model.claims import Claimed
from taskguard.model.delivery import Delivery

if TYPE_CHECKING:
    from taskguard.ledger.ports import Ledger

__all__ = ["DoneElsewhereWarning"]

logger = logging.getLogger("taskguard")

_SHARE = 100


class DoneElsewhereWarning:
    """Reads the ledger for redelivered messages, in at most a hundredth of the time.

    The look-up reads every record of the ledger.
    """

    def __init__(self, *, ledger: Ledger | None, events: Events, clock: Clock) -> None:
        self._ledger = ledger
        self._events = events
        self._clock = clock
        self._next_at_s = 0.0

    def warn(self, delivery: Delivery, claimed: Claimed) -> None:
        """Warn if the message of this redelivery has done another work of its task."""
        assert self._ledger is not None  # noqa: S101  # it granted the claim
        started_s = self._clock.monotonic_s()
        if claimed.attempt != 1 or started_s < self._next_at_s:
            return
        if not self._events.hears(DoneElsewhere.level):
            return
        try:
            other = self._ledger.done_elsewhere(delivery.request(clock=self._clock))
        except TaskguardError as error:
            logger.debug("%s: other work of the message is not known: %s", delivery.key, error)
            other = None
        now_s = self._clock.monotonic_s()
        self._next_at_s = now_s + _SHARE * (now_s - started_s)
        if other is not None:
            self._events.about(delivery, DoneElsewhere, work=delivery.work, other=other)
