"""One database: connections, its clock, and its errors in taskguard's words.

Guarantees: a driver's error comes out as LedgerUnavailableError, TransactionRetryError or
LedgerSchemaError, with the driver's as its cause; no message holds a password. Knows nothing of
claims.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import sqlalchemy as sa

from taskguard.errors import (
    LedgerSchemaError,
    LedgerUnavailableError,
    TaskguardError,
    TransactionRetryError,
)
from taskguard.ledger.connections.deadlines import Deadline
from taskguard.ledger.connections.dialects import Fault, dialect_of
from taskguard.ledger.connections.engine import (
    CONNECT_TIMEOUT_S,
    LEVEL,
    READ_COMMITTED,
    begins_itself,
    failover_s,
    make_engine,
)
from taskguard.ledger.connections.errors import (
    CannotWriteError,
    LockTimeoutError,
    NoConnectionError,
)
from taskguard.ledger.connections.executed import Executed
from taskguard.ledger.connections.libpq import FORGOTTEN, Commit, Libpq, numbered
from taskguard.ledger.connections.pools import Lifo, Pools, on_other_pool
from taskguard.ledger.connections.prepared import Prepared
from taskguard.ledger.connections.sessions import noting, refuse_autocommit

if TYPE_CHECKING:
    from typing import Self

__all__ = ["WRITE_LOCK_S", "Database", "Lone", "driver_of"]

WRITE_LOCK_S = 5.0
"""For how many seconds a change that is no claim waits for a row lock."""

_T = TypeVar("_T")

_ASK_LEVEL = "select current_setting('default_transaction_isolation')"
_BEGIN = f"begin isolation level {READ_COMMITTED}"


# For answers to the ledger's own statements, beside what they may wait for row locks: two of them.
_LONGEST_ANSWER_S, _LOCKS = 5.0, 2
_DEADLINE = "taskguard_deadline"  # a key of the `info` that SQLAlchemy keeps with a connection

# libpq's messages have many lines.
_MOST_SAID = 300


class Lone(Protocol):
    """Who has a connection that is in no pool."""

    connection: Any

    def invalidate(self, error: BaseException | None) -> None:
        """The connection is of no use any more."""


class Database:
    """An engine, made from a URL or the user's own.

    Args:
        pooled: False: connections are closed after each use, unless the engine is the user's own.
        pools: the pools of the same database by another Engine; None: pools of its own.
        connect_timeout_s: how long one connection may take, but on an Engine of the user's own.

    Attributes:
        dialect: what is peculiar to this kind of database.
        pools: who may have how many of its connections.
        begins_itself: connections commit each statement, and `begin()` opens transactions by a
            statement that also sets what they need, which saves a round trip. Not on an Engine of
            the user's own, which stays as it is.
    """

    def __init__(
        self,
        database: Any,
        *,
        lock_timeout_s: float,
        pooled: bool = True,
        pools: Pools | None = None,
        connect_timeout_s: int = CONNECT_TIMEOUT_S,
    ) -> None:
        self.engine = make_engine(
            database,
            lock_timeout_s=lock_timeout_s,
            pooled=pooled,
            connect_timeout_s=connect_timeout_s,
        )
        self.lock_timeout_s = lock_timeout_s
        own = not isinstance(database, sa.Engine)
        self.dialect = dialect_of(self.engine, own=own)
        self.begins_itself = own and begins_itself(self.engine.url)
        self._made: dict[Any, Any] = {}
        self._unicode: bool | None = None
        self.pools = pools or Pools(
            self.engine,
            own=own,
            apart=self.dialect.claims_apart,
            one=self.dialect.one_writer,
        )

    @functools.cached_property
    def place(self) -> str:
        """Where it is, without user and password."""
        url = self.engine.url
        host = url.host or _first(url.query.get("host") or url.query.get("unix_socket"))
        port = url.port or _first(url.query.get("port"))
        if not host:  # a file, or a server that the driver finds by itself
            return f"{url.drivername} {url.database or ':memory:'}"
        return f"{url.drivername} {host}{f':{port}' if port else ''}/{url.database or ''}"

    @functools.cached_property
    def failover_s(self) -> float:
        """Seconds that a new connection takes if all hosts of the URL but the last are silent.

        0.0 for one host, and for an Engine of the user's own, whose time-outs are unknown.
        """
        return failover_s(self.engine.url) if self.dialect.own else 0.0

    def is_mariadb(self) -> bool:
        """Whether the server is a MariaDB; where the URL says MySQL, the server is asked."""
        dialect: Any = self.engine.dialect
        if dialect.name == "mysql" and dialect.server_version_info is None:
            with self.translated(), self.engine.connect():
                pass  # the dialect learns it from its first connection
        return bool(getattr(dialect, "is_mariadb", False))

    def close(self) -> None:
        """Close the idle connections of all pools."""
        self.engine.dispose()
        self.pools.dispose()

    @contextmanager
    def transaction(
        self,
        *,
        lock_timeout_s: float | None = None,
        renewal: bool = False,
        claim: bool = False,
        bounded: bool = True,
    ) -> Iterator[sa.Connection]:
        """A transaction that waits for row locks no longer than `lock_timeout_s`.

        Its connection is from a pool that bodies do not use; with `renewal` from one that only
        renewals use. Not `bounded`: its statements may take as long as they need.
        """
        with contextlib.ExitStack() as stack:
            engine = stack.enter_context(self.pools.renewals if renewal else self.pools.ledgers)
            stack.enter_context(self.translated())
            db = stack.enter_context(engine.connect())
            if bounded:
                longest_s = _LONGEST_ANSWER_S + _LOCKS * (lock_timeout_s or 0.0)
                deadline = Deadline(driver_of(db), longest_s, place=self.place)
                db.info[_DEADLINE] = stack.enter_context(deadline)
            if self.dialect.options:
                db = db.execution_options(**self.dialect.options)
            stack.enter_context(db.begin())
            if lock_timeout_s is not None:
                apart = (renewal or claim) and self.dialect.claims_apart
                stack.enter_context(self.dialect.waiting(db, lock_timeout_s, apart=apart))
            yield db

    @staticmethod
    def elsewhere_meanwhile(db: sa.Connection) -> AbstractContextManager[None]:
        """In the block the deadline of `transaction()` stands still, for no answer is awaited."""
        deadline: Deadline = db.info[_DEADLINE]
        return deadline.put_off()

    def begin(
        self, engine: sa.Engine, *, idle_s: float, meanwhile: Callable[[sa.Connection], _T]
    ) -> tuple[sa.Connection, _T]:
        """A connection of `engine` in a body's transaction, which may idle for so long.

        Args:
            engine: where the connection comes from.
            idle_s: for how long its transaction may idle, in seconds.
            meanwhile: makes what goes with the connection, while BEGIN is on its way: it must not
                ask the server.

        Raises ConfigurationError where the Engine commits each statement.
        """
        with self.translated():
            db = engine.connect()
            try:
                driver = driver_of(db)
                if self.begins_itself:
                    # psycopg's own COMMIT and ROLLBACK end it: they go by the session's state.
                    deadline = Deadline(driver, _LONGEST_ANSWER_S, place=self.place, watched=False)
                    with deadline, _DriverCall(self, db, driver):
                        self._libpq.send(driver, _opening(idle_s))
                        # Or a Session on it would begin, and commit.
                        db.begin()
                        made = meanwhile(db)
                        self._libpq.receive(driver, deadline)
                else:
                    db.begin()
                    refuse_autocommit(driver)
                    self.dialect.begun(db, idle_s=idle_s)
                    made = meanwhile(db)
            except BaseException as error:
                if not isinstance(error, Exception):
                    db.invalidate()  # interrupted: BEGIN may be without its answer
                db.close()
                raise
        return db, made

    def read(self, db: sa.Connection, prepared: Prepared, values: dict[str, Any]) -> list[Any]:
        """The rows of a prepared SELECT within the transaction of `db`."""
        with _DriverCall(self, db, driver_of(db)) as connection:
            found = _fetch(connection, prepared.text, prepared.parameters(values))
            return [prepared.row._make(row) for row in found]

    def ask_in(self, db: sa.Connection, statement: str, values: dict[str, Any]) -> list[Any]:
        """The rows of one statement within the transaction of `db`."""
        with _DriverCall(self, db, driver_of(db)) as connection:
            by_psycopg = self.engine.dialect.driver == "psycopg"
            return (self._rows if by_psycopg else _fetch)(connection, statement, values)

    def ask_and_commit(self, db: sa.Connection, statement: str, values: dict[str, Any]) -> Commit:
        """One statement within the transaction of `db`, and its COMMIT; see `Libpq`.

        Raises as `ask_in()` does, except where the connection broke: both may have been done.
        """
        driver = driver_of(db)
        session: int = driver.pgconn.backend_pid  # not known once the connection is lost
        try:
            with _DriverCall(self, db, driver) as connection:
                return self._libpq.ask_and_commit(connection, statement, values)
        except (CannotWriteError, LockTimeoutError):
            raise
        except LedgerUnavailableError as error:
            cause = error.__cause__
            assert isinstance(cause, Exception)  # noqa: S101  # the driver's
            return Commit(sent=True, error=cause, session=session)

    def ask_apart(self, statement: str, values: dict[str, Any]) -> list[Any]:
        """The rows of one statement that ends its own transaction, where `claims_apart`."""
        limit_s = self.lock_timeout_s
        with (
            self.pools.ledgers as engine,
            _Taken(self, engine, _LONGEST_ANSWER_S + limit_s) as taken,
        ):
            connection, info = taken.driver, taken.pooled.info
            self.dialect.limit_waiting(connection, info, limit_s)
            try:
                return self._executed.ask(connection, info, statement, values)
            except self.engine.dialect.loaded_dbapi.Error:
                connection.rollback()  # one that was killed ran none of its handlers
                raise

    @contextmanager
    def locking(self, longest_s: float) -> Iterator[tuple[Any, dict[Any, Any]]]:
        """The driver's own connection for locks in a table, and what is kept with it.

        Its session is of a pool that nobody else has. What the block begins it has to end.
        """
        with (
            self.pools.locks as engine,
            _Taken(self, engine, longest_s) as taken,
        ):
            yield taken.driver, taken.pooled.info

    def lone_connection(self) -> Any:
        """A connection of the driver's that is in no pool, commits each statement, and stays open.

        Raises what `translated()` says.
        """
        with self.translated():
            pooled: Any = on_other_pool(self.engine).raw_connection()
        connection = pooled.driver_connection
        pooled.detach()
        if self.engine.dialect.driver == "pymysql":
            connection.autocommit(True)
        else:
            connection.autocommit = True
        return connection

    def ask_alone(
        self,
        lone: Lone,
        statement: str,
        values: dict[str, Any],
        *,
        longest_s: float,
    ) -> list[Any]:
        """The rows of one statement on a `lone_connection()`.

        Told to `lone.invalidate()` where its state is not known any more.
        """
        connection = lone.connection
        deadline = Deadline(connection, longest_s, place=self.place)
        with deadline, _DriverCall(self, lone, connection):
            by_psycopg = self.engine.dialect.driver == "psycopg"
            rows = (self._rows if by_psycopg else _fetch)(connection, statement, values)
        if deadline.passed:  # its answer came, and its socket was shut at the same moment
            lone.invalidate(None)
            raise LedgerUnavailableError(f"The database {self.place} answered too late.")
        return rows

    def ask(
        self,
        statement: str,
        values: dict[str, Any],
        *,
        renewal: bool = False,
        longest_s: float = _LONGEST_ANSWER_S,
    ) -> list[Any]:
        """The rows of one statement that commits by itself: one round trip.

        Its connection is from a pool that bodies do not use; with `renewal` from one that only
        renewals use. It goes past SQLAlchemy, whose results take as long again for so little.
        """
        share = self.pools.renewals if renewal else self.pools.ledgers
        with (
            share as engine,
            _Taken(self, engine, longest_s, watched=False) as taken,
        ):
            if self.begins_itself:
                return self._alone(taken, statement, values)
            connection = taken.driver
            before, connection.autocommit = connection.autocommit, True
            try:
                return self._alone(taken, statement, values)
            finally:
                if not connection.closed:
                    connection.autocommit = before

    def _alone(self, taken: _Taken, statement: str, values: Any) -> list[Any]:
        """The rows of a statement that sees the newest rows, whatever the role's default is."""
        connection, info, deadline = taken.driver, taken.pooled.info, taken.deadline
        if LEVEL not in info:  # an Engine of the user's: asked once for each connection
            [[info[LEVEL]]] = self._rows(connection, _ASK_LEVEL, {}, deadline)
        if info[LEVEL] == READ_COMMITTED:
            return self._rows(connection, statement, values, deadline)
        deadline.watch()
        connection.execute(_BEGIN)
        try:
            rows = self._rows(connection, statement, values, deadline)
        except BaseException:
            if not connection.closed:
                connection.rollback()
            raise
        connection.commit()
        return rows

    def _rows(
        self,
        connection: Any,
        statement: str,
        values: dict[str, Any],
        deadline: Deadline | None = None,
    ) -> list[Any]:
        """The rows of one statement, by psycopg."""
        found = self._libpq.ask(connection, statement, values, deadline)
        if found is not None:
            return found
        if deadline is not None:
            deadline.watch()
        psycopg: Any = self.engine.dialect.loaded_dbapi
        if connection.cursor_factory not in (psycopg.Cursor, noting(psycopg.Cursor)):
            # Left to the user's cursor class: one that binds values itself prepares nothing, for a
            # pooler.
            return list(connection.execute(statement, values).fetchall())
        cursor = psycopg.RawCursor(connection, row_factory=psycopg.rows.tuple_row)
        asked = numbered(statement)
        return list(cursor.execute(asked.text, [values[name] for name in asked.names]).fetchall())

    @functools.cached_property
    def _libpq(self) -> Libpq:
        return Libpq(self.engine.dialect.loaded_dbapi)

    @functools.cached_property
    def _executed(self) -> Executed:
        return Executed(self.engine.dialect.loaded_dbapi)

    def elsewhere(self, engine: sa.Engine) -> Database:
        """The same database by another Engine; what was made `once` is shared."""
        database = Database(
            engine,
            lock_timeout_s=self.lock_timeout_s,
            pools=self.pools,
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

    def stores_unicode(self) -> bool:
        """Whether the database's texts hold every character; asked once."""
        if self._unicode is None:
            with self.transaction() as db:
                self._unicode = self.dialect.stores_unicode(db)
        return self._unicode

    def now(self) -> Any:
        """The database's clock in µs, as an expression."""
        return self.dialect.now()

    def now_us(self, db: sa.Connection) -> int:
        """The database's clock in µs."""
        return self.dialect.now_us(db)

    def clock_us(self) -> int:
        """Read the database's clock in µs, in a transaction of its own."""
        if self.dialect.one_writer:
            # A transaction would wait for the user's. SQLite's clock is the machine's.
            return time.time_ns() // 1_000
        with self.transaction() as db:
            return self.now_us(db)

    def translated(self) -> AbstractContextManager[None]:
        """A block in which what drivers raise comes out in taskguard's words."""
        return _Translated(self)

    def translate(self, error: BaseException) -> None:
        """Raise what it is in taskguard's words, if it has any."""
        if isinstance(error, sa.exc.TimeoutError):
            raise NoConnectionError(f"No connection to {self.place}: {error}") from error
        mapped = self.map(error)
        if mapped is not None:
            raise mapped from error

    def explain(self, error: BaseException, pooled: Any, driver: Any) -> BaseException:
        """What an error of a call past SQLAlchemy is to be raised as: in words, or as it is.

        In words it has the error as its cause.

        Does with the connection what SQLAlchemy would do: one that broke is `pooled.invalidate()`d.
        """
        engine = self.engine
        if not isinstance(error, engine.dialect.loaded_dbapi.Error):
            pooled.invalidate(error)  # interrupted halfway: its state is not known
            return error
        if getattr(error, "sqlstate", None) in FORGOTTEN:
            said = f"The session of {self.place} has not what was prepared in it: {error}"
            explained: BaseException | None = TransactionRetryError(said)
        else:
            if engine.dialect.is_disconnect(error, driver, None):
                pooled.invalidate(error)
                self.close()  # the idle ones broke as well
            explained = self.map(error)
        if explained is None:
            return error
        explained.__cause__ = error
        return explained

    def as_sqlalchemys(self, error: Exception) -> BaseException:
        """A driver's error as SQLAlchemy would have raised it."""
        dialect = self.engine.dialect
        return sa.exc.DBAPIError.instance(
            None, None, error, dialect.loaded_dbapi.Error, dialect=dialect
        )

    def map(self, error: BaseException) -> Exception | None:
        """A driver's error, or SQLAlchemy's for it, as one of taskguard's; None: it has none."""
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
                "needs SELECT, INSERT and UPDATE on taskguard_keys, taskguard_work and "
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


@functools.cache
def _opening(idle_s: float) -> str:
    """BEGIN with the bounds of a body's transaction. Sent each time: a body may change settings."""
    from taskguard.ledger.connections.dialects.postgresql import bounds  # of this database alone

    settings = bounds(idle_s).items()
    return "; ".join([_BEGIN, *(f"set local {name} = '{value}'" for name, value in settings)])


def _first(option: Any) -> str:
    """The first value of an option in a URL's query, which may be given several times."""
    return str(option[0] if isinstance(option, tuple) else option or "")


class _Translated(AbstractContextManager[None]):
    __slots__ = ("_database",)

    def __init__(self, database: Database) -> None:
        self._database = database

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._database.translate(error)


class _Taken:
    """A connection for a block that ends each transaction it begins, and goes past SQLAlchemy.

    Attributes:
        pooled: its entry in the pool.
        driver: the driver's own connection.
        deadline: by when it has to have answered.
    """

    __slots__ = (
        "_database", "_engine", "_longest_s", "_pool", "_watched", "deadline", "driver", "pooled",
    )  # fmt: skip

    def __init__(
        self, database: Database, engine: sa.Engine, longest_s: float, *, watched: bool = True
    ) -> None:
        self._database = database
        self._engine = engine
        self._longest_s = longest_s
        self._watched = watched  # as `Deadline` has it
        self._pool = engine.pool if isinstance(engine.pool, Lifo) else None

    def __enter__(self) -> Self:
        pool, database = self._pool, self._database
        try:
            pooled: Any = self._engine.raw_connection() if pool is None else pool.take()
        except Exception as error:
            database.translate(error)
            raise
        try:
            driver = pooled.dbapi_connection
            deadline = Deadline(
                driver, self._longest_s, place=database.place, watched=self._watched
            )
            deadline.__enter__()
        except BaseException:
            self._return(pooled, known=False)  # its deadline may stand
            raise
        self.pooled, self.driver, self.deadline = pooled, driver, deadline
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        known = False
        try:
            if error is None:
                self.deadline.__exit__(None, None, None)
                known = True
                return
            explained = self._database.explain(error, self.pooled, self.driver)
            self.deadline.__exit__(kind, explained, trace)
            drivers_error = self._database.engine.dialect.loaded_dbapi.Error
            known = isinstance(explained, (TaskguardError, drivers_error))
            if explained is not error:
                raise explained
        finally:
            self._return(self.pooled, known=known and not self.deadline.passed)

    def _return(self, pooled: Any, *, known: bool) -> None:
        """Back to the pool. Not `known`: an interrupt came while an answer was on its way."""
        pool = self._pool
        if pool is not None:
            (pool.put if known else pool.drop)(pooled)
            return
        if not known and pooled.dbapi_connection is not None:
            pooled.invalidate()
        pooled.close()


class _DriverCall:
    """A block for calls of the driver itself on a connection that somebody else takes and ends."""

    def __init__(self, database: Database, pooled: sa.Connection | Lone, driver: Any) -> None:
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
        if error is not None:
            explained = self._database.explain(error, self._pooled, self._driver)
            if explained is not error:
                raise explained


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
