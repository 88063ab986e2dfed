"""Wakes waiters when their key is released: LISTEN on one connection for the whole process.

Guarantees: waiters do not depend on it. `hears` becomes True only after the listener has received
its own notification, sent over another connection. Until then, and behind a pooler, waiters poll.
The connection is open while waiters exist, and a few seconds longer. A forked process does not use
its parent's connection. Under gevent and eventlet each native thread has its own connection,
because greenlets of different threads cannot share a socket.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from taskguard.ledger.connections.database import Database
from taskguard.lock_table.postgresql import CHANNEL

__all__ = ["Listener", "Waiter"]

_LOOK_EVERY_S = 0.5
_LINGER_S = 10.0
# How long to poll only, after a failure to connect, and if a pooler swallows notifications.
_REST_S, _REST_OF_POOLED_S = 5.0, 3_600.0
_MOST_OF_NAME = 1_000  # as in free.sql
_END_S = 5.0


class Waiter:
    """A caller that waits for one or more names.

    Attributes:
        woken_by: the name in the notification; "" if the waiter shall only check again.
    """

    def __init__(self, ear: _Ear) -> None:
        self._ear = ear
        self._woken = threading.Event()
        self.woken_by = ""

    @property
    def hears(self) -> bool:
        """Return whether a release from now on wakes this waiter."""
        return self._ear.hears

    def wait(self, timeout_s: float) -> bool:
        """Block until `wake()` or the timeout; return True if it was woken."""
        return self._woken.wait(timeout_s)

    def wake(self, name: str = "") -> None:
        """End the wait. `name` is the name in the notification."""
        self.woken_by = name
        self._woken.set()


class Listener:
    """The waiters of this process, and the connections that wake them."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._ears: dict[int, _Ear] = {}
        self._pid = os.getpid()
        self._parents: list[Any] = []

    @contextmanager
    def waiting(self, *names: str) -> Iterator[Waiter]:
        """Yield a waiter that a notification of one of these names wakes."""
        ear = self._ear()
        waiter = Waiter(ear)
        for name in names:
            ear.add(name[:_MOST_OF_NAME], waiter)
        try:
            yield waiter
        finally:
            for name in names:
                ear.remove(name[:_MOST_OF_NAME], waiter)

    def close(self) -> None:
        """Close the connection; the next waiter opens another."""
        if self._pid != os.getpid():
            return
        for ear in list(self._ears.values()):
            ear.close()
        self._ears.clear()

    def _ear(self) -> _Ear:
        if self._pid != os.getpid():
            # Keep the parent's connections: garbage collection would close them.
            self._parents.append(self._ears)
            self._ears, self._pid = {}, os.getpid()
        plain = socket.socket.__module__ == "socket"
        lane = 0 if plain else threading.get_native_id()
        ear = self._ears.get(lane)
        return ear if ear is not None else self._ears.setdefault(lane, _Ear(self._database))


class _Ear:
    """One listening connection and its thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._mutex = threading.Lock()
        self._waiters: dict[str, set[Waiter]] = {}
        self._thread: threading.Thread | None = None
        self._connection: Any = None
        self._rests_until_s = 0.0
        self._idle_since_s = 0.0
        self._is_closed = False
        self.hears = False

    def add(self, name: str, waiter: Waiter) -> None:
        with self._mutex:
            self._waiters.setdefault(name, set()).add(waiter)
            wanted = self._thread is None and time.monotonic() >= self._rests_until_s
            if wanted and not self._is_closed:
                thread = threading.Thread(
                    target=self._run, name="taskguard-lock-waiters", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:  # the process can start no more threads
                    return
                self._thread = thread

    def remove(self, name: str, waiter: Waiter) -> None:
        with self._mutex:
            waiters = self._waiters[name]
            waiters.discard(waiter)
            if not waiters:
                del self._waiters[name]
            if not self._waiters:
                self._idle_since_s = time.monotonic()

    def close(self) -> None:
        """Stop the thread and close its connection."""
        with self._mutex:
            self._is_closed = True
            thread, connection = self._thread, self._connection
        if thread is None:
            return
        if connection is not None:
            _shut(connection)
        thread.join(_END_S)

    def _run(self) -> None:
        connection = None
        try:
            connection = self._connect()
            if connection is not None:
                self._listen(connection)
        except Exception:  # noqa: BLE001  # waiters poll until it works again
            self._rests_until_s = time.monotonic() + _REST_S
        finally:
            self.hears = False
            with self._mutex:
                self._thread = self._connection = None
                waiters = [each for several in self._waiters.values() for each in several]
            if connection is not None:
                with contextlib.suppress(Exception):
                    connection.close()
            for waiter in waiters:
                waiter.wake()  # it checks its key and waits again

    def _connect(self) -> Any:
        """Return a connection outside of the pools, or None if listening is useless or over."""
        connection = self._database.lone_connection()
        with self._mutex:
            self._connection = connection
        # Behind a transaction pooler, LISTEN runs in a session that then serves another client.
        if self._is_closed or _is_pooled(connection):
            self._rests_until_s = time.monotonic() + _REST_OF_POOLED_S
            connection.close()
            return None
        return connection

    def _listen(self, connection: Any) -> None:
        connection.execute(f"listen {CHANNEL}")
        proof = f" {os.urandom(12).hex()}"  # names of keys do not start with a blank
        self._database.ask(f"select pg_notify('{CHANNEL}', %(proof)s::text)", {"proof": proof})
        while not self._is_over():
            for note in connection.notifies(timeout=_LOOK_EVERY_S, stop_after=1):
                if note.payload == proof:
                    self.hears = True
                else:
                    self._wake(note.payload)

    def _is_over(self) -> bool:
        """Return True if it was closed, or no waiter came for `_LINGER_S`.

        A waiter that comes later starts a new thread.
        """
        with self._mutex:
            if self._waiters and not self._is_closed:
                return False
            over = self._is_closed or time.monotonic() - self._idle_since_s > _LINGER_S
            if over:
                self.hears = False
            return over

    def _wake(self, name: str) -> None:
        with self._mutex:
            waiters = list(self._waiters.get(name, ()))
        for waiter in waiters:
            waiter.wake(name)


def _shut(connection: Any) -> None:
    """Shut the connection's socket down, which ends a read in another thread."""
    with contextlib.suppress(Exception):  # closed already
        shared = socket.socket(fileno=os.dup(connection.fileno()))
        try:
            shared.shutdown(socket.SHUT_RDWR)
        finally:
            shared.close()


def _is_pooled(connection: Any) -> bool:
    """Return whether a pooler is in front: its greeting has another number than the session."""
    [pid] = connection.execute("select pg_backend_pid()").fetchone()
    return bool(pid != connection.info.backend_pid)
