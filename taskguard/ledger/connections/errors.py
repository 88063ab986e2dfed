"""Errors of a connection that callers tell from the rest of their kind. Loads no driver."""

from __future__ import annotations

from taskguard.errors import LedgerUnavailableError, TransactionRetryError

__all__ = ["ConnectionBrokenError", "NoConnectionError"]


class ConnectionBrokenError(TransactionRetryError):
    """The connection broke: run again, though not as often as after a deadlock."""


class NoConnectionError(LedgerUnavailableError):
    """All connections of this process are in use; the database itself may be up."""
