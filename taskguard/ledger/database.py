"""One database: connections, its clock, and its errors in taskguard's words.

Guarantees: a driver's error comes out as LedgerUnavailableError, TransactionRetryError or
LedgerSchemaError, with the driver's as its cause; no message holds a password. Knows nothing of
claims.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import sqlalchemy as sa

from taskguard.errors import LedgerSchemaError, LedgerUnavailableError, TransactionRetryError
from taskguard.ledger.engine import make_engine

__all__ = ["Database", "LockTimeoutError"]

_T = TypeVar("_T")

# SQLSTATEs: https://www.postgresql.org/docs/current/errcodes-appendix.html
_RETRYABLE = ("40001", "40P01")
_LOCKED = "55P03"
_NO_TABLE = ("42P01", "no such table")


class LockTimeoutError(LedgerUnavailableError):
    """Another transaction holds the row."""


class Database:
    """An engine, made from a URL or the user's own.

    Attributes:
        postgresql: the dialect is PostgreSQL.
        one_statement: statements written for psycopg's `%(name)s` can be used.
    """

    def __init__(self, database: Any, *, lock_timeout_s: float) -> None:
        self.engine = make_engine(database, lock_timeout_s=lock_timeout_s)
        self.lock_timeout_s = lock_timeout_s
        self.postgresql = self.engine.dialect.name == "postgresql"
        self.one_statement = self.postgresql and self.engine.dialect.paramstyle == "pyformat"
        # Same pool; a lone statement then costs no BEGIN and no COMMIT of its own.
        self._autocommit = self.engine.execution_options(isolation_level="AUTOCOMMIT")

    @property
    def place(self) -> str:
        """Where it is, without user and password."""
        url = self.engine.url
        return f"{url.drivername} {url.host or ''}/{url.database or ''}"

    def connect(self) -> sa.Connection:
        """A connection; the caller closes it."""
        with self.translated():
            return self.engine.connect()

    @contextmanager
    def transaction(self, *, lock_timeout_s: float | None = None) -> Iterator[sa.Connection]:
        """A transaction that waits for row locks no longer than `lock_timeout_s`."""
        with self.translated(), self.engine.begin() as db:
            if self.postgresql and lock_timeout_s is not None:
                db.exec_driver_sql(
                    f"select set_config('lock_timeout', '{milliseconds(lock_timeout_s)}', true)"
                )
            yield db

    def ask(self, statement: str, values: dict[str, Any]) -> list[Any]:
        """One statement, committed by itself, in one round trip."""
        with self.translated(), self._autocommit.connect() as db:
            return list(db.exec_driver_sql(statement, values))

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
        except sa.exc.DBAPIError as error:
            mapped = self.map(error)
            if mapped is None:
                raise
            raise mapped from error
        except sa.exc.TimeoutError as error:
            raise LedgerUnavailableError(f"No connection to {self.place}: {error}") from error

    def map(self, error: sa.exc.DBAPIError) -> Exception | None:
        """A driver's error in taskguard's words; None for what is the user's own."""
        code = getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)
        text = str(error.orig)
        if code in _RETRYABLE:
            return TransactionRetryError(f"The database asked to run it again: {text}")
        if code == _LOCKED or "database is locked" in text:
            return LockTimeoutError("Another transaction holds the row.")
        if code == _NO_TABLE[0] or _NO_TABLE[1] in text:
            return LedgerSchemaError(
                f"The ledger's tables do not exist in {self.place}. Run `taskguard ledger create`."
            )
        if isinstance(error, sa.exc.OperationalError | sa.exc.InterfaceError) or (
            error.connection_invalidated
        ):
            kind = type(error.orig).__name__
            return LedgerUnavailableError(f"The database {self.place} gave no answer ({kind}).")
        return None


def milliseconds(seconds: float) -> int:
    """For settings that want whole milliseconds, where 0 would mean no limit."""
    return max(1, round(seconds * 1000))
