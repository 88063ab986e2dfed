"""Asking a database what `facts.py` wants to know."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from taskguard.errors import LedgerSchemaError
from taskguard.ledger.connections.database import Database
from taskguard.ledger.health import mysql, postgresql, sqlite
from taskguard.ledger.health.facts import ServerFacts, TableFacts
from taskguard.ledger.tables import METADATA, WORK
from taskguard.model.states import State

__all__ = ["ask_schemas", "ask_server", "ask_tables"]

OVERDUE_S = 900.0
_LOOKED_AT = 1000
_ENDED = (State.DONE.value, State.FAILED.value)
_KINDS: dict[str, Any] = {
    "postgresql": postgresql,
    "mysql": mysql,
    "mariadb": mysql,
    "sqlite": sqlite,
}


def ask_server(database: Database) -> ServerFacts:
    """The server and its settings."""
    kind = _KINDS[database.engine.dialect.name]
    with database.transaction() as db:
        facts: ServerFacts = kind.server(db, own=database.dialect.own)
    return facts


def ask_tables(database: Database) -> TableFacts:
    """The tables, which are there."""
    kind = _KINDS[database.engine.dialect.name]
    with database.transaction() as db:
        keyed, indexes = kind.indexes(db, list(METADATA.tables))
        wanted = {str(index.name) for table in METADATA.tables.values() for index in table.indexes}
        oldest_s = _oldest_ended_s(database, db)
        overdue = _overdue(database, db)
    return TableFacts(
        without_key=tuple(name for name in METADATA.tables if name not in keyed),
        without_index=tuple(sorted(wanted - indexes)),
        other_schemas=ask_schemas(database),
        sizes=_sizes(database, kind),
        oldest_ended_s=oldest_s,
        overdue=overdue,
    )


def ask_schemas(database: Database) -> tuple[str, ...]:
    """The schemas with tables of a ledger that are not this ledger's."""
    kind = _KINDS[database.engine.dialect.name]
    if kind is not postgresql:
        return ()
    with database.transaction() as db:
        return postgresql.other_schemas(db, WORK.name)


def _sizes(database: Database, kind: Any) -> Any:
    try:
        with database.transaction() as db:
            return kind.sizes(db, list(METADATA.tables))
    except LedgerSchemaError:  # this user may not ask
        return {}


def _oldest_ended_s(database: Database, db: sa.Connection) -> float | None:
    """Of the first rows that the database comes to: `finished` is in no index."""
    some = sa.select(WORK.c.state, WORK.c.finished).limit(_LOOKED_AT).subquery()
    oldest = sa.select(sa.func.min(some.c.finished)).where(some.c.state.in_(_ENDED))
    oldest_us = db.execute(oldest).scalar()
    return None if oldest_us is None else (database.now_us(db) - oldest_us) / 1e6


def _overdue(database: Database, db: sa.Connection) -> int:
    before_us = database.now_us(db) - int(OVERDUE_S * 1e6)
    some = sa.select(WORK.c.id).where(WORK.c.due < before_us).limit(_LOOKED_AT).subquery()
    return int(db.execute(sa.select(sa.func.count()).select_from(some)).scalar_one())
