"""Repeat a call if its connection was dead, as after a restart of the server.

Guarantees: a call is repeated at most once, and only if the database was not available. A call that
waited too long for a row, got no connection, or does not know whether it committed is not repeated.

A call that is `@retried` may run twice: the first run may have committed without an answer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from taskguard.errors import CommitUnknownError, LedgerUnavailableError
from taskguard.ledger.connections.errors import LockTimeoutError, NoConnectionError

__all__ = ["retried"]

_Asked = ParamSpec("_Asked")
_Answer = TypeVar("_Answer")


def retried(ask: Callable[_Asked, _Answer]) -> Callable[_Asked, _Answer]:
    """Return `ask`, which is called once more if the first connection was dead."""

    @functools.wraps(ask)
    def asked(*args: _Asked.args, **kwargs: _Asked.kwargs) -> _Answer:
        try:
            return ask(*args, **kwargs)
        except (LockTimeoutError, NoConnectionError, CommitUnknownError):
            raise
        except LedgerUnavailableError:
            return ask(*args, **kwargs)

    return asked
