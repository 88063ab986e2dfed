"""Statements of SQLAlchemy's that are compiled once, and handed to the driver as text.

To make a statement and to find its text again takes SQLAlchemy 100 to 600 µs, and to describe its
rows another 100; a round trip to a database beside it takes 50.

Guarantees: the same text and values as `Connection.execute()` has. Values and rows are as the
driver has them, which is what the ledger's columns need: texts and whole numbers.

Does not expand `IN` for lists of any length: that is a statement for each length.
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
        """The values in the driver's order, or by name, as it wants them."""
        named = self._compiled.construct_params(values)
        order = self._compiled.positiontup
        return named if order is None else tuple(named[name] for name in order)

    def run(self, db: sa.Connection, values: Mapping[str, object]) -> int:
        """Execute the statement; returns how many rows it changed."""
        return int(db.exec_driver_sql(self.text, self.parameters(values)).rowcount)
