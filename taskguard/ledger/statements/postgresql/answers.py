"""Reads the row of a claim's one statement as an answer.

Guarantees the answers of `states.decide()`, which the portable statements ask, too. None means that
the statement saw too little to answer: then those decide, over locked rows.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from taskguard.ledger.decisions import CLAIMABLE, answer, busy_key, decide_row
from taskguard.model.claims import Busy, Claim, ClaimAnswer, Claimed, ClaimRequest
from taskguard.model.lease import Owner
from taskguard.model.states import Decision, Place

__all__ = ["Found", "FoundFirst", "FoundKey", "answer_of", "answer_of_first", "busy_of"]


class Found(NamedTuple):
    """The one row of claim.sql: the work as it was, and what was granted."""

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
    eligible: bool
    granted_fence: int | None
    claimed_attempts: int | None
    claimed_crashes: int
    claimed_progress: str | None
    holder: str
    held_until: int | None
    flush: str | None


class FoundFirst(NamedTuple):
    """The one row of claim_first.sql. `found`: what stood in its way, or of no meaning."""

    now_us: int
    granted_fence: int | None
    done: int | None
    found: str


class _Recorded(NamedTuple):
    """What `FoundFirst.found` is made of: a work's record, its message's and its key's."""

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
    recorded_retries: int | None
    recorded_deferrals: int | None
    holder: str | None
    held_until: int | None


class FoundKey(NamedTuple):
    """The one row of claim_key.sql."""

    now_us: int
    granted_fence: int | None
    holder: str
    held_until: int | None
    flush: str | None


def answer_of_first(request: ClaimRequest, first: FoundFirst) -> ClaimAnswer | None:
    """The answer by the records that stood in its way; None: the delivery may have a claim."""
    found = _Recorded(*json.loads(first.found))
    row = found if found.id is not None else None
    recorded = found.recorded_retries or 0, found.recorded_deferrals or 0
    decision = decide_row(request, row, recorded, first.now_us)
    if decision is Decision.BURY:
        return None
    if decision not in CLAIMABLE:
        return answer(request, row, decision, first.now_us, recorded=recorded)
    if not found.holder or found.holder == str(request.owner):
        return None
    return busy_of(found, row, first.now_us)


def answer_of(
    request: ClaimRequest, found: Found, place: Place | None = None
) -> ClaimAnswer | None:
    """The answer that the row of claim.sql tells; None: it tells none."""
    row = found if found.id is not None else None
    fence, attempt = found.granted_fence, found.claimed_attempts
    if row is None and fence is not None and attempt is not None:
        return Claimed(Claim(request, fence))  # the first, by the statement's own word
    recorded = found.recorded_retries, found.recorded_deferrals
    decision = decide_row(request, row, recorded, found.now_us, place)
    if decision is Decision.AGAIN:
        return None  # the statement knows of the record alone
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
        )
    if fence is not None or decision is Decision.BURY:
        return None
    if decision not in CLAIMABLE:
        return answer(request, row, decision, found.now_us, recorded=recorded)
    return _taken(request, found, row)


def _taken(request: ClaimRequest, found: Found, row: Found | None) -> ClaimAnswer | None:
    """The key is another's, or it is the turn of others; None where that is not known."""
    if found.holder == str(request.owner):
        return None  # already this request's, which did not get the work, and heard nothing of it
    busy = busy_of(found, row, found.now_us)
    if busy is not None or not request.in_line:
        return busy
    # Others wait for it, or it was taken just now: in a line that is the same.
    return Busy(None, None, same_work=False, started=row is not None and row.attempts > 0)


def busy_of(
    found: Found | FoundKey | _Recorded, row: Found | _Recorded | None, now_us: int
) -> ClaimAnswer | None:
    """The key is another's; None where it was not yet so in the statement's snapshot."""
    if found.held_until is None or found.held_until <= now_us:
        return None
    return busy_key(str(found.holder), found.held_until, row, now_us)
