"""One database: transactions and statements on its connections, and its clock.

Guarantees: a statement of the ledger's waits for no connection that a body has, and for an answer
no longer than its deadline. Errors come out as `faults.py` says. Knows nothing of claims.

Read next: `taken.py`, for statements past SQLAlchemy; `pools.py`, for the connections.
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
"""For how many seconds a change that is no claim waits for a row lock."""

_T = TypeVar("_T")

_ASK_LEVEL = "select current_setting('default_transaction_isolation')"
_BEGIN = f"begin isolation level {READ_COMMITTED}"


# For answers to the ledger's own statements, beside what they may wait for row locks: two of them.
_LONGEST_ANSWER_S, _LOCKS = 5.0, 2
_DEADLINE = "taskguard_deadline"  # a key of the `info` that SQLAlchemy keeps with a connection


class Database:
    """An engine, made from a URL or the user's own.

    Args:
        pooled: False: connections are closed after each use, unless the engine is the user's own.
        pools: the pools of the same database by another Engine; None: pools of its own.
        connect_timeout_s: how long one connection may take, but on an Engine of the user's own.

    Attributes:
        dialect: what is peculiar to this kind of database.
        faults: its errors in taskguard's words.
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
        self.faults = Faults(self.engine, self.pools, self.dialect, place=self.place)

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
            with self.faults.translated(), self.engine.connect():
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
            stack.enter_context(self.faults.translated())
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
        with self.faults.translated():
            db = engine.connect()
            try:
                driver = driver_of(db)
                if self.begins_itself:
                    # psycopg's own COMMIT and ROLLBACK end it: they go by the session's state.
                    deadline = Deadline(driver, _LONGEST_ANSWER_S, place=self.place, watched=False)
                    with deadline, DriverCall(self.faults, db, driver):
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
        with DriverCall(self.faults, db, driver_of(db)) as connection:
            found = fetch(connection, prepared.text, prepared.parameters(values))
            return [prepared.row._make(row) for row in found]

    def ask_in(self, db: sa.Connection, statement: str, values: dict[str, Any]) -> list[Any]:
        """The rows of one statement within the transaction of `db`."""
        with DriverCall(self.faults, db, driver_of(db)) as connection:
            by_psycopg = self.engine.dialect.driver == "psycopg"
            return (self._rows if by_psycopg else fetch)(connection, statement, values)

    def ask_and_commit(self, db: sa.Connection, statement: str, values: dict[str, Any]) -> Commit:
        """One statement within the transaction of `db`, and its COMMIT; see `Libpq`.

        Raises as `ask_in()` does, except where the connection broke: both may have been done.
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
        """The rows of one statement that ends its own transaction, where `claims_apart`."""
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
                connection.rollback()  # one that was killed ran none of its handlers
                raise

    @contextmanager
    def locking(self, longest_s: float) -> Iterator[tuple[Any, dict[Any, Any]]]:
        """The driver's own connection for locks in a table, and what is kept with it.

        Its session is of a pool that nobody else has. What the block begins it has to end.
        """
        with (
            self.pools.locks as engine,
            Taken(self.faults, engine, longest_s) as taken,
        ):
            yield taken.driver, taken.pooled.info

    def lone_connection(self) -> Any:
        """A connection of the driver's that is in no pool, commits each statement, and stays open.

        Raises what `translated()` says.
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
        """The rows of one statement on a `lone_connection()`.

        Told to `lone.invalidate()` where its state is not known any more.
        """
        connection = lone.connection
        deadline = Deadline(connection, longest_s, place=self.place)
        with deadline, DriverCall(self.faults, lone, connection):
            by_psycopg = self.engine.dialect.driver == "psycopg"
            rows = (self._rows if by_psycopg else fetch)(connection, statement, values)
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


@functools.cache
def _opening(idle_s: float) -> str:
    """BEGIN with the bounds of a body's transaction. Sent each time: a body may change settings."""
    from taskguard.ledger.connections.dialects.postgresql import bounds  # of this database alone

    settings = bounds(idle_s).items()
    return "; ".join([_BEGIN, *(f"set local {name} = '{value}'" for name, value in settings)])


def _first(option: Any) -> str:
    """The first value of an option in a URL's query, which may be given several times."""
    return str(option[0] if isinstance(option, tuple) else option or "")
