"""Findings about a lock table and its database."""

from __future__ import annotations

from taskguard.findings import FindingTemplate, Level

_WHY = "No lock can be taken. With a ledger it decides alone; without one no guarded task runs."

LOCKS_READ_ONLY = FindingTemplate(
    "locks_read_only",
    Level.ERROR,
    what="The database is a standby or read-only.",
    why=_WHY,
    fix="Use the URL of the primary.",
    link="docs/how-to/without-redis.md",
)
LOCKS_TABLE_MISSING = FindingTemplate(
    "locks_table_missing",
    Level.ERROR,
    what="The table taskguard_locks, or one of its functions, does not exist.",
    why=_WHY,
    fix="Run `taskguard locks create`.",
    link="docs/how-to/without-redis.md",
)
LOCKS_PRIVILEGES = FindingTemplate(
    "locks_privileges",
    Level.ERROR,
    what="The user of the locks lacks a privilege on taskguard_locks.",
    why=_WHY,
    fix="GRANT SELECT, INSERT, UPDATE, DELETE ON taskguard_locks to that user.",
    link="docs/how-to/without-redis.md#privileges",
)
LOCKS_UNLOGGED = FindingTemplate(
    "locks_unlogged",
    Level.WARNING,
    what="The table taskguard_locks is UNLOGGED, and there is no ledger.",
    why="A crash of the server empties the table. Two processes can then hold one key.",
    fix="ALTER TABLE taskguard_locks SET LOGGED, or use a ledger.",
    link="docs/how-to/without-redis.md#a-logged-or-an-unlogged-table",
)
