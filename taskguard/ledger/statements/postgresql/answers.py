"""Turn the row that a claim's statement returns into an answer.

Guarantees: the answers are those of `states.decide()`, which the portable statements use, too. None
means that the row is not enough to decide. Then the portable statements decide, over locked rows.
"""

from __future__ import annotations

from typing import NamedTuple

from taskguard.ledger.decisions import CLAIMABLE, answer, busy_key, decide_row
from taskguard.model.claims import Busy, Claim, ClaimAnswer, Claimed, ClaimRequest
from taskguard.model.lease import Owner
from taskguard.model.states import Decision, RowState

__all__ = ["Found", "FoundKey", "answer_of", "busy_of", "refusal_of"]


class Found(NamedTuple):
    """The one row of claim.sql: the work as it was, and what was granted.

    The row of records.sql has the same columns, and nothing granted.
    """

    now_us: int
    recorded_retries: int
    recorded_deferrals: int
    id: str | None
    message: str
    retries: int
    state: str
    final: int
    fence: int
    owner: str
    lease_until: int
    attempts: int
    crashes: int
    progress: str | None
    result: str | None
    error: str | None
    finished: int | None
    fingerprint: str | None
    line: str | None
    trace: str | None
    eligible: bool
    granted_fence: int | None
    claimed_attempts: int | None
    claimed_crashes: int
    claimed_progress: str | None
    holder: str
    held_until: int | None
    flush: str | None


class FoundKey(NamedTuple):
    """The one row of claim_key.sql."""

    now_us: int
    granted_fence: int | None
    holder: str
    held_until: int | None
    flush: str | None


def answer_of(
    request: ClaimRequest, found: Found, row_state: RowState | None = None
) -> ClaimAnswer | None:
    """Return the answer that follows from the row of claim.sql, or None if none follows."""
    row = found if found.id is not None else None
    fence, attempt = found.granted_fence, found.claimed_attempts
    if row is None and fence is not None and attempt is not None:
        return Claimed(Claim(request, fence))  # the first claim of this work: there was no record
    recorded = found.recorded_retries, found.recorded_deferrals
    decision = decide_row(request, row, recorded, found.now_us, row_state)
    if decision is Decision.AGAIN:
        return None  # the statement read only the record, and not the user's row
    if fence is not None and attempt is not None:
        takeover = decision is Decision.TAKEOVER
        return Claimed(
            Claim(request, fence),
            attempt=attempt,
            waited=found.line is not None,
            takeover=takeover,
            vanished=Owner.parse(found.owner) if takeover else None,
            crashes=found.claimed_crashes,
            progress_json=found.claimed_progress,
            trace=found.trace if takeover else None,
        )
    if fence is not None or _is_open(request, found, decision):
        return None
    refusal = _refusal(request, found, decision)
    if refusal is not None or not request.in_line:
        return refusal
    # Other messages wait for the key, or it was taken just now. For a line both mean: wait.
    return Busy(None, None, same_work=False, started=row is not None and row.attempts > 0)


def refusal_of(request: ClaimRequest, found: Found) -> ClaimAnswer | None:
    """Return why the row of records.sql refuses the claim. None: it does not."""
    recorded = found.recorded_retries, found.recorded_deferrals
    decision = decide_row(request, found if found.id is not None else None, recorded, found.now_us)
    if _is_open(request, found, decision):
        return None
    return _refusal(request, found, decision)


def _is_open(request: ClaimRequest, found: Found, decision: Decision) -> bool:
    """Return whether the row cannot refuse the claim.

    If the claim has got its key but not its work, its caller also has to free the key.
    """
    return decision is Decision.BURY or found.holder == str(request.owner)


def _refusal(request: ClaimRequest, found: Found, decision: Decision) -> ClaimAnswer | None:
    row = found if found.id is not None else None
    if decision in CLAIMABLE:
        return busy_of(found, row, found.now_us)
    recorded = found.recorded_retries, found.recorded_deferrals
    return answer(request, row, decision, found.now_us, recorded=recorded)


def busy_of(found: Found | FoundKey, row: Found | None, now_us: int) -> ClaimAnswer | None:
    """Return Busy if another owner holds the key in the statement's snapshot, or else None."""
    if found.held_until is None or found.held_until <= now_us:
        return None
    return busy_key(str(found.holder), found.held_until, row, now_us)
