"""The claim and the lease of an admitted delivery, and how it gives them back.

Guarantees: each claim is ended once, and each lease released once, after its claim. If the end of a
claim does not reach the ledger, it is reported later (`late.py`), or the claim expires.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from taskguard.clock import Clock
from taskguard.errors import TaskguardError
from taskguard.events import Completed, Events, Released
from taskguard.log_fields import said_of
from taskguard.model.claims import Claim, Claimed
from taskguard.model.delivery import Delivery
from taskguard.model.outcomes import Ended
from taskguard.run import tracing
from taskguard.run.attempt import Attempt
from taskguard.run.late import LateReports
from taskguard.run.parking import Line
from taskguard.run.tracked import TrackedLease
from taskguard.run.watchdog import Watchdog

if TYPE_CHECKING:
    from taskguard.ledger.ports import Ledger

__all__ = ["Holding", "Releases"]

logger = logging.getLogger("taskguard")


@dataclass(slots=True)
class Holding:
    """A delivery that holds its key.

    Attributes:
        released: whether the lock server's lease was released.
        hint: whether the lock server had a hint, at the release, that a message waits in the
            ledger. None: unknown.
        ended: how the body ended. None: that follows from the delivery's outcome.
    """

    delivery: Delivery
    tracked: TrackedLease
    claimed: Claimed | None
    attempt: Attempt
    released: bool = False
    hint: bool | None = None
    ended: Ended | None = None

    def span(self, name: str) -> tracing.Span:
        """Return a span of the attempt."""
        return tracing.span(name, self.delivery, self.tracked.lease, self.attempt.number)


class Releases:
    """Gives back what deliveries hold."""

    def __init__(
        self,
        *,
        ledger: Ledger | None,
        watchdog: Watchdog,
        line: Line,
        late: LateReports,
        events: Events,
        clock: Clock,
    ) -> None:
        self._ledger = ledger
        self._watchdog = watchdog
        self._line = line
        self._late = late
        self._events = events
        self._clock = clock

    def note_completed(
        self, delivery: Delivery, tracked: TrackedLease, claimed: Claimed | None
    ) -> None:
        """Note that DONE is committed, so the claim has ended."""
        tracked.claim = None
        if claimed is not None:
            held_s = self._clock.monotonic_s() - tracked.lease.taken_at_s
            fence, attempt = claimed.claim.fence, claimed.attempt
            self._events.about(delivery, Completed, fence=fence, attempt=attempt, held_s=held_s)

    def end_claim(
        self, holding: Holding, end: Callable[[Ledger, Claim], object], *, late: bool = True
    ) -> None:
        """End the claim, once. If the ledger does not answer, the claim expires.

        `late`: this is no crash, so it is reported once the ledger answers again.
        """
        tracked = holding.tracked
        claim, tracked.claim = tracked.claim, None
        self._watchdog.untrack(tracked)
        if claim is None or self._ledger is None or tracked.lease.is_parents:
            return
        try:
            end(self._ledger, claim)
        except TaskguardError as error:
            said = said_of(holding.delivery, fence=tracked.lease.fence)
            key = tracked.lease.key
            logger.warning("%s: ending the lease got no answer: %s", key, error, extra=said)
            if late:
                self._late.pending.append(claim)

    def release(self, holding: Holding) -> bool | None:
        """Release the lock server's lease, after the claim has ended. Later calls do nothing.

        Return False if the lock server knew no such lease. None: it was not called, or gave no
        answer.
        """
        if holding.released:
            return None
        holding.released = True
        delivery, tracked = holding.delivery, holding.tracked
        self._watchdog.untrack(tracked)
        if delivery.parking is not None and self._line.takes_hint(delivery):
            known, holding.hint = self._line.release(tracked)
        else:
            known = self._watchdog.release_lock(tracked, handed=tracked.decided_by_ledger)
        held_s = self._clock.monotonic_s() - tracked.lease.taken_at_s
        self._events.about(delivery, Released, fence=tracked.lease.fence, held_s=held_s)
        return known
