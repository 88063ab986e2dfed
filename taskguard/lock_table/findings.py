"""What is wrong with the database of a lock table, and with the way to it."""

from __future__ import annotations

from taskguard.findings import Finding
from taskguard.ledger.connections.database import Database

__all__ = ["findings"]


def findings(database: Database) -> list[Finding]:
    """All of it."""
    return []
