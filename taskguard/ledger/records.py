"""The record of work that waits with its call stored: what a new one holds, and whose it is.

Nothing is decided here, and nothing is written.
"""

from __future__ import annotations

import json
from typing import Any

from taskguard.ledger.protocol import ClaimRequest
from taskguard.ledger.tables import FREE
from taskguard.states import State

__all__ = ["UNHARMED", "message_of", "new_record", "waiting_values"]

UNHARMED = {"final": 0, "crashes": 0, "crashed_owner": ""}
"""Of work that may run, whatever became of it before."""


def waiting_values(request: ClaimRequest, *, due: int | None) -> dict[str, Any]:
    """The columns that say that it waits for this message, whatever it was before."""
    return {
        "message": request.message.name,
        "retries": request.message.retries,
        "state": State.NEW.value,
        "lease_until": 0,
        "owner": FREE,
        "call": request.call,
        "due": due,
        "error": None,
        "finished": None,
    }


def new_record(request: ClaimRequest, *, created_us: Any, **values: Any) -> dict[str, Any]:
    """The whole record of work that nobody has claimed yet."""
    return {
        "id": request.work,
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
    """The message that is sent until the work ends: the stored call's, or else the one in hand.

    Another one, without a call, may have claimed the work.
    """
    if row.call is not None:
        try:
            return str(json.loads(row.call)["message"])
        except (ValueError, TypeError, KeyError):
            pass
    return str(row.message)
