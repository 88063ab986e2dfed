"""A row of any database that refuses an older fencing token.

Guarantees: the statement changes rows only where `fence_token` is NULL or not newer than ours, and
leaves ours there, in one atomic statement; if a row that it means has a newer one, that is a
StaleTokenError, and if there is no such row a FencedRowMissingError. The comparison lets the same
fence through again, for a body may write a row more than once.

An ORM update may synchronize its session in every way that SQLAlchemy has.

Does not commit, and does not roll back: that is the caller's, as for any statement. On a
connection that commits each statement, a statement over several rows may have changed some of them
when it is refused.
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
# So often a row may come into being, or a newer write be rolled back, between update and look.
_TRIES = 3


class FencedUpdate:
    """An UPDATE under a fencing token. Made by `guard.fenced()`; does nothing until `execute()`."""

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
        # A locking read: it waits for whoever is writing a row just now, and sees what was
        # committed last also where plain reads show the transaction's beginning.
        self._look = sa.select(token).with_for_update(of=table)
        if statement.whereclause is not None:
            self._look = self._look.where(statement.whereclause)

    def __repr__(self) -> str:
        return f"<FencedUpdate {self._name} {self._key} fence={self._fence}>"

    def execute(self, on: Any) -> int:
        """Run it on a Connection or an ORM Session, in the transaction that is open there.

        Returns:
            How many rows were written; at least one.

        Raises:
            StaleTokenError: a row has a newer fence (`newer_fence`). Roll the transaction back.
            FencedRowMissingError: no row is what the statement's where() asks for.
            ConfigurationError: the column cannot hold 64-bit numbers, or `on` is neither.
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
            f"guard.fenced(): {self._table.name} has no row that fits the statement's where(), so "
            f"nothing of {self._key} was written. Insert the row first, or see whether the "
            "condition still holds once another holder has written.",
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
                f"The driver {dialect.driver} does not tell how many rows an UPDATE changed, so a "
                "refused write would not be noticed. Use another driver.",
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
            f"{self._name} has fence {newer}, and {self._key} would write with {self._fence}: a "
            "newer holder has written the row. Stop, and roll the transaction back.",
            key=self._key,
            fence=self._fence,
            newer_fence=newer,
        )


def _named(name: str, table: Any) -> Any:
    """A table's column: by its name in the database, else by the key that it has in Python."""
    columns = list(table.c)
    found = [each for each in columns if each.name == name]
    found += [each for each in columns if each.key == name]
    return found[0] if found else None


def _attribute_of(statement: Any, column: Any) -> Any:
    """The attribute by which the statement's class knows a column; the column if it has no class.

    A session that has objects to change compares them in Python, by attributes alone.
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
    """The statement where the token is not newer, which leaves ours there."""
    older = statement.where(sa.or_(token.is_(None), token <= fence))
    try:
        # By column and by key: the statement may give the token a value by either of them.
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
        return dialect.name == "sqlite"  # whose integers have 64 bits, whatever they are called
    # What is read as a float has lost digits; older SQLAlchemy makes a Numeric of a Float here.
    if isinstance(kind, sa.Float) or not isinstance(here, sa.Numeric) or not here.asdecimal:
        return False
    return here.precision is None or here.precision - (here.scale or 0) >= _FENCE_DIGITS


def _not_an_update(statement: Any) -> str:
    said = f"guard.fenced() takes SQLAlchemy's update(), not {type(statement).__name__}. "
    if isinstance(statement, sa.Insert):
        return said + (
            "An insert has no row yet that could refuse it: let a unique index do that, and give "
            "the new row guard.fence."
        )
    if isinstance(statement, sa.Delete):
        return said + (
            "A row that is gone refuses nobody: mark it as deleted with an update(), and remove "
            "it later."
        )
    return said + "Write update(table).where(…).values(…)."
