"""What databases differ in: clock, row locks, error codes, what a driver does behind one's back.

One class each; `Dialect` says what is asked of them. They know the ledger's tables and nothing of
how a claim is decided.
"""

from __future__ import annotations

import sqlalchemy as sa

from taskguard.ledger.connections.dialects.base import Dialect, Fault
from taskguard.ledger.connections.dialects.mysql import MySQL
from taskguard.ledger.connections.dialects.postgresql import PostgreSQL
from taskguard.ledger.connections.dialects.sqlite import SQLite

__all__ = ["Dialect", "Fault", "dialect_of"]

_DIALECTS: dict[str, type[Dialect]] = {"postgresql": PostgreSQL, "mysql": MySQL, "mariadb": MySQL}


def dialect_of(engine: sa.Engine, *, own: bool) -> Dialect:
    """The differences of this engine's database; `own`: the engine was made from a URL."""
    dialect = _DIALECTS.get(engine.dialect.name, SQLite)(own=own)
    dialect.watch(engine)
    return dialect
