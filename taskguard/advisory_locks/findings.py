"""What is wrong with a session that is to hold locks, and with its server.

Guarantees: what makes its locks exclude nobody, as far as the server and the connection say so.
"""

from __future__ import annotations

from collections.abc import Iterator

from taskguard.advisory_locks.session import Session
from taskguard.findings import Finding, Level
from taskguard.lock_table.findings import is_in_galera

__all__ = ["findings"]


def findings(session: Session) -> Iterator[Finding]:
    """All of it."""
    where = f"the locks in {session.database.place}"
    if not session.opened.own:
        yield Finding(
            "advisory_pooled",
            Level.ERROR,
            where,
            what="A pooler, as PgBouncer, is before the database.",
            why="Locks would be whoever's gets the session next, so none is granted.",
            mend="Give a URL past the pooler, or keep the locks in a table: "
            "`taskguard locks create`.",
        )
    if session.opened.replica:
        yield Finding(
            "advisory_replica",
            Level.ERROR,
            where,
            what="It is a standby, or read-only, as a replica is.",
            why="Its primary knows nothing of its locks, so none is granted.",
            mend="Give the URL of the primary.",
        )
    if session.database.engine.dialect.name != "postgresql" and _is_in_galera(session):
        yield Finding(
            "advisory_galera",
            Level.ERROR,
            where,
            what="It is a node of a Galera cluster.",
            why="GET_LOCK is one node's: another node grants the same key.",
            mend="Send the locks of all workers to one node, or keep them in a table: "
            "`taskguard locks create`.",
        )


def _is_in_galera(session: Session) -> bool:
    with session.database.transaction() as db:
        return is_in_galera(db)
