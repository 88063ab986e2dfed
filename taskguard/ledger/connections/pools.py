"""Pools of connections, and the number that each purpose may use.

Guarantees: bodies never take the connections with which the ledger claims and completes. They never
take those of bodies within their transactions. If a call gets no connection within seconds, it
raises an error. A process has at most this number of connections:

* Bodies' transactions: 50. On an Engine of the user: the size of its pool.
* The ledger itself, for moments: 20.
* Guarded bodies within other bodies' transactions: 10 for each level.
* Renewals: one, on a separate pool, because their thread is a native one.
* Locks in a table of MariaDB or MySQL, for moments: 20, on a separate pool.

On an Engine of the user, only the first purpose uses the Engine's pool. The others use further
pools of the same kind and at most the same size. On SQLite there is one pool, because an open
transaction stops the others anyway.

An Engine that is created from a URL has a `Lifo`, a pool of SQLAlchemy. Statements that do not need
SQLAlchemy take connections from it directly. Taking one through the Engine costs 16 µs more, for
events, a check for an open transaction, and an object that returns a forgotten connection. All
pools are empty in a forked child.

Does not guarantee that the server allows this number of connections.
"""

from __future__ import annotations

import contextlib
import copy
import os
import queue
import socket
import threading
import weakref
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.util.queue import Empty, Full, QueueCommon

from taskguard.ledger.connections.errors import NoConnectionError
from taskguard.ledger.connections.listeners import listen_once, same_listeners

if TYPE_CHECKING:
    from sqlalchemy.pool import ConnectionPoolEntry

__all__ = [
    "COMMITTED",
    "Lifo",
    "Pools",
    "Share",
    "emptied_in_children",
    "end_transaction",
    "end_unless_committed",
    "on_other_pool",
]

COMMITTED = "taskguard_committed"  # in a connection's `info`: COMMIT was its last statement
_IDLE = 0  # psycopg.pq.TransactionStatus
# Engines whose connections belong to the parent in a forked child.
emptied_in_children: weakref.WeakSet[sa.Engine] = weakref.WeakSet()

_MOST_OF_BODIES, _MOST_OF_LEDGER, _MOST_WITHIN = 50, 20, 10
_LONGEST_WAIT_S = 10.0
# Numbers of shares. The others are numbered by the depth of their bodies.
_LEDGERS, _RENEWALS, _LOCKS = -1, -2, -3


class _Idle(QueueCommon[Any]):
    """Idle entries of a `Lifo`. Never waits, because a `Lifo` makes a new entry if none is idle.

    It is a list, because changes of a list are atomic and need no lock. SQLAlchemy's own queue
    takes a tenth of the time that Python needs for a statement.
    """

    def __init__(self, maxsize: int = 0, use_lifo: bool = True) -> None:
        self.maxsize = maxsize
        self.use_lifo = use_lifo
        self._entries: list[Any] = []

    def qsize(self) -> int:
        return len(self._entries)

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        del block, timeout
        # Two threads may both find room. Then the pool keeps one entry more.
        if len(self._entries) >= self.maxsize > 0:
            raise Full
        self._entries.append(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        del block, timeout
        try:
            return self._entries.pop()
        except IndexError:
            raise Empty from None


class Lifo(sa.pool.QueuePool):
    """The pool of an Engine that is created from a URL: last in, first out.

    `take()` and the Engine share the same connections. An invalidated connection is replaced before
    its next use. A connection that returns after `dispose()` is closed. `put()` does not end an
    open transaction, because its callers have none: their statements commit themselves.
    """

    _queue_class = _Idle

    def __init__(self, creator: Any, **options: Any) -> None:
        unbounded = {"use_lifo": True, "max_overflow": -1}  # `Share` limits it
        super().__init__(creator, **{**options, **unbounded})
        self._is_disposed = False

    def take(self) -> ConnectionPoolEntry:
        """Return an idle or new entry with a connection. Raises the driver's errors."""
        entry: Any = self._do_get()
        try:
            entry.get_connection()
        except BaseException as error:
            entry.invalidate(error)
            self._do_return_conn(entry)
            raise
        return entry  # type: ignore[no-any-return]

    def put(self, entry: ConnectionPoolEntry) -> None:
        """Return an entry to the pool."""
        self._do_return_conn(entry)

    def drop(self, entry: ConnectionPoolEntry) -> None:
        """Return an entry to the pool, and close its connection, because its state is unknown."""
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
        """Close idle connections now, and others when they return. The Engine gets a new pool."""
        self._is_disposed = True
        super().dispose()


def end_transaction(connection: Any, _record: Any, state: Any) -> None:
    """Roll back a connection that returns through the Engine, if a transaction is open."""
    if not state.terminate_only and connection.pgconn.transaction_status != _IDLE:
        connection.rollback()


def end_unless_committed(connection: Any, record: Any, state: Any) -> None:
    """Roll back a returning connection, unless its last statement ended its transaction.

    This is for drivers that do not report whether a transaction is open.
    """
    ended = record.info.pop(COMMITTED, False) or state.transaction_was_reset
    if not ended and not state.terminate_only:
        connection.rollback()


class Share:
    """A limited number of an Engine's connections. A `with` block may use one of them.

    Attributes:
        engine: the Engine that gives the connections.
    """

    def __init__(self, engine: sa.Engine, most: int | None, *, whose: str = "") -> None:
        self.engine = engine
        self._most = most
        self._whose = whose
        # Not a semaphore: if an interrupt hits its caller, its own lock stays locked.
        self._free: queue.SimpleQueue[None] | None = None
        if most is not None:
            self._free = queue.SimpleQueue()
            for _ in range(most):
                self._free.put(None)

    def __enter__(self) -> sa.Engine:
        if self._free is None:
            return self.engine
        try:
            self._free.get(timeout=_LONGEST_WAIT_S)
        except queue.Empty:
            raise NoConnectionError(
                f"No connection for {self._whose} within {_LONGEST_WAIT_S:g} s: all {self._most} "
                "of this process are in use. Nothing was written by this call. Let fewer threads "
                "or greenlets run in one process, or keep transactions shorter."
            ) from None
        return self.engine

    def __exit__(self, *_error: object) -> None:
        if self._free is not None:
            self._free.put(None)


class Pools:
    """The shares of one Engine, made at their first use.

    Args:
        engine: the Engine of the bodies.
        own: the Engine was created from a URL, so that its pool can be divided.
        apart: the ledger gets a separate pool even if the Engine was created from a URL.
        one: all shares use one pool.
    """

    def __init__(self, engine: sa.Engine, *, own: bool, apart: bool, one: bool) -> None:
        self._engine = engine
        self._own = own
        self._apart = apart or not own
        self._one = one
        self._others: dict[str, sa.Engine] = {}
        self._begin_anew()
        # If the user disposes of the Engine, the ledger's other connections are closed, too.
        weakref.finalize(self, _dispose, self._others).atexit = False
        mine = weakref.ref(self)

        def forget(disposed: sa.Engine) -> None:
            pools = mine()
            if pools is not None and disposed.pool is pools._engine.pool:  # noqa: SLF001  # itself
                pools.dispose()

        listen_once(engine, "engine_disposed", forget)

    def _begin_anew(self) -> None:
        """Make new shares in a forked child, because the parent's threads never return theirs."""
        self._pid = os.getpid()
        self._shares: dict[int, Share] = {}

    @property
    def renewals(self) -> Share:
        """The share of the watchdog's thread."""
        return self._share(_RENEWALS)

    @property
    def ledgers(self) -> Share:
        """The share of the ledger's own statements."""
        return self._share(_LEDGERS)

    @property
    def locks(self) -> Share:
        """The share of locks in a table, which need separate sessions.

        With gevent and eventlet, each native thread has its own share, because sockets belong to
        the native thread that made them.
        """
        plain = socket.socket.__module__ == "socket"
        return self._share(_LOCKS if plain else _LOCKS - threading.get_native_id())

    def of_body(self, depth: int) -> Share:
        """Return the share of a body that runs within `depth` other bodies' transactions."""
        return self._share(depth)

    def _share(self, number: int) -> Share:
        if self._pid != os.getpid():
            self._begin_anew()
        share = self._shares.get(number)
        if share is None:
            # No lock, because the watchdog's thread is a native one. `setdefault()` is atomic.
            share = self._shares.setdefault(number, self._make(number))
        return share

    def _make(self, number: int) -> Share:
        if self._one:
            return Share(self._engine, None)
        if number == _RENEWALS:
            return Share(self._other("renewals"), None)
        if number == 0:
            most = _MOST_OF_BODIES if self._own else None  # the user's pool has a limit of its own
            return Share(self._engine, most, whose="a body's transaction")
        most = _MOST_WITHIN if number > 0 else _MOST_OF_LEDGER
        if not self._own:
            most = min(most, _room(self._engine.pool))
        if number <= _LOCKS:
            return Share(self._other(f"locks {number}"), most, whose="locks")
        if number == _LEDGERS:
            engine = self._other("ledger") if self._apart else self._engine
            return Share(engine, most, whose="the ledger")
        engine = self._engine if self._own else self._other(f"bodies {number}")
        whose = "a body's transaction within that of another"
        return Share(engine, most, whose=whose)

    def _other(self, name: str) -> sa.Engine:
        engine = self._others.get(name)
        if engine is None:
            made = on_other_pool(self._engine)
            engine = self._others.setdefault(name, made)
        return engine

    def dispose(self) -> None:
        """Close idle connections, except those of `engine` itself and, in a child, the parent's."""
        for engine in list(self._others.values()):
            engine.dispose(close=self._pid == os.getpid())


def on_other_pool(engine: sa.Engine) -> sa.Engine:
    """Return a copy of the Engine, with its listeners and a separate pool of the same kind."""
    beneath = engine
    while hasattr(beneath, "_proxied"):  # made by execution_options(), so it has no pool
        beneath = beneath._proxied  # noqa: SLF001 - the only way to the original Engine
    beneath.dispatch  # noqa: B018 - the first access makes it, and the copy shares it
    other = copy.copy(beneath)
    other.pool = beneath.pool.recreate()
    emptied_in_children.add(other)
    same_listeners(other, beneath)
    return other if beneath is engine else other.execution_options(**engine.get_execution_options())


def _dispose(engines: dict[str, sa.Engine]) -> None:
    for engine in engines.values():
        engine.dispose()


def _room(pool: Any) -> int:
    """Return the maximum number of connections of a pool like this."""
    if isinstance(pool, sa.pool.QueuePool):
        most = pool.size() + getattr(pool, "_max_overflow", -1)
        return most if pool.size() <= most and pool.size() else _MOST_OF_LEDGER
    many = sa.pool.NullPool, sa.pool.SingletonThreadPool
    return _MOST_OF_LEDGER if isinstance(pool, many) else 1


def _forget_connections() -> None:
    """Drop the parent's connections in a forked child, which must not use or close its sockets."""
    for engine in list(emptied_in_children):
        engine.dispose(close=False)


os.register_at_fork(after_in_child=_forget_connections)
