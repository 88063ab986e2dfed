"""The numbers of messages: how often each was retried and deferred, as the ledger records it."""

from __future__ import annotations

import sqlalchemy as sa

from taskguard.ledger.connections.database import Database
from taskguard.ledger.tables import MESSAGES
from taskguard.model.claims import ClaimRequest, MessageRef
from taskguard.model.states import REPLACED_RETRIES

__all__ = ["is_replaced", "raise_deferrals", "was_replaced"]


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
    return sa.exists().where(*_note_of(request))


def was_replaced(db: sa.Connection, request: ClaimRequest) -> bool:
    """Return True if the call of this message was replaced, even after the snapshot of `db`.

    MariaDB and MySQL read rows that are newer than the snapshot only with a lock.
    """
    noted = sa.select(MESSAGES.c.message).where(*_note_of(request))
    return db.execute(noted.with_for_update(read=True, key_share=True)).first() is not None


def _note_of(request: ClaimRequest) -> tuple[sa.ColumnElement[bool], ...]:
    ids = (str(request.work), *request.formerly)
    return (
        MESSAGES.c.message == request.message.name,
        MESSAGES.c.work.in_(ids),
        MESSAGES.c.retries == REPLACED_RETRIES,
    )
