"""The numbers of messages: how often each was retried and deferred, as the ledger records it."""

from __future__ import annotations

import sqlalchemy as sa

from taskguard.ledger.connections.database import Database
from taskguard.ledger.tables import MESSAGES
from taskguard.model.claims import ClaimRequest, MessageRef
from taskguard.model.states import REPLACED_RETRIES

__all__ = ["is_replaced", "raise_deferrals"]


def raise_deferrals(
    database: Database,
    db: sa.Connection,
    message: MessageRef,
    deferrals: int,
    *,
    work: str,
    now_us: int,
) -> bool:
    """Record how often this message of this work was deferred, and lock its row.

    Return False unless the recorded numbers are lower.
    """
    key = {"message": message.name, "work": work}
    numbers = {"retries": message.retries, "deferrals": deferrals}
    return database.dialect.raise_numbers(db, MESSAGES, key, numbers, updated=now_us)


def is_replaced(request: ClaimRequest) -> sa.Exists:
    """Return the condition that the call of this message was replaced, under any id of its work."""
    ids = (str(request.work), *request.formerly)
    return sa.exists().where(
        MESSAGES.c.message == request.message.name,
        MESSAGES.c.work.in_(ids),
        MESSAGES.c.retries == REPLACED_RETRIES,
    )
