"""Claims whose answer or whose end got none, settled once the ledger answers again.

Guarantees: a claim that was granted unheard, or whose end the ledger never heard of, is given back,
and counts as no crash of its holder. At most `MOST` of them are kept; the oldest are left to their
expiry.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from taskguard.errors import TaskguardError
from taskguard.model.claims import Claim, Claimed, ClaimRequest

if TYPE_CHECKING:
    from taskguard.ledger.ports import Ledger

__all__ = ["LateReports", "uncount_crash"]

logger = logging.getLogger("taskguard")

MOST = 1_000


class LateReports:
    """What this process still has to tell the ledger. Thread-safe.

    Attributes:
        pending: requests without an answer, and claims without an end.
    """

    def __init__(self, ledger: Ledger | None) -> None:
        self._ledger = ledger
        self.pending: deque[ClaimRequest | Claim] = deque(maxlen=MOST)

    def settle(self, request: ClaimRequest) -> bool:
        """End a claim whose answer never arrived, if it was granted. That counts as no crash.

        Return False if the ledger gives no answer again, so that the claim is settled later. A
        claim that the database has not worked on yet is not found.
        """
        ledger = self._ledger
        assert ledger is not None  # noqa: S101  # it was requested to grant the claim
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
            self.pending.append(request)
            return False
        return True

    def report(self) -> None:
        """Tell the ledger what it never heard of, until it gives no answer again.

        Other threads and greenlets may do this at the same time: each report is taken by one.
        """
        for _ in range(len(self.pending)):
            try:
                late = self.pending.popleft()
            except IndexError:
                return
            told = self._end(late) if isinstance(late, Claim) else self.settle(late)
            if not told:
                return

    def _end(self, claim: Claim) -> bool:
        assert self._ledger is not None  # noqa: S101  # it granted the claim
        try:
            uncount_crash(self._ledger, claim)
        except TaskguardError:
            self.pending.append(claim)
            return False
        return True


def uncount_crash(ledger: Ledger, claim: Claim) -> None:
    """Give the claim back if it is valid. If it was taken over, uncount the crash."""
    if not ledger.give_back(claim):
        ledger.uncount_crash(claim)


def _of_any_slot(request: ClaimRequest) -> ClaimRequest:
    """The request as its holder's, if it is not known which of its slots it got."""
    slots = () if request.bounds is None else request.bounds.slots
    return replace(request, keys=slots) if slots else request
