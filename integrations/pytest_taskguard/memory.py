"""Guards without servers: a Redis in memory, and a ledger on a test's database.

Guarantees: every guard of the process uses them during a test, despite its configuration. At the
end, the ledger is empty. To test several processes, use real servers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from pytest_taskguard.crashes import Crashes
from taskguard import SqlLedger
from taskguard.drivers import extras_named
from taskguard.errors import ConfigurationError
from taskguard.events import Event
from taskguard.integration import Clock, Overrides, overridden
from taskguard.ledger.connections.engine import make_engine
from taskguard.ledger.tables import KEYS, METADATA, SCHEMA, WORK
from taskguard.locks.redis import RedisLocks

__all__ = ["Memory"]


class Memory:
    """The lock server and the ledger of a test's guards.

    Attributes:
        engine: the Engine of the ledger's database. Create the tables of your effects there, too.
        redis: the lock server, a fakeredis client.
        events: the events so far, oldest first. See `taskguard.events`.
    """

    engine: sa.Engine
    redis: Any
    events: list[Event]

    def __init__(self, database: Any) -> None:
        with extras_named("A lock server in memory"):
            import fakeredis

        _refuse_in_memory(database)
        self.redis = fakeredis.FakeRedis()
        self._locks = RedisLocks(self.redis)
        self._own = not isinstance(database, sa.Engine)
        if self._own and sa.make_url(database).get_backend_name() == "sqlite":
            self.engine = make_engine(database, lock_timeout_s=0)
            sa.event.listen(self.engine, "connect", _spare_time)
            self._ledger = SqlLedger(self.engine)
        else:
            # With a URL, the ledger uses its own settings. An Engine keeps the settings it has.
            self.engine = sa.create_engine(database) if self._own else database
            self._ledger = SqlLedger(database)
        self.events = []
        try:
            self._ledger.create_schema()
            self._refuse_a_ledger_in_use()
        except BaseException:
            self._close()
            raise

    @contextmanager
    def process(self, crashes: Crashes | None = None, clock: Clock | None = None) -> Iterator[None]:
        """Make guards in the block use these servers, as in a new process.

        Args:
            crashes: gets each call, if given.
            clock: the process's clock, if given.
        """
        locks, ledger = self._locks, self._ledger
        by = Overrides(
            locks if crashes is None else crashes.locks(locks),
            ledger if crashes is None else crashes.ledger(ledger),
            self.events.append,
            renewing=crashes is None,
            clock=clock,
        )
        with overridden(by):
            yield

    def expire_leases(self) -> None:
        """End all leases that are held now."""
        self.redis.flushall()
        with self.engine.begin() as db:
            if db.dialect.name == "postgresql":  # a paused holder may have locked the rows
                db.exec_driver_sql("set local lock_timeout = '1s'")
            for table in (KEYS, WORK):
                held = sa.update(table).where(table.c.lease_until > 0)
                db.execute(held.values(lease_until=1))

    def forget(self) -> None:
        """Empty the ledger and the lock server."""
        self.redis.flushall()
        with self.engine.begin() as db:
            for table in METADATA.sorted_tables:
                if table is not SCHEMA:
                    db.execute(sa.delete(table))
        self.events.clear()

    def close(self) -> None:
        """Empty the ledger and the lock server, and close their connections."""
        self.forget()
        self._close()

    def _close(self) -> None:
        self._locks.close()
        self.redis.close()
        self._ledger.close()  # it has pools of its own, even with a given Engine
        if self._own:
            self.engine.dispose()

    def _refuse_a_ledger_in_use(self) -> None:
        with self.engine.connect() as db:
            found = db.execute(sa.select(WORK.c.id).limit(1)).scalar()
        if found is not None:
            raise ConfigurationError(
                f"The ledger in {self.engine.url.database!r} is in use: it has a record of "
                f"{found!r}, and tests would empty it. Use a database that only the tests use, one "
                "for each pytest-xdist worker. If a killed test run left the record, empty the "
                "table taskguard_work."
            )


def _refuse_in_memory(database: Any) -> None:
    url = database.url if isinstance(database, sa.Engine) else sa.make_url(database)
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise ConfigurationError(
            "The ledger cannot be a SQLite database in memory: it belongs to one connection, and "
            "is lost with that, for example when a task is killed. Use a file in tmp_path."
        )


def _spare_time(connection: Any, _record: Any) -> None:
    """Make SQLite neither flush to disk nor wait long for a paused writer."""
    connection.execute("PRAGMA synchronous=OFF")
    connection.execute("PRAGMA busy_timeout=1000")
