"""SQLAlchemy's pool, for statements that need nothing of SQLAlchemy.

To take a connection as an Engine does costs 16 µs: an object that returns it when it is forgotten,
its events, a look at whether a transaction is open.

Guarantees: whoever takes one and whoever has one by the Engine share the same connections, the last
returned first; one that was invalidated is connected anew before it is given, one that comes back
after `dispose()` is closed.
Does not end a transaction that is open on what is put back: a statement that commits itself has
none.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

if TYPE_CHECKING:
    from sqlalchemy.pool import ConnectionPoolEntry

__all__ = ["COMMITTED", "Lifo", "end_transaction", "end_unless_committed"]

COMMITTED = "taskguard_committed"  # in a connection's `info`: nothing came after its last COMMIT
_IDLE = 0  # psycopg.pq.TransactionStatus


class Lifo(sa.pool.QueuePool):
    """The pool of an Engine that is made here."""

    def __init__(self, creator: Any, **options: Any) -> None:
        super().__init__(creator, **{**options, "use_lifo": True})
        self._is_disposed = False

    def take(self) -> ConnectionPoolEntry:
        """An entry with a connection, made if none is idle. Raises what the driver does."""
        entry: Any = self._do_get()
        try:
            entry.get_connection()
        except BaseException as error:
            entry.invalidate(error)
            self._do_return_conn(entry)
            raise
        return entry  # type: ignore[no-any-return]

    def put(self, entry: ConnectionPoolEntry) -> None:
        """It may be taken again."""
        self._do_return_conn(entry)

    def drop(self, entry: ConnectionPoolEntry) -> None:
        """It may be taken again, with another connection: nobody knows the state of this one."""
        known: Any = entry
        connection, known.dbapi_connection = entry.dbapi_connection, None
        try:
            if connection is not None:
                with contextlib.suppress(Exception):
                    connection.close()
        finally:
            self._do_return_conn(entry)

    def _do_return_conn(self, record: ConnectionPoolEntry) -> None:
        super()._do_return_conn(record)
        if self._is_disposed:
            super().dispose()

    def dispose(self) -> None:
        """Close what is idle now and what comes back; the Engine goes on with another pool."""
        self._is_disposed = True
        super().dispose()


def end_transaction(connection: Any, _record: Any, state: Any) -> None:
    """A listener for what comes back by the Engine: ROLLBACK, only if a transaction is open."""
    if not state.terminate_only and connection.pgconn.transaction_status != _IDLE:
        connection.rollback()


def end_unless_committed(connection: Any, record: Any, state: Any) -> None:
    """The same for drivers that do not tell: ROLLBACK, unless an end was the last thing."""
    ended = record.info.pop(COMMITTED, False) or state.transaction_was_reset
    if not ended and not state.terminate_only:
        connection.rollback()
