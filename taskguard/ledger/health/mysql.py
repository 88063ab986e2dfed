"""Facts of a MariaDB or MySQL server."""

from __future__ import annotations

import sqlalchemy as sa

from taskguard.ledger.health.facts import ServerFacts

__all__ = ["indexes", "server"]

# Each ends a transaction between two statements. The last two are MariaDB's.
_LIMITS = ("wait_timeout", "idle_write_transaction_timeout", "idle_transaction_timeout")
# A body's transaction sets it for itself, on the ledger's own connections.
_SET_BY_US = "idle_transaction_timeout"
_READ_ONLY = ("read_only", "super_read_only", "innodb_read_only")
_FLUSHES = "innodb_flush_log_at_trx_commit"


def server(db: sa.Connection, *, own: bool) -> ServerFacts:
    """Read the settings of this session."""
    names = ", ".join(f"'{name}'" for name in (*_LIMITS, *_READ_ONLY, _FLUSHES))
    query = f"show variables where variable_name in ({names})"
    settings = {str(name).lower(): str(value) for name, value in db.exec_driver_sql(query)}
    limits_s = {
        name: float(settings[name])
        for name in _LIMITS
        if float(settings.get(name, 0)) > 0 and not (own and name == _SET_BY_US)
    }
    on = [name for name in _READ_ONLY if settings.get(name, "OFF") not in ("OFF", "0")]
    flushes = settings.get(_FLUSHES, "1")
    return ServerFacts(
        read_only=f"read-only ({on[0]} = {settings[on[0]]})" if on else None,
        unflushed=None if flushes == "1" else f"{_FLUSHES} = {flushes}",
        limits_s=limits_s,
    )


def indexes(db: sa.Connection, tables: list[str]) -> tuple[set[str], set[str]]:
    """Return the tables that have a primary key, and the names of all indexes."""
    query = sa.text(
        "select table_name, index_name from information_schema.statistics"
        " where table_schema = database() and table_name in :tables"
    ).bindparams(sa.bindparam("tables", expanding=True))
    rows = db.execute(query, {"tables": tables}).all()
    return {table for table, name in rows if name == "PRIMARY"}, {name for _, name in rows}
