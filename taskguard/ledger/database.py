"""One database: connections, its clock, and its errors in taskguard's words.

Guarantees: a driver's error comes out as LedgerUnavailableError, TransactionRetryError or
LedgerSchemaError, with the driver's as its cause; no message holds a password. Knows nothing of
claims.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import sqlalchemy as sa

from taskguard.errors import LedgerSchemaError, LedgerUnavailableError, TransactionRetryError
from taskguard.ledger.dialects import Fault, dialect_of
from taskguard.ledger.engine import LEVEL, READ_COMMITTED, begins_itself, make_engine
from taskguard.ledger.numbered import numbered
from taskguard.ledger.prepared import Prepared

__all__ = ["CannotWriteError", "Database", "HotPath", "LockTimeoutError", "driver_of"]

_T = TypeVar("_T")

_ASK_LEVEL = "select current_setting('default_transaction_isolation')"
_BEGIN = f"begin isolation level {READ_COMMITTED}"


# libpq explains itself at length.
_MOST_SAID = 300


class LockTimeoutError(LedgerUnavailableError):
    """Another transaction holds the row."""


class CannotWriteError(LedgerUnavailableError):
    """The database is there, but its disk is full or it is read-only."""


class HotPath(enum.Enum):
    """By whose statements a change of a claim takes one message to the server."""

    POSTGRESQL = enum.auto()  # and psycopg
    MARIADB = enum.auto()  # and PyMySQL


class Database:
    """An engine, made from a URL or the user's own.

    Args:
        one_statement: False: no hot path, whatever it is.
        pooled: False: connections are closed after each use, unless the engine is the user's own.

    Attributes:
        dialect: what is peculiar to this kind of database.
        by_psycopg: statements written for psycopg can be handed to it as they are.
        begins_itself: connections commit each statement, and `begin()` opens transactions by a
            statement of its own, which saves the round trip that setting something in them would
            cost. Not on an Engine of the user's own, which stays as it is.
    """

    def __init__(
        self,
        database: Any,
        *,
        lock_timeout_s: float,
        one_statement: bool = True,
        pooled: bool = True,
    ) -> None:
        self.engine = make_engine(database, lock_timeout_s=lock_timeout_s, pooled=pooled)
        self.lock_timeout_s = lock_timeout_s
        own = not isinstance(database, sa.Engine)
        self.dialect = dialect_of(self.engine, own=own)
        self._one_statement = one_statement
        self.by_psycopg = (
            self.engine.dialect.name == "postgresql" and self.engine.dialect.driver == "psycopg"
        )
        self.begins_itself = own and begins_itself(self.engine.url)
        self._made: dict[Any, Any] = {}
        self._spare: sa.pool.Pool | None = None
        self._spare_pid = 0
        self._spare_engine: sa.Engine | None = None
        # The same pool. For several statements of our own, which SQLAlchemy is to keep together,
        # and which have to see the newest rows whatever the Engine's or the role's default is.
        self._transactional = (
            self.engine.execution_options(isolation_level="READ COMMITTED")
            if self.engine.dialect.name == "postgresql"
            else self.engine
        )

    @property
    def place(self) -> str:
        """Where it is, without user and password."""
        url = self.engine.url
        host = url.host or _first(url.query.get("host"))
        port = url.port or _first(url.query.get("port"))
        return f"{url.drivername} {host}{f':{port}' if port else ''}/{url.database or ''}"

    @property
    def hot_path(self) -> HotPath | None:
        """None: only in steps. Known of MariaDB, where the URL says MySQL, once it is connected."""
        if not self._one_statement:
            return None
        if self.by_psycopg:
            return HotPath.POSTGRESQL
        dialect: Any = self.engine.dialect
        is_mariadb = dialect.driver == "pymysql" and dialect.is_mariadb
        return HotPath.MARIADB if is_mariadb and self.dialect.own else None

    def spare_pool(self) -> sa.pool.Pool:
        """A pool like the engine's, for renewals, and for claims where those are apart.

        They must not wait until a body, whose lease they keep, gives its connection back.
        """
        if self._spare is None or self._spare_pid != os.getpid():
            self._spare = self.engine.pool.recreate()
            self._spare_pid = os.getpid()
            self._spare_engine = None
        return self._spare

    def _engine_on_spare_pool(self) -> sa.Engine:
        pool, engine = self.spare_pool(), self._spare_engine
        if engine is None or engine.pool is not pool:
            engine = self._spare_engine = sa.Engine(pool, self.engine.dialect, self.engine.url)
            self.dialect.watch(engine)
        return engine

    def forget_idle(self) -> None:
        """Throw idle connections away, the spare pool's as well."""
        self.engine.dispose()
        spare = self._spare
        if spare is not None and self._spare_pid == os.getpid():
            self._spare = self.engine.pool.recreate()
            spare.dispose()

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
    def transaction(
        self, *, lock_timeout_s: float | None = None, spare: bool = False
    ) -> Iterator[sa.Connection]:
        """A transaction that waits for row locks no longer than `lock_timeout_s`.

        `spare`: on a connection that no body can have.
        """
        engine = self._transactional
        spare = spare and not self.begins_itself and not self.dialect.one_writer
        if spare:
            engine = self._engine_on_spare_pool()
        with self.translated(), engine.begin() as db:
            if lock_timeout_s is None:
                yield db
                return
            apart = spare and self.dialect.claims_apart
            with self.dialect.waiting(db, lock_timeout_s, apart=apart):
                yield db

    def begin(self, settings: dict[str, Any]) -> sa.Connection:
        """A connection in a transaction with these settings, where statements commit by themselves.

        In one message, each time: a body may have changed those of its session. psycopg's own
        COMMIT and ROLLBACK end the transaction: they go by the state of the session.
        """
        local = (f"set local {name} = '{value}'" for name, value in settings.items())
        db = self.connect()
        try:
            db.begin()
            with _DriverCall(self, db, driver_of(db)) as connection:
                connection.execute("; ".join([_BEGIN, *local]))
        except BaseException:
            db.close()
            raise
        return db

    def read(self, db: sa.Connection, prepared: Prepared, values: dict[str, Any]) -> list[Any]:
        """The rows of a prepared SELECT within the transaction of `db`."""
        with _DriverCall(self, db, driver_of(db)) as connection:
            found = _fetch(connection, prepared.text, prepared.parameters(values))
            return [prepared.row._make(row) for row in found]

    def ask_in(self, db: sa.Connection, statement: str, values: dict[str, Any]) -> list[Any]:
        """The rows of one statement within the transaction of `db`."""
        with _DriverCall(self, db, driver_of(db)) as connection:
            if not self.by_psycopg:
                return _fetch(connection, statement, values)
            return self._rows(connection, statement, values)

    def ask_apart(self, statement: str, values: dict[str, Any]) -> list[Any]:
        """The rows of one statement that ends its own transaction, where `claims_apart`."""
        limit_s = self.lock_timeout_s
        with (
            self.translated(),
            self._engine_on_spare_pool().connect() as db,
            self.dialect.waiting(db, limit_s, apart=True),
        ):
            return self.ask_in(db, statement, values)

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
                    return self._alone(pooled, connection, statement, values)
                before, connection.autocommit = connection.autocommit, True
                try:
                    return self._alone(pooled, connection, statement, values)
                finally:
                    if not connection.closed:
                        connection.autocommit = before
        finally:
            pooled.close()

    def _alone(
        self, pooled: sa.PoolProxiedConnection, connection: Any, statement: str, values: Any
    ) -> list[Any]:
        """The rows of a statement that sees the newest rows, whatever the role's default is."""
        if LEVEL not in pooled.info:  # an Engine of the user's: asked once for each connection
            [[pooled.info[LEVEL]]] = self._rows(connection, _ASK_LEVEL, {})
        if pooled.info[LEVEL] == READ_COMMITTED:
            return self._rows(connection, statement, values)
        connection.execute(_BEGIN)
        try:
            rows = self._rows(connection, statement, values)
        except BaseException:
            if not connection.closed:
                connection.rollback()
            raise
        connection.commit()
        return rows

    def _rows(self, connection: Any, statement: str, values: dict[str, Any]) -> list[Any]:
        """By psycopg."""
        psycopg: Any = self.engine.dialect.loaded_dbapi
        if connection.cursor_factory is not psycopg.Cursor:
            # The user's own choice: one that binds values itself prepares nothing, for a pooler.
            return list(connection.execute(statement, values).fetchall())
        cursor = psycopg.RawCursor(connection, row_factory=psycopg.rows.tuple_row)
        text, names = numbered(statement)
        return list(cursor.execute(text, [values[name] for name in names]).fetchall())

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

    def elsewhere(self, engine: sa.Engine) -> Database:
        """The same by way of another Engine; what was made `once` is made for both."""
        database = Database(
            engine, lock_timeout_s=self.lock_timeout_s, one_statement=self._one_statement
        )
        database._made = self._made
        return database

    def once(self, make: Callable[..., _T], *args: Any) -> _T:
        """`make(self, *args)`, made once for a kind of driver: for prepared statements."""
        kind = self.engine.dialect.name, self.engine.dialect.driver
        made: _T | None = self._made.get((kind, make, args))
        if made is None:
            made = self._made[kind, make, args] = make(self, *args)
        return made

    def now(self) -> Any:
        """The database's clock in µs, as an expression."""
        return self.dialect.now()

    def now_us(self, db: sa.Connection) -> int:
        """The database's clock in µs."""
        return self.dialect.now_us(db)

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
        fault = self.dialect.fault(origin, driver)
        if fault is None and getattr(error, "connection_invalidated", False):
            fault = Fault.AWAY
        return None if fault is None else self._in_words(fault, origin)

    def _in_words(self, fault: Fault, origin: Any) -> Exception:
        kind = type(origin).__name__
        if fault is Fault.RETRY:
            return TransactionRetryError(f"The database asked to run it again: {origin}")
        if fault is Fault.LOCKED:
            return LockTimeoutError("Another transaction holds the row.")
        if fault is Fault.NO_TABLE:
            return LedgerSchemaError(
                f"The ledger's tables do not exist in {self.place}.",
                remedy="Run `taskguard ledger create`.",
            )
        if fault is Fault.REFUSED:
            said = str(origin.args[-1] if origin.args else origin).partition("\n")[0]
            return LedgerSchemaError(
                f"The database {self.place} refused a statement of the ledger: {said}. Its user "
                "needs SELECT, INSERT and UPDATE on taskguard_keys, taskguard_works and "
                "taskguard_messages, and SELECT on taskguard_schema; if a column is missing, the "
                "tables are not those of this version. Nothing runs until then."
            )
        if fault is Fault.CANNOT_WRITE:
            return CannotWriteError(f"The database {self.place} cannot write ({kind}).")
        return LedgerUnavailableError(
            f"The database {self.place} is not available ({kind}: {self._said(origin)})."
        )

    def _said(self, origin: Any) -> str:
        """A driver's error in one line: its cause, and never the password."""
        parts = [str(part) for part in getattr(origin, "args", ())] or [str(origin)]
        said = " ".join(" ".join(parts).split()).rstrip(".")
        password = str(self.engine.url.password or "")
        if password and password in said:
            return "the driver's words have the password in them"
        return said if len(said) <= _MOST_SAID else f"{said[:_MOST_SAID]}…"


def _first(option: Any) -> str:
    """Of an option in a URL's query, which may be there several times."""
    return str(option[0] if isinstance(option, tuple) else option or "")


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
            self._database.forget_idle()  # they are no better
        mapped = self._database.map(error)
        if mapped is not None:
            raise mapped from error


def _fetch(connection: Any, statement: str, values: Any) -> list[Any]:
    """All rows. What a driver has not read by then is read when the cursor closes."""
    cursor = connection.cursor()
    cursor.execute(statement, values)
    rows = list(cursor.fetchall())
    cursor.close()
    return rows


def driver_of(db: sa.Connection) -> Any:
    """The driver's own connection beneath."""
    return db.connection.dbapi_connection
