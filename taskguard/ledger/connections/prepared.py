"""Compile a statement of SQLAlchemy once, and pass it to the driver as text.

SQLAlchemy takes 100 to 600 µs to create a statement and to find its compiled text, and 100 µs to
describe its rows. A round trip to a database on the same machine takes 50 µs.

Guarantees: text and values are those of `Connection.execute()`. Values and rows are those of the
driver, which suits the ledger's columns: texts and integers.

It does not expand `IN` for lists of any length: create a statement for each length.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

__all__ = ["Prepared"]


_named: Any = namedtuple  # noqa: PYI024 - with fields that no class could name


class Prepared:
    """One statement for one dialect.

    Args:
        statement: has a `bindparam()` for each value.
        dialect: SQLAlchemy's.
        columns: the columns of an INSERT or UPDATE whose values are given by their names.

    Attributes:
        text: the statement as the driver takes it.
        row: the type of a SELECT's rows.
    """

    def __init__(
        self, statement: Any, dialect: sa.Dialect, *, columns: tuple[str, ...] | None = None
    ) -> None:
        names = None if columns is None else list(columns)
        self._compiled = statement.compile(dialect=dialect, column_keys=names)
        self.text = str(self._compiled)
        selected = statement.selected_columns.keys() if statement.is_select else []
        self.row = _named("row", selected)

    def parameters(self, values: Mapping[str, object]) -> Any:
        """Return the values in the driver's order or by name, as the driver needs them."""
        named = self._compiled.construct_params(values)
        order = self._compiled.positiontup
        return named if order is None else tuple(named[name] for name in order)

    def run(self, db: sa.Connection, values: Mapping[str, object]) -> int:
        """Execute the statement. Return how many rows it changed."""
        return int(db.exec_driver_sql(self.text, self.parameters(values)).rowcount)
