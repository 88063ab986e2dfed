"""What PostgreSQL says of itself, with whatever driver."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from taskguard.ledger.health.facts import Limit, Limited, ServerFacts, Size

__all__ = ["indexes", "other_schemas", "server", "sizes"]

# A body's transaction sets idle_in_transaction_session_timeout for itself.
_LIMITS = {
    "statement_timeout": Limited.STATEMENT,
    "transaction_timeout": Limited.TRANSACTION,  # from 17 on
}
_ASKED = (*_LIMITS, "fsync", "synchronous_commit", "transaction_read_only")


def server(db: sa.Connection, *, own: bool) -> ServerFacts:
    """Settings as this session has them, its role's and its database's among them."""
    asked = sa.text("select name, setting from pg_settings where name = any(:names)")
    rows = db.execute(asked, {"names": list(_ASKED)}).all()
    settings = {str(name): str(value) for name, value in rows}
    driver: Any = db.connection.dbapi_connection
    # PgBouncer greets with a process id of its own, which no session of the server has.
    greeted = getattr(getattr(driver, "info", None), "backend_pid", None)
    session = db.exec_driver_sql("select pg_backend_pid()").scalar()
    return ServerFacts(
        read_only=_read_only(db, settings),
        unflushed=next(
            (
                f"{name} = off"
                for name in ("fsync", "synchronous_commit")
                if settings[name] == "off"
            ),
            None,
        ),
        pooled=greeted is not None and greeted != session,
        prepares=not own and getattr(driver, "prepare_threshold", None) is not None,
        limits=tuple(
            Limit(name, int(settings[name]) / 1000, of)
            for name, of in _LIMITS.items()
            if int(settings.get(name, 0)) > 0
        ),
    )


def _read_only(db: sa.Connection, settings: dict[str, str]) -> str | None:
    if db.exec_driver_sql("select pg_is_in_recovery()").scalar():
        return "a standby (pg_is_in_recovery)"
    on = settings["transaction_read_only"] == "on"
    return "read-only (default_transaction_read_only = on)" if on else None


def indexes(db: sa.Connection, tables: list[str]) -> tuple[set[str], set[str]]:
    """The tables that have a primary key, and the names of all valid indexes."""
    asked = sa.text(
        "select t.name, c.relname, i.indisprimary from unnest(cast(:tables as text[])) t (name)"
        " join pg_index i on i.indrelid = to_regclass(quote_ident(t.name)) and i.indisvalid"
        " join pg_class c on c.oid = i.indexrelid"
    )
    rows = db.execute(asked, {"tables": tables}).all()
    return {table for table, _, primary in rows if primary}, {name for _, name, _ in rows}


def sizes(db: sa.Connection, tables: list[str]) -> dict[str, Size]:
    """Rows as the planner believes; -1 where it never looked."""
    asked = sa.text(
        "select t.name, c.reltuples, pg_total_relation_size(c.oid)"
        " from unnest(cast(:tables as text[])) t (name)"
        " join pg_class c on c.oid = to_regclass(quote_ident(t.name))"
    )
    rows = db.execute(asked, {"tables": tables})
    return {name: Size(max(0, int(count)), int(size)) for name, count, size in rows}


def other_schemas(db: sa.Connection, table: str) -> tuple[str, ...]:
    """The schemas with a table of this name that this connection does not find by the bare name."""
    asked = sa.text(
        "select n.nspname from pg_class c join pg_namespace n on n.oid = c.relnamespace"
        " where c.relname = :table and c.relkind in ('r', 'p')"
        " and c.oid is distinct from to_regclass(quote_ident(:table))"
        " and not pg_is_other_temp_schema(n.oid) order by 1"
    )
    return tuple(str(name) for name in db.execute(asked, {"table": table}).scalars())
