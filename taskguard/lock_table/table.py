"""The table, and on PostgreSQL the functions: made by `taskguard locks create`, or as SQL.

Guarantees: several that create it at once make it once; asked again it changes no row.
"""

from __future__ import annotations

import contextlib

import sqlalchemy as sa

from taskguard.errors import ConfigurationError, TransactionRetryError
from taskguard.ledger.connections.database import Database
from taskguard.ledger.connections.engine import read_url
from taskguard.lock_table import mysql, postgresql

__all__ = ["ddl_statements", "is_there", "make", "refuse_other_kinds"]

_TRIES = 5


def make(database: Database, *, unlogged: bool = False) -> None:
    """Create what is missing; see `TableLocks.create_table`."""
    kind = database.engine.dialect.name
    statements = _statements(kind, unlogged=unlogged)
    for left in range(_TRIES, -1, -1):
        with contextlib.suppress(*([TransactionRetryError] if left else [])):
            with database.transaction(bounded=False) as db:
                database.dialect.lock_schema(db)
                for statement in statements:
                    db.exec_driver_sql(statement.replace("%", "%%"))
            return


def ddl_statements(url: str, *, unlogged: bool = False) -> list[str]:
    """The SQL that makes the table of locks, one statement after the other, for a migration.

    Args:
        url: a SQLAlchemy URL, of which only the kind of database matters.
        unlogged: on PostgreSQL, without a log; see `TableLocks.create_table`.

    Raises:
        ConfigurationError: the URL cannot be read, or is of a database without such a table.
    """
    kind = read_url(url).get_backend_name()
    return _statements(kind, unlogged=unlogged)


def is_there(database: Database) -> bool:
    """Whether the database has a table of locks."""
    with database.transaction() as db:
        return sa.inspect(db).has_table("taskguard_locks")


def refuse_other_kinds(kind: str) -> None:
    """Raise ConfigurationError for a database that has no table of locks."""
    if kind not in ("postgresql", "mysql", "mariadb"):
        instead = "set locks=None, and the ledger alone decides" if kind == "sqlite" else ""
        others = "PostgreSQL, MariaDB and MySQL have such a table"
        raise ConfigurationError(f"There is no table of locks in {kind}: {instead or others}.")


def _statements(kind: str, *, unlogged: bool) -> list[str]:
    refuse_other_kinds(kind)
    if kind == "postgresql":
        return postgresql.ddl_statements(unlogged=unlogged)
    if unlogged:
        raise ConfigurationError(f"A table without a log is PostgreSQL's alone, not {kind}'s.")
    return mysql.ddl_statements()
