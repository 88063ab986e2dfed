"""Read the facts of a database, each in one short transaction."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from taskguard.ledger.connections.database import Database
from taskguard.ledger.health import mysql, postgresql, sqlite
from taskguard.ledger.health.facts import MOST_COUNTED, ServerFacts, TableFacts
from taskguard.ledger.tables import METADATA, WORK
from taskguard.model.states import State

__all__ = ["read_other_schemas", "read_server", "read_tables"]

OVERDUE_S = 900.0
_ENDED = (State.DONE.value, State.FAILED.value)
_KINDS: dict[str, Any] = {
    "postgresql": postgresql,
    "mysql": mysql,
    "mariadb": mysql,
    "sqlite": sqlite,
}


def read_server(database: Database) -> ServerFacts:
    """Read the server's settings."""
    kind = _KINDS[database.engine.dialect.name]
    with database.transaction() as db:
        facts: ServerFacts = kind.server(db, own=database.dialect.own)
    return facts


def read_tables(database: Database) -> TableFacts:
    """Read the state of the tables, which must exist."""
    kind = _KINDS[database.engine.dialect.name]
    with database.transaction() as db:
        keyed, indexes = kind.indexes(db, list(METADATA.tables))
        wanted = {str(index.name) for table in METADATA.tables.values() for index in table.indexes}
        return TableFacts(
            without_key=tuple(name for name in METADATA.tables if name not in keyed),
            without_index=tuple(sorted(wanted - indexes)),
            oldest_ended_s=_oldest_ended_s(database, db),
            overdue=_overdue(database, db),
        )


def read_other_schemas(database: Database) -> tuple[str, ...]:
    """Return the schemas that have a ledger's tables and are not on this ledger's search path."""
    if _KINDS[database.engine.dialect.name] is not postgresql:
        return ()
    with database.transaction() as db:
        return postgresql.other_schemas(db, WORK.name)


def _oldest_ended_s(database: Database, db: sa.Connection) -> float | None:
    # No index has `finished`, so this reads the first rows that the database finds.
    some = sa.select(WORK.c.state, WORK.c.finished).limit(MOST_COUNTED).subquery()
    oldest = sa.select(sa.func.min(some.c.finished)).where(some.c.state.in_(_ENDED))
    oldest_us = db.execute(oldest).scalar()
    return None if oldest_us is None else (database.now_us(db) - oldest_us) / 1e6


def _overdue(database: Database, db: sa.Connection) -> int:
    before_us = database.now_us(db) - int(OVERDUE_S * 1e6)
    some = sa.select(WORK.c.id).where(WORK.c.due < before_us).limit(MOST_COUNTED).subquery()
    return int(db.execute(sa.select(sa.func.count()).select_from(some)).scalar_one())
