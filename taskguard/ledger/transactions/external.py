"""Holders' transactions on connections of other libraries, for example Django.

Guarantees: the ledger's statements use the driver's connection of the other library. Only that
library begins, commits, rolls back or closes it. Integrations implement `ExternalConnection`, and
pass it in place of a Session or Connection.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from taskguard.errors import ConfigurationError
from taskguard.ledger.transactions.adapter import Connect, TransactionAdapter

if TYPE_CHECKING:
    import sqlalchemy as sa

    from taskguard.ledger.ports import LentConnection

__all__ = ["ExternalConnection", "engine_for_external", "on_external"]


class ExternalConnection(TransactionAdapter):
    """A connection of another library, which begins and ends the transactions on it.

    Pass one to `guard.transaction()`, `guard.checkpoint()` or `enqueue_in()` in place of a Session.
    """

    _db: sa.Connection | None = None

    @property
    @abstractmethod
    def driver(self) -> Any:
        """The driver's own connection, not a wrapper of it, of the same driver as the ledger."""

    @property
    @abstractmethod
    def in_transaction(self) -> bool:
        """Whether the library has a transaction open here."""

    @abstractmethod
    def open(self) -> None:
        """Begin a transaction. Raise TransactionUsageError if one is open."""

    @abstractmethod
    def after_commit(self, function: Callable[[], None]) -> None:
        """Call `function` once the open transaction has committed."""

    def watch_statements(
        self,
        asked: Callable[[], None],  # noqa: ARG002  # for those that can
        done: Callable[[], None],  # noqa: ARG002
    ) -> Callable[[], None]:
        """Call `asked` before each statement of the library and `done` after it, for tests.

        Return a function that ends this. By default neither is called.
        """
        return lambda: None

    def begin(self, connect: Connect) -> sa.Connection:
        """Call `open()`, and return a Connection of SQLAlchemy that cannot end the transaction."""
        try:
            self.open()
        except Exception as error:
            origin = self.origin(error)
            if origin is None:
                raise
            raise origin from error
        try:
            self._db = connect(self)
            self._db.begin()
        except BaseException:
            self.roll_back()
            self.close()
            raise
        return self._db

    def close(self) -> None:
        """Close SQLAlchemy's connection. The library's own stays open."""
        db, self._db = self._db, None
        if db is not None:
            db.close()


class _Kept:
    """The driver's connection for SQLAlchemy, which can use it but not end its transaction."""

    def __init__(self, driver: Any, tuples: Any) -> None:
        self._driver = driver
        self._tuples = tuples  # psycopg's row factory for them; None: the driver is sqlite3

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def cursor(self, *args: Any, **options: Any) -> Any:
        """Return a cursor whose rows are tuples, even if the connection has a row factory."""
        if self._tuples is not None:
            options.setdefault("row_factory", self._tuples)
            return self._driver.cursor(*args, **options)
        cursor = self._driver.cursor(*args, **options)
        cursor.row_factory = None
        return cursor

    def execute(self, *args: Any, **options: Any) -> Any:
        """Like the driver's `execute()`, with a cursor whose rows are tuples."""
        return self.cursor().execute(*args, **options)

    def commit(self) -> None:
        """Does nothing: the library ends its transaction and its connection, not SQLAlchemy."""

    def rollback(self) -> None:
        """Does nothing: the library ends its transaction and its connection, not SQLAlchemy."""

    def close(self) -> None:
        """Does nothing: the library ends its transaction and its connection, not SQLAlchemy."""


# One Engine for each Engine of a ledger, so that statements are compiled once.
_engines: WeakKeyDictionary[sa.Engine, sa.Engine] = WeakKeyDictionary()
_handed_in: ContextVar[LentConnection] = ContextVar("taskguard_external_connection")


def engine_for_external(ledgers: sa.Engine) -> sa.Engine:
    """Return an Engine with the ledger's dialect. `on_external()` connects it."""
    engine = _engines.get(ledgers)
    if engine is None:
        import sqlalchemy as sa

        def keep() -> Any:
            driver, dbapi = _handed_in.get().driver, dialect.loaded_dbapi
            if not isinstance(driver, getattr(dbapi, "Connection", ())):
                raise ConfigurationError(
                    f"The ledger uses the driver {dbapi.__name__}, and this connection is of "
                    f"{type(driver).__module__}. Use the same driver for both."
                )
            rows = getattr(dbapi, "rows", None)
            return _Kept(driver, None if rows is None else rows.tuple_row)

        dialect = ledgers.dialect
        pool = sa.pool.NullPool(keep, reset_on_return=None)
        engine = _engines[ledgers] = sa.Engine(pool, dialect, ledgers.url)
    return engine


def on_external(ledgers: sa.Engine, external: LentConnection) -> sa.Connection:
    """Return a Connection for the ledger's statements within the library's own transaction.

    The caller closes it. Raises ConfigurationError if its driver is not the ledger's.
    """
    known = getattr(ledgers.dialect, "server_version_info", None) is not None
    if not known and external.kind != "sqlite":  # a first connection would set WAL, and wait for it
        with ledgers.connect():
            pass  # the dialect learns from its first connection what it needs to know
    token = _handed_in.set(external)
    try:
        return engine_for_external(ledgers).connect()
    finally:
        _handed_in.reset(token)
