"""Differences between databases: clock, row locks, error codes, and side effects of drivers.

Each kind of database has one class; `Dialect` is the interface. They know the ledger's tables, but
not how a claim is decided. Only the class of the database in use is imported, because each dialect
of SQLAlchemy takes 10 ms.
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
    """Return the dialect of this engine's database. `own`: it was created from a URL."""
    module, name = _HOMES.get(engine.dialect.name, ("sqlite", "SQLite"))
    kind: type[Dialect] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    dialect = kind(own=own)
    dialect.watch(engine)
    return dialect
