"""What SQLite says of a file. It has no estimates of rows."""

from __future__ import annotations

import sqlalchemy as sa

from taskguard.ledger.health.facts import ServerFacts, Size

__all__ = ["indexes", "server", "sizes"]

_SYNCHRONOUS = ("OFF", "NORMAL", "FULL", "EXTRA")
_FULL = 2


def server(db: sa.Connection, *, own: bool) -> ServerFacts:
    """Settings of this connection."""
    del own
    level = int(db.exec_driver_sql("pragma synchronous").scalar_one())
    query_only = db.exec_driver_sql("pragma query_only").scalar()
    return ServerFacts(
        read_only="read-only (PRAGMA query_only)" if query_only else None,
        unflushed=None if level >= _FULL else f"PRAGMA synchronous = {_SYNCHRONOUS[level]}",
    )


def indexes(db: sa.Connection, tables: list[str]) -> tuple[set[str], set[str]]:
    """The tables that have a primary key, and the names of all indexes."""
    inspector = sa.inspect(db)
    keyed = {name for name in tables if inspector.get_pk_constraint(name)["constrained_columns"]}
    names = {str(each["name"]) for name in tables for each in inspector.get_indexes(name)}
    return keyed, names


def sizes(db: sa.Connection, tables: list[str]) -> dict[str, Size]:
    """None."""
    del db, tables
    return {}
