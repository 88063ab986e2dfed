"""Claims and ends of claims that got no answer, settled once the ledger answers again.

Guarantees: such a claim is given back, and counts as no crash of its holder. At most `MOST` of them
are kept. If there are more, the oldest claims expire.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from taskguard.errors import TaskguardError
from taskguard.model.claims import Claim, Claimed, ClaimRequest
from taskguard.model.history import Happened

if TYPE_CHECKING:
    from taskguard.ledger.ports import Ledger

__all__ = ["LateReports", "uncount_crash"]

logger = logging.getLogger("taskguard")

MOST = 1_000


class LateReports:
    """Reports that this process still owes the ledger. Thread-safe.

    Attributes:
        pending: requests without an answer, and claims without an end.
    """

    def __init__(self, ledger: Ledger | None) -> None:
        self._ledger = ledger
        self.pending: deque[ClaimRequest | Claim] = deque(maxlen=MOST)

    def settle(self, request: ClaimRequest) -> bool:
        """End a claim whose answer never arrived, if it was granted. No crash is counted.

        Return False if the ledger again gives no answer, so that the claim is settled later. If the
        database has not executed the claim yet, there is nothing to settle.
        """
        ledger = self._ledger
        assert ledger is not None  # noqa: S101  # it was requested to grant the claim
        try:
            if request.work is None:
                found = ledger.claim(request)  # by the same owner: the same grant
                if isinstance(found, Claimed):
                    ledger.give_back(found.claim)
                return True
            request = ledger.of_run(request)
            view = ledger.view(str(request.work))
            if view is None:
                return True
            claim = Claim(_of_any_slot(request), view.fence)
            if view.owner != str(request.owner) or not ledger.give_back(claim):
                ledger.uncount_crash(claim)
        except TaskguardError as error:
            logger.debug("%s: a claim is not settled: %s", ", ".join(request.keys), error)
            self.pending.append(request)
            return False
        return True

    def report(self) -> None:
        """Send the reports to the ledger, until one gets no answer.

        Other threads and greenlets may do this at the same time. One of them takes each report.
        """
        for _ in range(len(self.pending)):
            try:
                late = self.pending.popleft()
            except IndexError:
                return
            settled = self._end(late) if isinstance(late, Claim) else self.settle(late)
            if not settled:
                return

    def _end(self, claim: Claim) -> bool:
        assert self._ledger is not None  # noqa: S101  # it granted the claim
        try:
            uncount_crash(self._ledger, claim)
        except TaskguardError:
            self.pending.append(claim)
            return False
        return True


def uncount_crash(ledger: Ledger, claim: Claim, *, happened: Happened | None = None) -> None:
    """Give the claim back if it is valid. If it was taken over, uncount the crash.

    Add to the history of the work what happened to this holder, if that is given.
    """
    if not ledger.give_back(claim, happened=happened):
        ledger.uncount_crash(claim, happened=happened)


def _of_any_slot(request: ClaimRequest) -> ClaimRequest:
    """Return the request for all its slots, if it is unknown which one it got."""
    slots = () if request.bounds is None else request.bounds.slots
    return replace(request, keys=slots) if slots else request
