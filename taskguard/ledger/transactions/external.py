"""Connections of other libraries (Django's), on which a holder's transaction can be.

Guarantees: the ledger's statements go by the very connection of the driver that the other library
has, and only that library begins, commits, rolls back or closes it. For integrations, which
implement `ExternalConnection` and hand it in where a Session or Connection could be.
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
        """The driver's own connection, not a wrapper of it. Its driver must be the ledger's."""

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
        """`open()`, with SQLAlchemy's connection on top, which writes and ends nothing."""
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
        """Close SQLAlchemy's connection; the library's own stays open."""
        db, self._db = self._db, None
        if db is not None:
            db.close()


class _Kept:
    """The driver's connection in SQLAlchemy's hands, which may use it and not end it."""

    def __init__(self, driver: Any, tuples: Any) -> None:
        self._driver = driver
        self._tuples = tuples  # psycopg's row factory for them; None: the driver is sqlite3

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def cursor(self, *args: Any, **options: Any) -> Any:
        """A cursor whose rows are tuples, whatever the connection's row factory is."""
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


# One Engine for each of the ledger's, so that statements are compiled once.
_engines: WeakKeyDictionary[sa.Engine, sa.Engine] = WeakKeyDictionary()
_handed_in: ContextVar[LentConnection] = ContextVar("taskguard_external_connection")


def engine_for_external(ledgers: sa.Engine) -> sa.Engine:
    """An Engine that speaks as the ledger's own does; `on_external()` connects it."""
    engine = _engines.get(ledgers)
    if engine is None:
        import sqlalchemy as sa

        def keep() -> Any:
            driver, dbapi = _handed_in.get().driver, dialect.loaded_dbapi
            if not isinstance(driver, getattr(dbapi, "Connection", ())):
                raise ConfigurationError(
                    f"The ledger speaks by {dbapi.__name__}, and the connection it was handed is "
                    f"of {type(driver).__module__}: give both the same driver."
                )
            rows = getattr(dbapi, "rows", None)
            return _Kept(driver, None if rows is None else rows.tuple_row)

        dialect = ledgers.dialect
        pool = sa.pool.NullPool(keep, reset_on_return=None)
        engine = _engines[ledgers] = sa.Engine(pool, dialect, ledgers.url)
    return engine


def on_external(ledgers: sa.Engine, external: LentConnection) -> sa.Connection:
    """For statements of the ledger within the library's own transaction; the caller closes it.

    Raises ConfigurationError if its driver is not the ledger's.
    """
    known = getattr(ledgers.dialect, "server_version_info", None) is not None
    if not known and external.kind != "sqlite":  # which a first connection would wait to switch
        with ledgers.connect():
            pass  # the dialect learns from its first connection what it needs to know
    token = _handed_in.set(external)
    try:
        return engine_for_external(ledgers).connect()
    finally:
        _handed_in.reset(token)
