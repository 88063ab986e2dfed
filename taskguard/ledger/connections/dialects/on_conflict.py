"""The common part of databases whose INSERT supports ON CONFLICT and RETURNING."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from taskguard.ledger.connections.dialects.base import Dialect, lower

__all__ = ["OnConflict"]


class OnConflict(Dialect):
    """A dialect that inserts or updates a row in one statement.

    Attributes:
        insert: SQLAlchemy's `insert()` of this dialect.
    """

    insert: Any

    def insert_missing(self, table: sa.Table, values: Any) -> Any:
        return self.insert(table).values(values).on_conflict_do_nothing()

    def insert_or_add(self, table: sa.Table, values: Any, number: sa.Column[Any]) -> Any:
        statement = self.insert(table).values(values)
        return statement.on_conflict_do_update(
            index_elements=list(table.primary_key),
            set_={number.name: number + statement.excluded[number.name]},
        )

    def raise_numbers(
        self,
        db: sa.Connection,
        table: sa.Table,
        key: Mapping[str, object],
        numbers: Mapping[str, int],
        **others: object,
    ) -> bool:
        values = {**numbers, **others}
        statement = self.insert(table).values(**key, **values)
        statement = statement.on_conflict_do_update(
            index_elements=list(table.primary_key), set_=values, where=lower(table, numbers)
        )
        return db.execute(statement.returning(*table.primary_key)).first() is not None
