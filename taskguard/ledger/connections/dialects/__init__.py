"""What databases differ in: clock, row locks, error codes, what a driver does behind one's back.

One class each; `Dialect` says what is asked of them. They know the ledger's tables and nothing of
how a claim is decided. The class of a database that is not used is not loaded: SQLAlchemy's dialect
of each takes 10 ms.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from taskguard.ledger.connections.dialects.base import Dialect, Fault

if TYPE_CHECKING:
    import sqlalchemy as sa

__all__ = ["Dialect", "Fault", "dialect_of"]

_HOMES = {
    "postgresql": ("postgresql", "PostgreSQL"),
    "mysql": ("mysql", "MySQL"),
    "mariadb": ("mysql", "MySQL"),
}


def dialect_of(engine: sa.Engine, *, own: bool) -> Dialect:
    """The differences of this engine's database; `own`: the engine was made from a URL."""
    module, name = _HOMES.get(engine.dialect.name, ("sqlite", "SQLite"))
    kind: type[Dialect] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    dialect = kind(own=own)
    dialect.watch(engine)
    return dialect
