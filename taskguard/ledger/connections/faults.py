"""Translate drivers' errors into taskguard's.

Guarantees: a driver's error is raised as LedgerUnavailableError, TransactionRetryError or
LedgerSchemaError, with the driver's error as its cause, or unchanged. No message contains a
password. A connection that is broken, or whose state is unknown, is not used again.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import sqlalchemy as sa

from taskguard.errors import LedgerSchemaError, LedgerUnavailableError, TransactionRetryError
from taskguard.ledger.connections.dialects import Fault
from taskguard.ledger.connections.dialects.base import Dialect
from taskguard.ledger.connections.errors import (
    CannotWriteError,
    LockTimeoutError,
    NoConnectionError,
)
from taskguard.ledger.connections.libpq import FORGOTTEN
from taskguard.ledger.connections.pools import Pools

__all__ = ["Faults"]

# libpq's messages have many lines.
_MOST_SAID = 300


class Faults:
    """Translates the errors of one database.

    Args:
        engine: its Engine.
        pools: its other pools.
        dialect: knows the meaning of the driver's errors.
        place: the database's name in messages.
    """

    def __init__(self, engine: sa.Engine, pools: Pools, dialect: Dialect, *, place: str) -> None:
        self.engine = engine
        self.place = place
        self._pools = pools
        self._dialect = dialect

    def translated(self) -> AbstractContextManager[None]:
        """Return a context manager that translates drivers' errors."""
        return _Translated(self)

    def translate(self, error: BaseException) -> None:
        """Raise taskguard's error for a driver's error, if there is one."""
        if isinstance(error, sa.exc.TimeoutError):
            raise NoConnectionError(f"No connection to {self.place} is free: {error}") from error
        mapped = self.map(error)
        if mapped is not None:
            raise mapped from error

    def explain(self, error: BaseException, pooled: Any, driver: Any) -> BaseException:
        """Return the error to raise for an error of a call that bypasses SQLAlchemy.

        That is taskguard's error with `error` as its cause, or `error` itself. If the connection
        is broken, call `pooled.invalidate()`, as SQLAlchemy would.
        """
        engine = self.engine
        if not isinstance(error, engine.dialect.loaded_dbapi.Error):
            pooled.invalidate(error)  # interrupted: its state is unknown
            return error
        if getattr(error, "sqlstate", None) in FORGOTTEN:
            said = f"A session of {self.place} has lost a prepared statement: {error}"
            explained: BaseException | None = TransactionRetryError(said)
        else:
            if engine.dialect.is_disconnect(error, driver, None):
                pooled.invalidate(error)
                # The idle connections are broken as well.
                engine.dispose()
                self._pools.dispose()
            explained = self.map(error)
        if explained is None:
            return error
        explained.__cause__ = error
        return explained

    def as_sqlalchemys(self, error: Exception) -> BaseException:
        """Return a driver's error as SQLAlchemy would raise it."""
        dialect = self.engine.dialect
        return sa.exc.DBAPIError.instance(
            None, None, error, dialect.loaded_dbapi.Error, dialect=dialect
        )

    def map(self, error: BaseException) -> Exception | None:
        """Return taskguard's error for an error of the driver or SQLAlchemy, or None."""
        driver = self.engine.dialect.loaded_dbapi
        origin: Any = error.orig if isinstance(error, sa.exc.DBAPIError) else error
        if not isinstance(origin, driver.Error):
            return None
        fault = self._dialect.fault(origin, driver)
        if fault is None and getattr(error, "connection_invalidated", False):
            fault = Fault.AWAY
        return None if fault is None else self._in_words(fault, origin)

    def _in_words(self, fault: Fault, origin: Any) -> Exception:
        kind = type(origin).__name__
        if fault is Fault.RETRY:
            return TransactionRetryError(
                f"The database rolled the transaction back; run it again: {origin}"
            )
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
                f"The database {self.place} refused a statement of the ledger: {said}. Workers "
                "and changes need a user with SELECT, INSERT and UPDATE on each table taskguard_*, "
                "and SELECT on taskguard_schema. Questions need SELECT. If a column is missing, "
                "the tables have another version: run `taskguard ledger upgrade`."
            )
        if fault is Fault.CANNOT_WRITE:
            return CannotWriteError(f"The database {self.place} cannot write ({kind}).")
        return LedgerUnavailableError(
            f"The database {self.place} is not available ({kind}: {self._said(origin)})."
        )

    def _said(self, origin: Any) -> str:
        """Return a driver's error in one line, without the password."""
        parts = [str(part) for part in getattr(origin, "args", ())] or [str(origin)]
        said = " ".join(" ".join(parts).split()).rstrip(".")
        password = str(self.engine.url.password or "")
        if password and password in said:
            return "the driver's message is hidden, because it contains the password"
        return said if len(said) <= _MOST_SAID else f"{said[:_MOST_SAID]}…"


class _Translated(AbstractContextManager[None]):
    __slots__ = ("_faults",)

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._faults.translate(error)
