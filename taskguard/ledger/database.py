"""One database: connections, its clock, and its errors in taskguard's words.

Guarantees: a driver's error comes out as LedgerUnavailableError, TransactionRetryError or
LedgerSchemaError, with the driver's as its cause; no message holds a password. Knows nothing of
claims.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import sqlalchemy as sa

from taskguard.errors import LedgerSchemaError, LedgerUnavailableError, TransactionRetryError
from taskguard.ledger.engine import begins_itself, make_engine

__all__ = ["CannotWriteError", "Database", "LockTimeoutError", "driver_of", "milliseconds"]

_T = TypeVar("_T")

# SQLSTATEs: https://www.postgresql.org/docs/current/errcodes-appendix.html
_READ_ONLY = "25006"  # a standby, after a failover
_RETRYABLE = ("40001", "40P01")
_LOCKED = "55P03"
_NO_ROOM = ("53100", "database or disk is full")
_NO_TABLE = ("42P01", "no such table")


class LockTimeoutError(LedgerUnavailableError):
    """Another transaction holds the row."""


class CannotWriteError(LedgerUnavailableError):
    """The database is there, but its disk is full or it is read-only."""


class Database:
    """An engine, made from a URL or the user's own.

    Attributes:
        postgresql: the dialect is PostgreSQL.
        one_statement: statements written for psycopg can be handed to it as they are.
        begins_itself: connections commit each statement, and `begin()` opens transactions by a
            statement of its own, which saves the round trip that setting something in them would
            cost. Not on an Engine of the user's own, which stays as it is.
    """

    def __init__(self, database: Any, *, lock_timeout_s: float) -> None:
        self.engine = make_engine(database, lock_timeout_s=lock_timeout_s)
        self.lock_timeout_s = lock_timeout_s
        self.postgresql = self.engine.dialect.name == "postgresql"
        self.one_statement = self.postgresql and self.engine.dialect.driver == "psycopg"
        own = not isinstance(database, sa.Engine)
        self.begins_itself = own and begins_itself(self.engine.url)
        self._spare: sa.pool.Pool | None = None
        self._spare_pid = 0
        # The same pool. For several statements of our own, which SQLAlchemy is to keep together.
        self._transactional = (
            self.engine.execution_options(isolation_level="READ COMMITTED")
            if self.begins_itself
            else self.engine
        )

    @property
    def place(self) -> str:
        """Where it is, without user and password."""
        url = self.engine.url
        return f"{url.drivername} {url.host or ''}/{url.database or ''}"

    def spare_pool(self) -> sa.pool.Pool:
        """A pool like the engine's, for renewals alone.

        They must not wait until a body, whose lease they keep, gives its connection back.
        """
        if self._spare is None or self._spare_pid != os.getpid():
            self._spare = self.engine.pool.recreate()
            self._spare_pid = os.getpid()
        return self._spare

    def close(self) -> None:
        """Close idle connections."""
        self.engine.dispose()
        if self._spare is not None:
            self._spare.dispose()

    def connect(self) -> sa.Connection:
        """A connection; the caller closes it."""
        with self.translated():
            return self.engine.connect()

    @contextmanager
    def transaction(self, *, lock_timeout_s: float | None = None) -> Iterator[sa.Connection]:
        """A transaction that waits for row locks no longer than `lock_timeout_s`."""
        with self.translated(), self._transactional.begin() as db:
            if self.postgresql and lock_timeout_s is not None:
                db.exec_driver_sql(
                    f"select set_config('lock_timeout', '{milliseconds(lock_timeout_s)}', true)"
                )
            yield db

    def begin(self, statement: str) -> sa.Connection:
        """A connection in a transaction that `statement`, which says BEGIN, has opened.

        psycopg's own COMMIT and ROLLBACK end it: they go by the state of the session.
        """
        db = self.connect()
        try:
            db.begin()
            with _DriverCall(self, db, driver_of(db)) as connection:
                connection.execute(statement)
        except BaseException:
            db.close()
            raise
        return db

    def ask_in(self, db: sa.Connection, statement: str, values: dict[str, Any]) -> list[Any]:
        """The rows of one statement within the transaction of `db`."""
        with _DriverCall(self, db, driver_of(db)) as connection:
            return list(connection.execute(statement, values).fetchall())

    def ask(
        self, statement: str, values: dict[str, Any], *, pool: sa.pool.Pool | None = None
    ) -> list[Any]:
        """The rows of one statement that commits by itself: one round trip.

        On SQLAlchemy's pool, but by the driver's cursor: for so short a statement the way
        through SQLAlchemy's results costs as much again (250 µs instead of 130).
        """
        pooled = self._pooled(pool)
        try:
            with _DriverCall(self, pooled, pooled.dbapi_connection) as connection:
                if self.begins_itself:
                    return list(connection.execute(statement, values).fetchall())
                before, connection.autocommit = connection.autocommit, True
                try:
                    return list(connection.execute(statement, values).fetchall())
                finally:
                    if not connection.closed:
                        connection.autocommit = before
        finally:
            pooled.close()

    def _pooled(self, pool: sa.pool.Pool | None) -> sa.PoolProxiedConnection:
        with self.translated():
            return self.engine.raw_connection() if pool is None else pool.connect()

    def twice(self, ask: Callable[[], _T]) -> _T:
        """After a restart of the server the pool holds dead connections: once more, then no."""
        try:
            return ask()
        except LockTimeoutError:
            raise
        except LedgerUnavailableError:
            return ask()

    def now(self) -> Any:
        """The database's clock in µs, as an expression."""
        if self.postgresql:
            return sa.cast(
                sa.extract("epoch", sa.func.clock_timestamp()) * 1_000_000, sa.BigInteger
            )
        return sa.literal(time.time_ns() // 1000, sa.BigInteger)

    def now_us(self, db: sa.Connection) -> int:
        """The database's clock in µs."""
        if self.postgresql:
            return int(db.execute(sa.select(self.now())).scalar_one())
        return time.time_ns() // 1000

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Raise what drivers raise in taskguard's words."""
        try:
            yield
        except (sa.exc.DBAPIError, self.engine.dialect.loaded_dbapi.Error) as error:
            mapped = self.map(error)
            if mapped is None:
                raise
            raise mapped from error
        except sa.exc.TimeoutError as error:
            raise LedgerUnavailableError(f"No connection to {self.place}: {error}") from error

    def map(self, error: BaseException) -> Exception | None:
        """A driver's error, or SQLAlchemy's for it, in taskguard's words; None: not ours to say."""
        driver = self.engine.dialect.loaded_dbapi
        origin: Any = error.orig if isinstance(error, sa.exc.DBAPIError) else error
        if not isinstance(origin, driver.Error):
            return None
        code = getattr(origin, "sqlstate", None) or getattr(origin, "pgcode", None)
        text = str(origin)
        if code in _RETRYABLE:
            return TransactionRetryError(f"The database asked to run it again: {text}")
        if code == _LOCKED or "database is locked" in text:
            return LockTimeoutError("Another transaction holds the row.")
        if code == _NO_TABLE[0] or _NO_TABLE[1] in text:
            return LedgerSchemaError(
                f"The ledger's tables do not exist in {self.place}. Run `taskguard ledger create`."
            )
        return self._unavailable(error, origin, code)

    def _unavailable(
        self, error: BaseException, origin: Any, code: str | None
    ) -> LedgerUnavailableError | None:
        driver = self.engine.dialect.loaded_dbapi
        kind, operational = type(origin).__name__, isinstance(origin, driver.OperationalError)
        if code in (_READ_ONLY, _NO_ROOM[0]) or (operational and _NO_ROOM[1] in str(origin)):
            return CannotWriteError(f"The database {self.place} cannot write ({kind}).")
        broken = getattr(error, "connection_invalidated", False)
        if operational or isinstance(origin, driver.InterfaceError) or broken:
            return LedgerUnavailableError(f"The database {self.place} gave no answer ({kind}).")
        return None


class _DriverCall:
    """Around a call of the driver itself: what SQLAlchemy does with the connection on an error."""

    def __init__(
        self, database: Database, pooled: sa.Connection | sa.PoolProxiedConnection, driver: Any
    ) -> None:
        self._database = database
        self._pooled = pooled
        self._driver = driver

    def __enter__(self) -> Any:
        return self._driver

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            return
        engine = self._database.engine
        if not isinstance(error, engine.dialect.loaded_dbapi.Error):
            self._pooled.invalidate(error)  # interrupted halfway: its state is not known
            return
        if engine.dialect.is_disconnect(error, self._driver, None):
            self._pooled.invalidate(error)
            engine.dispose()  # the idle ones are no better
        mapped = self._database.map(error)
        if mapped is not None:
            raise mapped from error


def driver_of(db: sa.Connection) -> Any:
    """The driver's own connection beneath."""
    return db.connection.dbapi_connection


def milliseconds(seconds: float) -> int:
    """For settings that want whole milliseconds, where 0 would mean no limit."""
    return max(1, round(seconds * 1000))
