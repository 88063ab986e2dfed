"""What databases have in common whose INSERT knows ON CONFLICT, and RETURNING."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from taskguard.ledger.connections.dialects.base import Dialect, recorded_below
from taskguard.ledger.tables import MESSAGES
from taskguard.model.claims import MessageRef

__all__ = ["OnConflict"]


class OnConflict(Dialect):
    """Rows that are made, or changed where they are, in one statement.

    Attributes:
        insert: the dialect's own `insert()` of SQLAlchemy.
    """

    insert: Any

    def insert_missing(self, table: sa.Table, values: Any) -> Any:
        return self.insert(table).values(values).on_conflict_do_nothing()

    def raise_deferrals(
        self, db: sa.Connection, message: MessageRef, deferrals: int, *, work: str, now_us: int
    ) -> bool:
        numbers = {"retries": message.retries, "deferrals": deferrals, "updated": now_us}
        statement = self.insert(MESSAGES).values(message=message.name, work=work, **numbers)
        statement = statement.on_conflict_do_update(
            index_elements=list(MESSAGES.primary_key),
            set_=numbers,
            where=recorded_below(message, deferrals),
        )
        return db.execute(statement.returning(MESSAGES.c.deferrals)).first() is not None
