"""Pools of connections, and who may have how many: bodies, the ledger itself, and renewals.

Guarantees: bodies, however many there are, never take the connections by which the ledger claims,
completes and ends, nor those of bodies within their transactions; a caller who gets none within
seconds gets an error; and a process has at most so many:

* bodies' transactions: 50; on an Engine of the user's own, what its pool has;
* the ledger itself, for moments: 20;
* for each level of guarded bodies within others' transactions: 10;
* renewals: one, on a pool of their own, for their thread is a native one;
* locks in a table of MariaDB or MySQL, for moments: 20, on a pool of their own.

On an Engine of the user's own all but the first come from further pools of the same kind, each of
no more connections than the Engine's. On SQLite there is one pool: an open transaction stops the
others anyway.

An Engine that is made here has a `Lifo`: SQLAlchemy's pool, also for statements that need nothing
of SQLAlchemy, for to take a connection as an Engine does costs 16 µs: an object that returns it
when it is forgotten, its events, a look at whether a transaction is open. All pools are empty in a
forked child.

Does not guarantee that the server has as many.
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

COMMITTED = "taskguard_committed"  # in a connection's `info`: nothing came after its last COMMIT
_IDLE = 0  # psycopg.pq.TransactionStatus
# Their connections are the parent's.
emptied_in_children: weakref.WeakSet[sa.Engine] = weakref.WeakSet()

_MOST_OF_BODIES, _MOST_OF_LEDGER, _MOST_WITHIN = 50, 20, 10
_LONGEST_WAIT_S = 10.0
# Numbers of shares; the others are those of bodies, by depth.
_LEDGERS, _RENEWALS, _LOCKS = -1, -2, -3


class _Idle(QueueCommon[Any]):
    """Entries that nobody has. Never waits, for a `Lifo` makes as many as are wanted.

    A list, whose changes cannot be interrupted halfway, and take no lock: SQLAlchemy's own queue
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
        # Two at once may both find room: then there is one more than the pool keeps.
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
    """The pool of an Engine that is made here; the connection that came back last goes first.

    Whoever takes one and whoever has one by the Engine share the same connections; one that was
    invalidated is connected anew before it is given, one that comes back after `dispose()` is
    closed. Does not end a transaction that is open on what is put back: a statement that commits
    itself has none.
    """

    _queue_class = _Idle

    def __init__(self, creator: Any, **options: Any) -> None:
        unbounded = {"use_lifo": True, "max_overflow": -1}  # its users count: `Share`
        super().__init__(creator, **{**options, **unbounded})
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


class Share:
    """At most so many connections of an Engine: a `with` block has the right to one of them.

    Attributes:
        engine: where the connections come from.
    """

    def __init__(self, engine: sa.Engine, most: int | None, *, whose: str = "") -> None:
        self.engine = engine
        self._most = most
        self._whose = whose
        # Not a semaphore, whose own lock stays taken where an interrupt hits its caller.
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
    """The shares of one Engine, made when they are first asked for.

    Args:
        engine: the Engine of the bodies.
        own: the Engine was made from a URL, so that its pool can be divided.
        apart: the ledger gets a pool of its own also where the Engine was made from a URL.
        one: everything is on one pool.
    """

    def __init__(self, engine: sa.Engine, *, own: bool, apart: bool, one: bool) -> None:
        self._engine = engine
        self._own = own
        self._apart = apart or not own
        self._one = one
        self._others: dict[str, sa.Engine] = {}
        self._begin_anew()
        # A user who disposes of an Engine of his own has closed the ledger's connections, too.
        weakref.finalize(self, _dispose, self._others).atexit = False
        mine = weakref.ref(self)

        def forget(disposed: sa.Engine) -> None:
            pools = mine()
            if pools is not None and disposed.pool is pools._engine.pool:  # noqa: SLF001  # itself
                pools.dispose()

        listen_once(engine, "engine_disposed", forget)

    def _begin_anew(self) -> None:
        """Start anew in a forked child: nobody there returns what the parent's threads took."""
        self._pid = os.getpid()
        self._shares: dict[int, Share] = {}

    @property
    def renewals(self) -> Share:
        """For the watchdog's thread alone."""
        return self._share(_RENEWALS)

    @property
    def ledgers(self) -> Share:
        """For the ledger's own statements."""
        return self._share(_LEDGERS)

    @property
    def locks(self) -> Share:
        """For locks in a table, whose sessions are theirs alone.

        Sockets of gevent and eventlet belong to the native thread that made them.
        """
        plain = socket.socket.__module__ == "socket"
        return self._share(_LOCKS if plain else _LOCKS - threading.get_native_id())

    def of_body(self, depth: int) -> Share:
        """For the transaction of a body that runs within `depth` others' transactions."""
        return self._share(depth)

    def _share(self, number: int) -> Share:
        if self._pid != os.getpid():
            self._begin_anew()
        share = self._shares.get(number)
        if share is None:
            # No lock: the watchdog's thread is a native one, and `setdefault()` is atomic.
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
        """Close the idle connections of all but `engine`; in a child they are its parent's."""
        for engine in list(self._others.values()):
            engine.dispose(close=self._pid == os.getpid())


def on_other_pool(engine: sa.Engine) -> sa.Engine:
    """The same Engine, with its listeners, on other connections of the same kind."""
    beneath = engine
    while hasattr(beneath, "_proxied"):  # made by execution_options(), which has no pool of its own
        beneath = beneath._proxied  # noqa: SLF001 - there is no other way to what it is made of
    beneath.dispatch  # noqa: B018 - made when it is first looked at, and so for both
    other = copy.copy(beneath)
    other.pool = beneath.pool.recreate()
    emptied_in_children.add(other)
    same_listeners(other, beneath)
    return other if beneath is engine else other.execution_options(**engine.get_execution_options())


def _dispose(engines: dict[str, sa.Engine]) -> None:
    for engine in engines.values():
        engine.dispose()


def _room(pool: Any) -> int:
    """How many connections a pool like this may have at a time."""
    if isinstance(pool, sa.pool.QueuePool):
        most = pool.size() + getattr(pool, "_max_overflow", -1)
        return most if pool.size() <= most and pool.size() else _MOST_OF_LEDGER
    many = sa.pool.NullPool, sa.pool.SingletonThreadPool
    return _MOST_OF_LEDGER if isinstance(pool, many) else 1


def _forget_connections() -> None:
    """A child must not speak on its parent's sockets, nor close them."""
    for engine in list(emptied_in_children):
        engine.dispose(close=False)


os.register_at_fork(after_in_child=_forget_connections)
