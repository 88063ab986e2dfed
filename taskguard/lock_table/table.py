"""Creates the table and, on PostgreSQL, its functions: `taskguard locks create`, or as SQL.

Guarantees: concurrent calls create the table once. A repeated call changes no row.
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
    """Create the table and its functions if missing; see `TableLocks.create_table`."""
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
    """Return the SQL statements that create the lock table, for a migration.

    Args:
        url: a SQLAlchemy URL. Only the kind of database matters.
        unlogged: create an UNLOGGED table on PostgreSQL; see `TableLocks.create_table`.

    Raises:
        ConfigurationError: the URL cannot be read, or taskguard has no lock table for its database.
    """
    kind = read_url(url).get_backend_name()
    return _statements(kind, unlogged=unlogged)


def is_there(database: Database) -> bool:
    """Return whether the database has a lock table."""
    with database.transaction() as db:
        return sa.inspect(db).has_table("taskguard_locks")


def refuse_other_kinds(kind: str) -> None:
    """Raise ConfigurationError if taskguard has no lock table for this kind of database."""
    if kind not in ("postgresql", "mysql", "mariadb"):
        advice = (
            "Set locks=None: the ledger alone decides"
            if kind == "sqlite"
            else "Use PostgreSQL, MariaDB or MySQL"
        )
        raise ConfigurationError(f"taskguard has no lock table for {kind}. {advice}.")


def _statements(kind: str, *, unlogged: bool) -> list[str]:
    refuse_other_kinds(kind)
    if kind == "postgresql":
        return postgresql.ddl_statements(unlogged=unlogged)
    if unlogged:
        raise ConfigurationError(f"UNLOGGED tables are not available on {kind}: remove unlogged.")
    return mysql.ddl_statements()
