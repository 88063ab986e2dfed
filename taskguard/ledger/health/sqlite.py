"""Facts of an SQLite file."""

from __future__ import annotations

import sqlalchemy as sa

from taskguard.ledger.health.facts import ServerFacts

__all__ = ["indexes", "server"]

_SYNCHRONOUS = ("OFF", "NORMAL", "FULL", "EXTRA")
_FULL = 2


def server(db: sa.Connection, *, own: bool) -> ServerFacts:
    """Read the settings of this connection."""
    del own
    level = int(db.exec_driver_sql("pragma synchronous").scalar_one())
    query_only = db.exec_driver_sql("pragma query_only").scalar()
    return ServerFacts(
        read_only="read-only (PRAGMA query_only)" if query_only else None,
        unflushed=None if level >= _FULL else f"PRAGMA synchronous = {_SYNCHRONOUS[level]}",
    )


def indexes(db: sa.Connection, tables: list[str]) -> tuple[set[str], set[str]]:
    """Return the tables that have a primary key, and the names of all indexes."""
    inspector = sa.inspect(db)
    keyed = {name for name in tables if inspector.get_pk_constraint(name)["constrained_columns"]}
    names = {str(each["name"]) for name in tables for each in inspector.get_indexes(name)}
    return keyed, names
