"""Note the driver's errors on a connection while a body uses it.

Guarantees: if the database asks for a retry or refuses a lock, that is known at the end of the
transaction, even if the body caught the error. An error of another connection is not attributed to
the ledger's, if SQLAlchemy raised it or the driver is written in Python.

Past SQLAlchemy, errors of two connections of sqlite3 cannot be distinguished.
"""

from __future__ import annotations

from collections import deque
from typing import Any
from weakref import WeakKeyDictionary

import sqlalchemy as sa

from taskguard.errors import TransactionRetryError
from taskguard.ledger.connections.database import Database
from taskguard.ledger.connections.errors import LockTimeoutError
from taskguard.ledger.connections.listeners import listen_once
from taskguard.ledger.refusals import ended_in_block, lock_not_given
from taskguard.model.claims import Claim

__all__ = ["Block", "hand_out", "is_heard", "take_back", "watch"]

_ERRORS_KEPT = 8  # the one that leaves the block is among the last


class Block:
    """The driver's errors on a connection while a body uses it.

    A body may catch an error, raise another, or use another connection. This object keeps the
    errors of this connection. Errors of other connections are the body's own.

    Attributes:
        claim: the claim of the holder.
        size: the approximate size of the longest failed statement with its values, in bytes.
        lost: the error that broke the connection.
        asked: taskguard's error if the database asked for a retry, or refused a lock.
    """

    def __init__(self, claim: Claim, database: Database) -> None:
        self.claim = claim
        self._database = database
        self._drivers_error: Any = database.engine.dialect.loaded_dbapi.Error
        self._errors: deque[BaseException] = deque(maxlen=_ERRORS_KEPT)
        self.size = 0
        self.lost: BaseException | None = None
        self.asked: Exception | None = None

    def note(self, context: sa.engine.ExceptionContext) -> None:
        """Note an error on this connection that SQLAlchemy reports."""
        error = context.original_exception
        if not isinstance(error, self._drivers_error):
            return  # an interrupt says nothing about the database
        self._errors.append(error)
        self.size = max(self.size, _size(context.statement) + _size(context.parameters))
        mapped = self._database.faults.map(error)
        if isinstance(mapped, LockTimeoutError):
            if self._database.dialect.lock_timeouts_abort:
                self.asked = lock_not_given(self.claim)
        elif isinstance(mapped, TransactionRetryError):
            self.asked = mapped
        if context.is_disconnect:
            self.lost = error

    def has(self, error: BaseException, driver: Any) -> bool:
        """Return True if the error is of this connection; `driver` is the driver's own."""
        origin = getattr(error, "orig", None) or error
        if any(origin is each for each in self._errors):
            return True
        if isinstance(error, sa.exc.DBAPIError) or not isinstance(origin, self._drivers_error):
            return False
        # The error bypassed SQLAlchemy. Its traceback shows the connection of its cursor, if any.
        raised_on = connection_of(origin)
        return raised_on is None or raised_on is driver


# Connections that bodies use. A body must not end its transaction: the effects before the end, or
# those after it, would be committed without DONE.
_handed_out: WeakKeyDictionary[sa.Connection, Block] = WeakKeyDictionary()


def hand_out(db: sa.Connection, block: Block) -> None:
    """Give the connection to the body: from now on, refuse COMMIT and ROLLBACK, and note errors."""
    _handed_out[db] = block


def take_back(db: sa.Connection) -> None:
    """Take the connection back from the body."""
    _handed_out.pop(db, None)


def watch(engine: sa.Engine) -> None:
    """Listen on the Engine's connections, once."""
    listen_once(engine, "commit", _refuse_an_end)
    listen_once(engine, "begin", _refuse_an_end)
    listen_once(engine, "handle_error", _note_error)


def is_heard(db: sa.Connection) -> bool:
    """Return True if listeners of the user run before its COMMIT: they may refuse it, or write."""
    return any(each is not _refuse_an_end for each in db.dispatch.commit)


def _refuse_an_end(db: sa.Connection) -> None:
    """Refuse a COMMIT, and the BEGIN that follows the end of a transaction."""
    block = _handed_out.get(db)
    if block is not None:
        raise ended_in_block(block.claim)


def _note_error(context: sa.engine.ExceptionContext) -> None:
    """Note an error of the connection, before the body can catch it."""
    block = None if context.connection is None else _handed_out.get(context.connection)
    if block is not None:
        block.note(context)


def _size(value: Any) -> int:
    """Return the approximate size of a text, bytes, or a statement's values, in bytes."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "replace"))
    if isinstance(value, bytes | bytearray):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    if isinstance(value, tuple):
        return sum(map(_size, value))
    if isinstance(value, list):  # of several executions, one after the other
        return max(map(_size, value), default=0)
    return 0


def connection_of(error: BaseException) -> Any:
    """Return the driver's connection whose cursor raised the error, or None if unknown."""
    trace = error.__traceback__
    found = None
    while trace is not None:
        cursor = trace.tb_frame.f_locals.get("self")
        if _is_drivers(cursor, error):
            found = getattr(cursor, "connection", found)
        trace = trace.tb_next
    return found


def _is_drivers(cursor: Any, error: BaseException) -> bool:
    """Return True for a cursor of the driver that raised the error."""
    package = type(error).__module__.partition(".")[0]
    return any(each.__module__.partition(".")[0] == package for each in type(cursor).__mro__)
