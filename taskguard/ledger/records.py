"""The record of work that waits with its call stored: what a new one holds, and what is sent of it.

Nothing is decided here, and nothing is written.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from taskguard.ledger.history import NO_FLAG
from taskguard.ledger.tables import FREE
from taskguard.model.claims import ClaimRequest, MessageRef, Overdue
from taskguard.model.states import State

if TYPE_CHECKING:
    import sqlalchemy as sa

__all__ = [
    "UNHARMED",
    "ToSend",
    "expiry_of",
    "message_of",
    "new_record",
    "overdue_from",
    "overdue_of",
    "waiting_values",
]

UNHARMED = {"final": 0, "crashes": 0, "crashed_owner": ""}
"""Column values of work that may run, independently of its former end."""


def waiting_values(request: ClaimRequest, *, due: int | None) -> dict[str, Any]:
    """Return the column values of work that waits for this message."""
    return {
        "message": request.message.name,
        "retries": request.message.retries,
        "state": State.NEW.value,
        "lease_until": 0,
        "owner": FREE,
        "call": request.call,
        "sends": None,
        "due": due,
        "expires": request.expires_us,
        "error": None,
        **NO_FLAG,
        "finished": None,
    }


def expiry_of(row: Any, request: ClaimRequest) -> int | None:
    """Return when a parked message expires. In its position, it keeps the earliest expiry."""
    in_line = row.state == State.NEW.value and row.line is not None
    if not in_line or row.message != request.message.name or row.expires is None:
        return request.expires_us
    return int(row.expires if request.expires_us is None else min(row.expires, request.expires_us))


def new_record(request: ClaimRequest, *, created_us: Any, **values: Any) -> dict[str, Any]:
    """Return the whole record of work that no delivery has claimed yet."""
    return {
        "id": request.work,
        "base": request.base,
        "task": request.task,
        "key": request.line,
        "fence": 0,
        "attempts": 0,
        "created": created_us,
        "fingerprint": request.fingerprint,
        **UNHARMED,
        **values,
    }


def message_of(row: Any) -> str:
    """Return the message that is sent until the work ends: the stored call's, if there is a call.

    Another message, without a call, may have claimed the work.
    """
    return str(_stored(row.call, "message", row.message))


def _deferrals_of(call: str | None) -> int:
    """Return how often a message had been deferred when its call was stored."""
    return int(_stored(call, "deferrals", 0))


def _stored(call: str | None, field: str, default: Any) -> Any:
    try:
        return default if call is None else json.loads(call)[field]
    except (ValueError, TypeError, KeyError):
        return default


class ToSend(NamedTuple):
    """Promoted work: its record, and the recorded numbers of its message."""

    id: str
    task: str
    message: str
    retries: int
    call: str
    due: int
    attempts: int
    sends: int | None
    known_retries: int | None
    known_deferrals: int | None
    wait_us: int = 0


def overdue_of(work: ToSend) -> Overdue:
    """Return promoted work as an overdue message to send."""
    recorded = (work.known_retries or 0, work.known_deferrals or 0)
    message = message_of(work)
    found = overdue_from(work, message, {(message, work.id): recorded})
    return replace(found, wait_s=work.wait_us / 1e6) if work.wait_us else found


def overdue_from(
    row: sa.Row[Any] | ToSend, message: str, recorded: dict[tuple[str, str], tuple[int, int]]
) -> Overdue:
    """Return a work's row as an overdue message, with the highest known numbers of its message."""
    known = (row.retries if row.message == message else 0, _deferrals_of(row.call))
    retries, deferrals = max(known, recorded.get((message, row.id), (0, 0)))
    ref = MessageRef(message, retries, deferrals)
    keeps_position = bool(getattr(row, "keeps_position", False))
    return Overdue(
        row.id,
        row.task,
        ref,
        row.call,
        row.due,
        row.attempts,
        sends=row.sends or 0,
        keeps_position=keeps_position,
    )
