"""Errors of a connection that callers distinguish from others. Imports no driver."""

from __future__ import annotations

from taskguard.errors import LedgerUnavailableError, TransactionRetryError

__all__ = ["CannotWriteError", "ConnectionBrokenError", "LockTimeoutError", "NoConnectionError"]


class ConnectionBrokenError(TransactionRetryError):
    """The connection broke. The body runs again, but fewer times than after a deadlock."""


class NoConnectionError(LedgerUnavailableError):
    """All connections of this process are in use; the database itself may be up."""


class LockTimeoutError(LedgerUnavailableError):
    """Another transaction holds the row."""


class CannotWriteError(LedgerUnavailableError):
    """The database answers, but its disk is full or it is read-only."""
