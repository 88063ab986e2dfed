"""Holders' transactions on a plain connection of psycopg or sqlite3.

Guarantees: the block begins and ends the transaction. If the body ends it, by the driver or by a
statement, the block's savepoint is gone. The end of the block notices that, and writes nothing that
came after it. The user's row factories stay as they are.

Does not undo a commit of the body itself. The error at the end of the block reports it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from taskguard.errors import TransactionUsageError
from taskguard.ledger.transactions.external import ExternalConnection

__all__ = ["DriverConnection", "driver_connection"]

_KINDS = {"psycopg": "postgresql", "sqlite3": "sqlite"}
_BEGIN = {"postgresql": "begin", "sqlite": "begin immediate"}
_IDLE, _ACTIVE = 0, 1  # psycopg.pq.TransactionStatus


def driver_connection(on: Any) -> DriverConnection | None:
    """Return an adapter if `on` is a connection of one of these drivers. Otherwise return None."""
    kinds = {
        _KINDS.get(each.__module__.partition(".")[0])
        for each in type(on).__mro__
        if each.__name__ == "Connection"
    }
    kind = next(filter(None, kinds), None)
    return None if kind is None else DriverConnection(on, kind)


class DriverConnection(ExternalConnection):
    """A connection of psycopg or sqlite3 as an `ExternalConnection`, for one transaction."""

    def __init__(self, connection: Any, kind: str) -> None:
        self.kind = kind
        self._connection = connection
        self._then: list[Callable[[], None]] = []

    @property
    def driver(self) -> Any:
        """The connection itself."""
        return self._connection

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open, as far as the driver knows."""
        if self.kind == "sqlite":
            return bool(self._connection.in_transaction)
        return bool(self._connection.pgconn.transaction_status != _IDLE)

    @property
    def broken(self) -> bool:
        """Whether the driver has closed it."""
        return getattr(self._connection, "closed", False) is True

    def open(self) -> None:
        """BEGIN, and the savepoint whose absence shows that the body ended the transaction."""
        if self.in_transaction:
            raise TransactionUsageError(
                "guard.transaction() was handed a connection whose transaction has begun (reading "
                "is enough), so that what was done before would be committed with it. Commit or "
                "roll back before the block, or do it in the block."
            )
        if self.kind == "sqlite" or self._connection.autocommit:
            self._say(_BEGIN[self.kind])  # otherwise psycopg sends BEGIN itself
        self._say("savepoint taskguard")

    def flush(self) -> None:
        """Refuse a block whose transaction has ended within it."""
        try:
            if not self.in_transaction:
                raise self._ended()
            self._say("release savepoint taskguard")
        except Exception as error:
            if not self._has_no_savepoint(error):
                raise
            raise self._ended() from error

    def _has_no_savepoint(self, error: Exception) -> bool:
        if self.kind == "sqlite":
            import sqlite3  # not every Python has it

            return isinstance(error, sqlite3.OperationalError)
        return getattr(error, "sqlstate", None) == "3B001"

    @staticmethod
    def _ended() -> TransactionUsageError:
        return TransactionUsageError(
            "The guarded transaction was ended in the block, by commit(), rollback() or a "
            "statement. It ends with the block; for parts that may fail use savepoints, for "
            "parts that commit guard.checkpoint()."
        )

    def _say(self, statement: str) -> None:
        self._connection.execute(statement)

    def commit(self) -> None:
        """COMMIT, then call what was registered by `after_commit()`."""
        self._connection.commit()
        then, self._then = self._then, []
        for function in then:
            function()

    def roll_back(self) -> None:
        """ROLLBACK, if a transaction is open."""
        self._then.clear()
        if self._is_interrupted:
            self._connection.close()  # psycopg would refuse a ROLLBACK and every later statement
        elif not self.broken and self.in_transaction:
            self._connection.rollback()

    @property
    def _is_interrupted(self) -> bool:
        """Whether a signal's exception left a statement without its answer."""
        pgconn = getattr(self._connection, "pgconn", None)
        return pgconn is not None and pgconn.transaction_status == _ACTIVE

    def after_commit(self, function: Callable[[], None]) -> None:
        """Register a function that `commit()` calls after the COMMIT."""
        self._then.append(function)

    def origin(self, error: BaseException) -> BaseException | None:
        """Return the error if it is the driver's, or None."""
        kinds = {each.__module__.partition(".")[0] for each in type(error).__mro__}
        return error if kinds & _KINDS.keys() else None
