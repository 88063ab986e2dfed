"""What MariaDB and MySQL say of themselves."""

from __future__ import annotations

import sqlalchemy as sa

from taskguard.ledger.health.facts import Limit, Limited, ServerFacts, Size

__all__ = ["indexes", "server", "sizes"]

# By name: in how many parts of a second it counts.
_LIMITS = {
    "max_statement_time": (1, Limited.STATEMENT),  # MariaDB
    "max_execution_time": (1000, Limited.STATEMENT),  # MySQL
    "wait_timeout": (1, Limited.IDLENESS),
    "idle_write_transaction_timeout": (1, Limited.IDLENESS),  # MariaDB, as the next
    "idle_transaction_timeout": (1, Limited.IDLENESS),
}
# A body's transaction sets it for itself, on the ledger's own connections.
_SET_BY_US = "idle_transaction_timeout"
_READ_ONLY = ("read_only", "super_read_only", "innodb_read_only")
_FLUSHES = "innodb_flush_log_at_trx_commit"


def server(db: sa.Connection, *, own: bool) -> ServerFacts:
    """Settings as this session has them."""
    names = ", ".join(f"'{name}'" for name in (*_LIMITS, *_READ_ONLY, _FLUSHES))
    asked = f"show variables where variable_name in ({names})"
    said = {str(name).lower(): str(value) for name, value in db.exec_driver_sql(asked)}
    limits = [
        Limit(name, float(said[name]) / parts, of)
        for name, (parts, of) in _LIMITS.items()
        if float(said.get(name, 0)) > 0 and not (own and name == _SET_BY_US)
    ]
    on = [name for name in _READ_ONLY if said.get(name, "OFF") not in ("OFF", "0")]
    return ServerFacts(
        read_only=f"read-only ({on[0]} = {said[on[0]]})" if on else None,
        unflushed=f"{_FLUSHES} = {said[_FLUSHES]}" if said.get(_FLUSHES, "1") != "1" else None,
        limits=tuple(limits),
    )


def indexes(db: sa.Connection, tables: list[str]) -> tuple[set[str], set[str]]:
    """The tables that have a primary key, and the names of all indexes."""
    asked = sa.text(
        "select table_name, index_name from information_schema.statistics"
        " where table_schema = database() and table_name in :tables"
    ).bindparams(sa.bindparam("tables", expanding=True))
    rows = db.execute(asked, {"tables": tables}).all()
    return {table for table, name in rows if name == "PRIMARY"}, {name for _, name in rows}


def sizes(db: sa.Connection, tables: list[str]) -> dict[str, Size]:
    """Rows as InnoDB estimates them."""
    asked = sa.text(
        "select table_name, table_rows, data_length + index_length"
        " from information_schema.tables"
        " where table_schema = database() and table_name in :tables"
    ).bindparams(sa.bindparam("tables", expanding=True))
    rows = db.execute(asked, {"tables": tables})
    return {name: Size(int(count or 0), int(size or 0)) for name, count, size in rows}
