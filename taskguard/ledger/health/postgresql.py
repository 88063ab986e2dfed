"""Facts of a PostgreSQL server, with any driver."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from taskguard.ledger.health.facts import ServerFacts

__all__ = ["indexes", "other_schemas", "server"]

# From PostgreSQL 17 on. A body's transaction sets idle_in_transaction_session_timeout for itself.
_LIMIT = "transaction_timeout"
_FLUSHES = ("fsync", "synchronous_commit")
_READ = (_LIMIT, *_FLUSHES, "transaction_read_only")


def server(db: sa.Connection, *, own: bool) -> ServerFacts:
    """Read the settings of this session, including those of its role and its database."""
    query = sa.text("select name, setting from pg_settings where name = any(:names)")
    rows = db.execute(query, {"names": list(_READ)}).all()
    settings = {str(name): str(value) for name, value in rows}
    driver: Any = db.connection.dbapi_connection
    # PgBouncer's greeting has a process id of its own, which no session of the server has.
    greeted = getattr(getattr(driver, "info", None), "backend_pid", None)
    session = db.exec_driver_sql("select pg_backend_pid()").scalar()
    limit_s = int(settings.get(_LIMIT, 0)) / 1000
    return ServerFacts(
        read_only=_read_only(db, settings),
        unflushed=next((f"{each} = off" for each in _FLUSHES if settings[each] == "off"), None),
        pooled=greeted is not None and greeted != session,
        prepares=not own and getattr(driver, "prepare_threshold", None) is not None,
        limits_s={_LIMIT: limit_s} if limit_s > 0 else {},
    )


def _read_only(db: sa.Connection, settings: dict[str, str]) -> str | None:
    if db.exec_driver_sql("select pg_is_in_recovery()").scalar():
        return "a standby (pg_is_in_recovery)"
    on = settings["transaction_read_only"] == "on"
    return "read-only (default_transaction_read_only = on)" if on else None


def indexes(db: sa.Connection, tables: list[str]) -> tuple[set[str], set[str]]:
    """Return the tables that have a primary key, and the names of all valid indexes."""
    query = sa.text(
        "select t.name, c.relname, i.indisprimary from unnest(cast(:tables as text[])) t (name)"
        " join pg_index i on i.indrelid = to_regclass(quote_ident(t.name)) and i.indisvalid"
        " join pg_class c on c.oid = i.indexrelid"
    )
    rows = db.execute(query, {"tables": tables}).all()
    return {table for table, _, primary in rows if primary}, {name for _, name, _ in rows}


def other_schemas(db: sa.Connection, table: str) -> tuple[str, ...]:
    """Return the schemas with a table of this name that is not on the search path."""
    query = sa.text(
        "select n.nspname from pg_class c join pg_namespace n on n.oid = c.relnamespace"
        " where c.relname = :table and c.relkind in ('r', 'p')"
        " and c.oid is distinct from to_regclass(quote_ident(:table))"
        " and not pg_is_other_temp_schema(n.oid) order by 1"
    )
    return tuple(str(name) for name in db.execute(query, {"table": table}).scalars())
