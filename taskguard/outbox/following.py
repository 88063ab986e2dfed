"""Let a relay that does not lead wait until it may lead.

If the lock server is not a database, such a follower tries to take the leader's lease every few
seconds. It sends no query to the database.

Otherwise each try is a transaction, so followers try as rarely as they can. On PostgreSQL the
leader sends a NOTIFY with each of its rounds. A follower tries only if it has received none for the
length of a lease. On other databases, and behind a session pooler, a follower pauses between tries.
The pause grows with the number of sessions that its user has in the database.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import sqlalchemy as sa

from taskguard.errors import TaskguardError
from taskguard.ledger.connections.database import Database
from taskguard.lock_table.listener import Listener
from taskguard.lock_table.postgresql import CHANNEL
from taskguard.locks.base import LockProvider

__all__ = ["Following"]

_PAUSE_S = 2.0
_SLICE_S = 1.0  # how often a waiting relay checks whether it must stop
_LONGEST_PAUSE_S = 30.0
_PAUSE_FOR_SESSION_S = 1.0
_COUNT_EVERY_S = 60.0
_SESSIONS = {
    "postgresql": "select count(*) from pg_stat_activity where usename = current_user",
    "mysql": "select count(*) from information_schema.processlist "
    "where user = substring_index(current_user(), '@', 1)",
}
_SESSIONS["mariadb"] = _SESSIONS["mysql"]


class Following:
    """The wait of one relay.

    Args:
        locks: the lock server, if there is one.
        ledger: the ledger.
        name: the leader's name, with its namespace.
        lease_s: length of its lease.
    """

    def __init__(
        self, locks: LockProvider | None, ledger: Any, name: str, *, lease_s: float
    ) -> None:
        self._database: Database | None = getattr(ledger, "database", None)
        if locks is not None and not locks.traits.in_database:
            self._database = None  # the lease is not in the database
        self._lease_s = lease_s
        # Names of keys do not start with a blank.
        self._here, self._gone = f" here {name}", f" gone {name}"
        self._listener: Listener | None = None
        if self._database is not None and self._database.engine.dialect.driver == "psycopg":
            self._listener = Listener(self._database)
        self._sessions = 1
        self._count_at_s = 0.0
        self._is_new = True

    @property
    def announcement(self) -> str | None:
        """The leader's announcement with each look at the lines; None without a listener."""
        return None if self._listener is None else self._here

    def wait(self, stopping: threading.Event) -> None:
        """Block until it is time to try for the leader's lease, or until `stopping` is set."""
        if self._listener is None or not self._hear(self._listener, stopping):
            self._pause(stopping)

    def leave(self) -> None:
        """Tell the other relays that this one no longer leads. Never raises."""
        if self._listener is None or self._database is None:
            return
        try:
            self._database.ask(
                f"select pg_notify('{CHANNEL}', %(name)s::text)", {"name": self._gone}
            )
        except TaskguardError:
            return  # they try when the lease has ended

    def close(self) -> None:
        """Close the connection that listens."""
        if self._listener is not None:
            self._listener.close()

    def _hear(self, listener: Listener, stopping: threading.Event) -> bool:
        """Wait while a leader announces itself. Return False if the listener hears nothing."""
        until_s = time.monotonic() + self._lease_s
        while not stopping.is_set() and time.monotonic() < until_s:
            with listener.waiting(self._here, self._gone) as waiter:
                if not waiter.hears:
                    return False
                if not waiter.wait(min(_SLICE_S, until_s - time.monotonic())):
                    continue
                if waiter.woken_by == self._gone:
                    return True
                until_s = time.monotonic() + self._lease_s
        return True

    def _pause(self, stopping: threading.Event) -> None:
        database, pause_s = self._database, _PAUSE_S
        if database is not None:
            # On PostgreSQL it hears after the first pause, unless there is a pooler.
            first, self._is_new = self._is_new and self._listener is not None, False
            if not first and time.monotonic() >= self._count_at_s:
                self._sessions = self._count(database)
                self._count_at_s = time.monotonic() + _COUNT_EVERY_S
            pause_s = min(_LONGEST_PAUSE_S, max(_PAUSE_S, self._sessions * _PAUSE_FOR_SESSION_S))
        stopping.wait(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - no secret

    def _count(self, database: Database) -> int:
        """How many sessions this user has; 1 on SQLite."""
        select = _SESSIONS.get(database.engine.dialect.name)
        if select is None:
            return 1
        try:
            with database.transaction(bounded=False) as db:
                return int(db.execute(sa.text(select)).scalar_one())
        except TaskguardError:
            return self._sessions
