"""A row of any database that refuses an older fencing token.

Guarantees: one atomic statement changes rows whose `fence_token` is NULL or not newer than the
guard's, and stores the guard's. If a selected row has a newer token, it raises StaleTokenError. If
no row is selected, it raises FencedRowMissingError. An equal token is accepted, because a body may
write a row more than once.

An ORM update may synchronize its session in every way that SQLAlchemy has.

Does not commit or roll back: the caller does. If the connection commits each statement, a refused
statement over several rows may have changed some of them.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, InvalidRequestError
from sqlalchemy.orm import Session, scoped_session
from sqlalchemy.orm.exc import UnmappedColumnError

from taskguard.errors import ConfigurationError, FencedRowMissingError, StaleTokenError

__all__ = ["FencedUpdate"]

_FENCE_DIGITS = 19  # of the largest 64-bit number
# Between the update and the check, a row may be inserted or a newer write rolled back. Then the
# update is tried again, up to this number of times.
_TRIES = 3


class FencedUpdate:
    """An UPDATE with a fencing token, made by `guard.fenced()`. Only `execute()` runs it."""

    def __init__(self, statement: Any, *, column: str, key: str, fence: int) -> None:
        if not isinstance(statement, sa.Update):
            raise ConfigurationError(_not_an_update(statement), key=key)
        if statement.returning_column_descriptions:
            raise ConfigurationError(
                "guard.fenced() takes an update() without returning(): read the row afterwards, in "
                "the same transaction.",
                key=key,
            )
        table: Any = statement.table
        found = _named(column, table)
        if found is None:
            raise ConfigurationError(
                f"The table {table.name} has no column {column!r} for the fencing token. Add it as "
                "a nullable BigInteger, or name another with guard.fenced(…, column=…).",
                key=key,
            )
        self._key = key
        self._fence = fence
        self._name = f"{table.name}.{column}"
        self._table = table
        self._column: Any = found
        token = _attribute_of(statement, found)
        self._update = _fenced(statement, token, fence, key)
        # A locking read: it waits for a transaction that is writing the row, and reads the last
        # committed version, even if plain reads show the state at the transaction's start.
        self._look = sa.select(token).with_for_update(of=table)
        if statement.whereclause is not None:
            self._look = self._look.where(statement.whereclause)

    def __repr__(self) -> str:
        return f"<FencedUpdate {self._name} {self._key} fence={self._fence}>"

    def execute(self, on: Any) -> int:
        """Run the update on a Connection or an ORM Session, in its open transaction.

        Returns:
            How many rows were written; at least one.

        Raises:
            StaleTokenError: a row has a newer fence (`newer_fence`). Roll the transaction back.
            FencedRowMissingError: no row matches the statement's where().
            ConfigurationError: the column cannot hold 64-bit numbers, or `on` is neither a
                Connection nor a Session.
        """
        self._check(on)
        for _ in range(_TRIES):
            written: int = on.execute(self._update).rowcount
            newer = on.execute(self._look.where(self._column > self._fence)).scalars().all()
            if newer:
                raise self._stale(int(max(newer)))
            if written:
                return written
            if on.execute(self._look).first() is None:
                break
        raise FencedRowMissingError(
            f"guard.fenced(): {self._table.name} has no row that matches the statement's where(), "
            f"so nothing of {self._key} was written. Insert the row first, or check whether "
            "another holder's write has made the condition false.",
            key=self._key,
            fence=self._fence,
        )

    def _check(self, on: Any) -> None:
        if isinstance(on, sa.Connection):
            dialect = on.dialect
        elif isinstance(on, Session | scoped_session):
            dialect = on.get_bind(clause=self._table).dialect
        else:
            raise ConfigurationError(
                "guard.fenced(…).execute() takes a SQLAlchemy Connection or an ORM Session, not "
                f"{type(on).__module__}.{type(on).__qualname__}.",
                key=self._key,
            )
        if not dialect.supports_sane_rowcount:
            raise ConfigurationError(
                f"The driver {dialect.driver} does not report how many rows an UPDATE changed, so "
                "taskguard would not notice a refused write. Use another driver.",
                key=self._key,
            )
        kind = self._column.type
        if not _holds_fences(kind, dialect):
            raise ConfigurationError(
                f"{self._name} is {kind!r}, which cannot hold a fencing token of 64 bits. Make it "
                "a nullable BigInteger.",
                key=self._key,
            )

    def _stale(self, newer: int) -> StaleTokenError:
        return StaleTokenError(
            f"{self._name} has fence {newer}, and this holder of {self._key} has {self._fence}: a "
            "newer holder has written the row. Stop, and roll the transaction back.",
            key=self._key,
            fence=self._fence,
            newer_fence=newer,
        )


def _named(name: str, table: Any) -> Any:
    """Return a table's column, by its name in the database or by its key in Python."""
    columns = list(table.c)
    found = [each for each in columns if each.name == name]
    found += [each for each in columns if each.key == name]
    return found[0] if found else None


def _attribute_of(statement: Any, column: Any) -> Any:
    """Return the attribute of the statement's class for a column; without a class, the column.

    A session evaluates the condition in Python for the objects that it has, by attributes only.
    """
    entity = statement.entity_description.get("entity")
    inspected = sa.inspect(entity, raiseerr=False) if entity is not None else None
    mapper: Any = getattr(inspected, "mapper", None)
    if mapper is None:
        return column
    own = _named(column.name, mapper.local_table)
    try:
        return getattr(entity, mapper.get_property_by_column(own).key)
    except UnmappedColumnError:
        return column


def _fenced(statement: Any, token: Any, fence: int, key: str) -> Any:
    """Return the statement with the condition on the token, and with the guard's token as value."""
    older = statement.where(sa.or_(token.is_(None), token <= fence))
    try:
        # Set it by column and by key, because the statement may set the token by either of them.
        return older.values({token: fence, token.key: fence})
    except (InvalidRequestError, ArgumentError) as error:
        raise ConfigurationError(
            "guard.fenced() takes an update() without ordered_values(), because it adds the token "
            f"to the values ({error}). Use values().",
            key=key,
        ) from error


def _holds_fences(kind: sa.types.TypeEngine[Any], dialect: sa.Dialect) -> bool:
    here = kind.dialect_impl(dialect)
    if isinstance(here, sa.types.TypeDecorator):
        here = here.impl_instance
    if isinstance(here, sa.BigInteger):
        return True
    if isinstance(here, sa.Integer):
        return dialect.name == "sqlite"  # its integers have 64 bits, whatever their declared type
    # A float loses digits. Older SQLAlchemy makes a Numeric of a Float here.
    if isinstance(kind, sa.Float) or not isinstance(here, sa.Numeric) or not here.asdecimal:
        return False
    return here.precision is None or here.precision - (here.scale or 0) >= _FENCE_DIGITS


def _not_an_update(statement: Any) -> str:
    said = f"guard.fenced() takes SQLAlchemy's update(), not {type(statement).__name__}. "
    if isinstance(statement, sa.Insert):
        return said + (
            "An insert has no row yet that could refuse it. Let a unique index refuse it, and "
            "store guard.fence in the new row."
        )
    if isinstance(statement, sa.Delete):
        return said + (
            "A deleted row cannot refuse a later write. Mark it as deleted with an update(), and "
            "remove it later."
        )
    return said + "Write update(table).where(…).values(…)."
