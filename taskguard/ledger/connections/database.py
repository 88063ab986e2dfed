"""One database: transactions and statements on its connections, and its clock.

Guarantees: the ledger's own statements never wait for a connection that a body uses. They wait for
an answer no longer than their deadline. `faults.py` translates errors. This module knows no claims.

Read next: `taken.py` for statements that bypass SQLAlchemy; `pools.py` for the connections.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import sqlalchemy as sa

from taskguard.errors import LedgerUnavailableError
from taskguard.ledger.connections.deadlines import Deadline
from taskguard.ledger.connections.dialects import dialect_of
from taskguard.ledger.connections.engine import (
    CONNECT_TIMEOUT_S,
    LEVEL,
    READ_COMMITTED,
    begins_itself,
    failover_s,
    make_engine,
)
from taskguard.ledger.connections.errors import CannotWriteError, LockTimeoutError
from taskguard.ledger.connections.executed import Executed
from taskguard.ledger.connections.faults import Faults
from taskguard.ledger.connections.libpq import Commit, Libpq, numbered
from taskguard.ledger.connections.pools import Pools, on_other_pool
from taskguard.ledger.connections.prepared import Prepared
from taskguard.ledger.connections.sessions import noting, refuse_autocommit
from taskguard.ledger.connections.taken import DriverCall, Lone, Taken, driver_of, fetch

__all__ = ["WRITE_LOCK_S", "Database"]

WRITE_LOCK_S = 5.0
"""Timeout for the row lock of a change that is not a claim, in seconds."""

_T = TypeVar("_T")

_ASK_LEVEL = "select current_setting('default_transaction_isolation')"
_BEGIN = f"begin isolation level {READ_COMMITTED}"


# Timeout for an answer to the ledger's own statements, in seconds, in addition to the timeouts of
# the row locks, of which a statement waits for two at most.
_LONGEST_ANSWER_S, _LOCKS = 5.0, 2
_DEADLINE = "taskguard_deadline"  # a key of the `info` that SQLAlchemy keeps with a connection


class Database:
    """An Engine, created from a URL or the user's own, with its pools and dialect.

    Args:
        database: a SQLAlchemy URL, or an Engine of the user.
        lock_timeout_s: how long a claim waits for a row lock, in seconds.
        pooled: False closes connections after each use, except on an Engine of the user.
        pools: the pools of this database with another Engine. None: pools of its own.
        connect_timeout_s: timeout for one connection, in seconds. It does not apply to an Engine of
            the user.

    Attributes:
        dialect: the differences of this kind of database.
        faults: translates the driver's errors.
        pools: the pools, and how many connections each purpose may use.
        begins_itself: connections commit each statement, and `begin()` opens a transaction by one
            statement that also changes settings, which saves a round trip. False for an Engine of
            the user, whose settings are not changed.
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
        self.faults = Faults(self.engine, self.pools, self.dialect, place=self.place)
        self._is_closed = False

    @functools.cached_property
    def place(self) -> str:
        """The location of the database, without user and password."""
        url = self.engine.url
        host = url.host or _first(url.query.get("host") or url.query.get("unix_socket"))
        port = url.port or _first(url.query.get("port"))
        if not host:  # a file, or the driver's default server
            return f"{url.drivername} {url.database or ':memory:'}"
        return f"{url.drivername} {host}{f':{port}' if port else ''}/{url.database or ''}"

    @functools.cached_property
    def failover_s(self) -> float:
        """Seconds for a new connection if all hosts of the URL except the last are silent.

        0.0 for one host, and for an Engine of the user, whose timeouts are unknown.
        """
        return failover_s(self.engine.url) if self.dialect.own else 0.0

    def is_mariadb(self) -> bool:
        """Return True if the server is a MariaDB. If the URL says MySQL, query the server."""
        dialect: Any = self.engine.dialect
        if dialect.name == "mysql" and dialect.server_version_info is None:
            with self.faults.translated(), self.engine.connect():
                pass  # the dialect learns it from its first connection
        return bool(getattr(dialect, "is_mariadb", False))

    def close(self) -> None:
        """Close the idle connections of all pools. Those in use are closed after their use."""
        self._is_closed = True
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
        longest_s: float = _LONGEST_ANSWER_S,
    ) -> Iterator[sa.Connection]:
        """Open a transaction that waits for row locks no longer than `lock_timeout_s`.

        Its connection is from a pool that bodies do not use. With `renewal`, it is from a pool that
        only renewals use. Without `bounded`, its statements have no deadline. Otherwise each has
        `longest_s`, in addition to its waits for row locks.
        """
        with contextlib.ExitStack() as stack:
            engine = stack.enter_context(self.pools.renewals if renewal else self.pools.ledgers)
            stack.enter_context(self.faults.translated())
            db = stack.enter_context(engine.connect())
            stack.callback(self._keep_out_of_closed_pools, db)
            if bounded:
                within_s = longest_s + _LOCKS * (lock_timeout_s or 0.0)
                deadline = Deadline(driver_of(db), within_s, place=self.place)
                db.info[_DEADLINE] = stack.enter_context(deadline)
            if self.dialect.options:
                db = db.execution_options(**self.dialect.options)
            stack.enter_context(db.begin())
            if lock_timeout_s is not None:
                apart = (renewal or claim) and self.dialect.claims_apart
                stack.enter_context(self.dialect.waiting(db, lock_timeout_s, apart=apart))
            yield db

    def _keep_out_of_closed_pools(self, db: sa.Connection) -> None:
        """A thread that renews leases may use the database a moment after `close()`."""
        if self._is_closed and not (db.closed or db.invalidated):
            db.detach()

    @staticmethod
    def elsewhere_meanwhile(db: sa.Connection) -> AbstractContextManager[None]:
        """Suspend the deadline of `transaction()` in the block, which waits for no answer."""
        deadline: Deadline = db.info[_DEADLINE]
        return deadline.put_off()

    def begin(
        self, engine: sa.Engine, *, idle_s: float, meanwhile: Callable[[sa.Connection], _T]
    ) -> tuple[sa.Connection, _T]:
        """Open a body's transaction. Return its connection, and the value of `meanwhile`.

        Args:
            engine: the Engine of the connection.
            idle_s: how long the transaction may idle, in seconds.
            meanwhile: called while BEGIN is on its way. It must not query the server.

        Raises:
            ConfigurationError: the Engine commits each statement.
        """
        with self.faults.translated():
            db = engine.connect()
            try:
                driver = driver_of(db)
                if self.begins_itself:
                    # psycopg's own COMMIT and ROLLBACK can end it, as they use the session's state.
                    deadline = Deadline(driver, _LONGEST_ANSWER_S, place=self.place, watched=False)
                    with deadline, DriverCall(self.faults, db, driver):
                        self._libpq.send(driver, _opening(idle_s))
                        # Otherwise a Session on the connection would begin and commit itself.
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
                    db.invalidate()  # interrupted: the answer to BEGIN may be missing
                db.close()
                raise
        return db, made

    def read(self, db: sa.Connection, prepared: Prepared, values: dict[str, Any]) -> list[Any]:
        """Return the rows of a prepared SELECT within the transaction of `db`."""
        with DriverCall(self.faults, db, driver_of(db)) as connection:
            found = fetch(connection, prepared.text, prepared.parameters(values))
            return [prepared.row._make(row) for row in found]

    def ask_in(self, db: sa.Connection, statement: str, values: dict[str, Any]) -> list[Any]:
        """Return the rows of one statement within the transaction of `db`."""
        with DriverCall(self.faults, db, driver_of(db)) as connection:
            by_psycopg = self.engine.dialect.driver == "psycopg"
            return (self._rows if by_psycopg else fetch)(connection, statement, values)

    def ask_and_commit(self, db: sa.Connection, statement: str, values: dict[str, Any]) -> Commit:
        """Run one statement within the transaction of `db`, and its COMMIT. See `Libpq`.

        Raises the errors of `ask_in()`. If the connection breaks, both may have been done, so the
        returned Commit has the error.
        """
        driver = driver_of(db)
        session: int = driver.pgconn.backend_pid  # not known once the connection is lost
        try:
            with DriverCall(self.faults, db, driver) as connection:
                return self._libpq.ask_and_commit(connection, statement, values)
        except (CannotWriteError, LockTimeoutError):
            raise
        except LedgerUnavailableError as error:
            cause = error.__cause__
            assert isinstance(cause, Exception)  # noqa: S101  # the driver's
            return Commit(sent=True, error=cause, session=session)

    def ask_apart(self, statement: str, values: dict[str, Any]) -> list[Any]:
        """Return the rows of one statement that ends its own transaction, for `claims_apart`."""
        limit_s = self.lock_timeout_s
        with (
            self.pools.ledgers as engine,
            Taken(self.faults, engine, _LONGEST_ANSWER_S + limit_s) as taken,
        ):
            connection, info = taken.driver, taken.pooled.info
            self.dialect.limit_waiting(connection, info, limit_s)
            try:
                return self._executed.ask(connection, info, statement, values)
            except self.engine.dialect.loaded_dbapi.Error:
                connection.rollback()  # a killed statement did not run its error handlers
                raise

    @contextmanager
    def locking(self, longest_s: float) -> Iterator[tuple[Any, dict[Any, Any]]]:
        """Yield the driver's connection for locks in a table, and its `info`.

        Its session is from a pool for these locks only. The block must end its transactions.
        """
        with (
            self.pools.locks as engine,
            Taken(self.faults, engine, longest_s) as taken,
        ):
            yield taken.driver, taken.pooled.info

    def lone_connection(self) -> Any:
        """Return a driver's connection outside all pools that commits each statement.

        Raises the errors of `translated()`.
        """
        with self.faults.translated():
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
        """Return the rows of one statement on a `lone_connection()`.

        If the connection's state is unknown afterwards, call `lone.invalidate()`.
        """
        connection = lone.connection
        deadline = Deadline(connection, longest_s, place=self.place)
        with deadline, DriverCall(self.faults, lone, connection):
            by_psycopg = self.engine.dialect.driver == "psycopg"
            rows = (self._rows if by_psycopg else fetch)(connection, statement, values)
        if deadline.passed:  # the answer came just when the socket was closed
            lone.invalidate(None)
            raise LedgerUnavailableError(
                f"The database {self.place} answered only after {longest_s:g} s; the connection "
                "was closed."
            )
        return rows

    def ask(
        self,
        statement: str,
        values: dict[str, Any],
        *,
        renewal: bool = False,
        longest_s: float = _LONGEST_ANSWER_S,
    ) -> list[Any]:
        """Return the rows of one statement that commits itself, in one round trip.

        Its connection is from a pool that bodies do not use. With `renewal`, it is from a pool that
        only renewals use. It bypasses SQLAlchemy, whose results would double the time.
        """
        share = self.pools.renewals if renewal else self.pools.ledgers
        with (
            share as engine,
            Taken(self.faults, engine, longest_s, watched=False) as taken,
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

    def _alone(self, taken: Taken, statement: str, values: Any) -> list[Any]:
        """Return the rows of a statement in READ COMMITTED, despite the default of the role."""
        connection, info, deadline = taken.driver, taken.pooled.info, taken.deadline
        if LEVEL not in info:  # an Engine of the user: one query for each connection
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
        """Return the rows of one statement, by psycopg."""
        found = self._libpq.ask(connection, statement, values, deadline)
        if found is not None:
            return found
        if deadline is not None:
            deadline.watch()
        psycopg: Any = self.engine.dialect.loaded_dbapi
        if connection.cursor_factory not in (psycopg.Cursor, noting(psycopg.Cursor)):
            # Use the user's cursor class: with a pooler, it may be one that prepares nothing.
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
        """Return a Database for another Engine. It shares the values of `once()`."""
        database = Database(
            engine,
            lock_timeout_s=self.lock_timeout_s,
            pools=self.pools,
        )
        database._made = self._made
        return database

    def once(self, make: Callable[..., _T], *args: Any) -> _T:
        """Return `make(self, *args)`, called once per driver: for prepared statements."""
        kind = self.engine.dialect.name, self.engine.dialect.driver
        made: _T | None = self._made.get((kind, make, args))
        if made is None:
            made = self._made[kind, make, args] = make(self, *args)
        return made

    def stores_unicode(self) -> bool:
        """Return True if the database can store every character. Queries it once."""
        if self._unicode is None:
            with self.transaction() as db:
                self._unicode = self.dialect.stores_unicode(db)
        return self._unicode

    def now(self) -> Any:
        """Return the database's clock in µs as an expression."""
        return self.dialect.now()

    def now_us(self, db: sa.Connection) -> int:
        """Return the database's clock in µs."""
        return self.dialect.now_us(db)

    def clock_us(self) -> int:
        """Read the database's clock in µs, in a transaction of its own."""
        if self.dialect.one_writer:
            # A transaction would wait for the user's. SQLite uses the machine's clock.
            return time.time_ns() // 1_000
        with self.transaction() as db:
            return self.now_us(db)


@functools.cache
def _opening(idle_s: float) -> str:
    """Return BEGIN with the timeouts of a body's transaction, which a body may have changed."""
    from taskguard.ledger.connections.dialects.postgresql import bounds  # of this database alone

    settings = bounds(idle_s).items()
    return "; ".join([_BEGIN, *(f"set local {name} = '{value}'" for name, value in settings)])


def _first(option: Any) -> str:
    """Return the first value of an option in a URL's query, which may occur several times."""
    return str(option[0] if isinstance(option, tuple) else option or "")
