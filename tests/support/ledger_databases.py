"""Databases that keep taskguard's tables from test to test.

A short test takes less time than it takes to create the tables and to drop them.
"""

from __future__ import annotations

import functools
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from taskguard.ledger.sql import SqlLedger
from taskguard.ledger.tables import (
    ACTIONS,
    COUNTS,
    HAPPENINGS,
    KEYS,
    MESSAGES,
    RUNS,
    SNAPSHOT,
    WORK,
)
from taskguard.lock_table import TableLocks
from taskguard_sandbox.servers import MariaDB, MySQL, Postgres

__all__ = ["LedgerDatabase", "LedgerDatabases"]

_TABLES = (KEYS, WORK, MESSAGES, RUNS, HAPPENINGS, ACTIONS, COUNTS, SNAPSHOT)
_FILLED = (*(table.name for table in _TABLES), "taskguard_locks", "effects")


class LedgerDatabase:
    """A database with taskguard's tables and a table `effects (item, fence)`, all empty.

    Attributes:
        url: its URL.
        engine: an Engine for a test.
        outside: a connection in no transaction, which sees what is committed.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        # A connection in addition to this one is closed when the test returns it.
        self.engine = sa.create_engine(url, pool_size=1)

    @functools.cached_property
    def outside(self) -> sa.Connection:
        return self.engine.connect().execution_options(isolation_level="AUTOCOMMIT")

    def create_tables(self) -> None:
        with closing(SqlLedger(self.url)) as ledger:
            ledger.create_schema()
        if not self.url.startswith("sqlite"):
            with closing(TableLocks(self.url)) as locks:
                locks.create_table()
        with self.engine.begin() as db:
            # No unique index: the test has to see a double effect.
            db.exec_driver_sql("create table effects (item text, fence bigint)")

    def empty(self) -> None:
        """End the connections that a test has left, and delete all rows."""
        with self.engine.connect() as pooled:
            own = [_number(pooled), _number(self.outside)]
        if self.engine.dialect.name == "postgresql":
            self.outside.execute(_END_OTHERS, {"own": own})
        else:
            for row in self.outside.exec_driver_sql("show processlist").all():
                if row.db == self.engine.url.database and row.Id not in own:
                    with suppress(sa.exc.OperationalError):  # it has left by itself
                        self.outside.exec_driver_sql(f"kill {row.Id}")
        for table in _FILLED:
            self.outside.exec_driver_sql(f"delete from {table}")

    def close(self) -> None:
        self.outside.invalidate()  # instead of a rollback: its server may have ended
        self.engine.dispose()


_END_OTHERS = sa.text(
    "select pg_terminate_backend(pid, 10000) from pg_stat_activity"  # waits for their end
    " where datname = current_database() and pid <> all (:own)"
)


def _number(db: sa.Connection) -> int:
    """Return the server's number of a connection."""
    driver: Any = db.connection.driver_connection
    number: int = driver.info.backend_pid if db.dialect.name == "postgresql" else driver.thread_id()
    return number


class LedgerDatabases:
    """Makes databases with taskguard's tables, and gives the same ones to later tests."""

    def __init__(self) -> None:
        self._free: dict[object, list[LedgerDatabase]] = defaultdict(list)
        self._file: bytes | None = None

    @contextmanager
    def on(self, server: Postgres | MariaDB | MySQL) -> Iterator[LedgerDatabase]:
        """Return a context with a database for one test."""
        free = self._free[server]
        if free:
            database = free.pop()
        else:
            url = server.create_database(f"ledger_{uuid.uuid4().hex[:12]}")
            database = LedgerDatabase(url)
            database.create_tables()
        yield database
        database.empty()
        free.append(database)

    @contextmanager
    def in_file(self, url: str) -> Iterator[LedgerDatabase]:
        """Return a context with a database in this file of SQLite, which does not exist yet."""
        database = LedgerDatabase(url)
        file = Path(str(database.engine.url.database))
        if self._file is None:
            database.create_tables()
            database.engine.dispose()
            self._file = file.read_bytes()
        else:
            file.write_bytes(self._file)
        yield database
        database.close()

    def close(self) -> None:
        for free in self._free.values():
            for database in free:
                database.close()
