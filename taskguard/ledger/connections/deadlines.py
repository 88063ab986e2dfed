"""Deadlines for the answers to the ledger's own statements.

If a server is frozen, or the network drops packets, connections stay open: the kernel goes on
acknowledging, and drivers wait for ever. So one native thread closes the socket of a connection
that has waited too long. The driver then reports that its connection is gone.

Statements in `libpq.py` check the time themselves and need no thread: a process for one job has
none.

Guarantees: with psycopg, psycopg2 and PyMySQL, a call of the ledger ends within a second after its
deadline. A body's own statements and its COMMIT have no deadline.
"""

from __future__ import annotations

import _socket  # the operating system's sockets, even if gevent or eventlet replaced them
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from taskguard.errors import LedgerUnavailableError
from taskguard.native import Wakeup, allocate_lock, start_thread

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Deadline"]

_LOOK_EVERY_S = 0.5
_LINGER_ROUNDS = 10
# On 3.12 no thread can start while the interpreter ends, which is when the last counts are sent. So
# an idle thread sleeps there.
_SLEEPS_WHEN_IDLE = sys.version_info[:2] == (3, 12)


class Deadline:
    """A deadline for all answers in a `with` block.

    If it passes, the connection is closed, and the block raises LedgerUnavailableError.

    Args:
        driver: the driver's own connection.
        longest_s: the time until the deadline, in seconds.
        place: the database's name in messages.
        watched: True: a thread watches the deadline from the block's beginning. False: only after
            `watch()`.

    Attributes:
        at_s: the deadline, by `time.monotonic()`.
        passed: the connection did not answer in time, so it was closed.
    """

    # A class is faster than a generator, and each statement of the ledger uses one.
    __slots__ = ("_driver", "_longest_s", "_place", "_watched", "at_s", "passed")

    def __init__(self, driver: Any, longest_s: float, *, place: str, watched: bool = True) -> None:
        self.passed = False
        self._watched = watched
        self._driver = driver
        self._longest_s = longest_s
        self._place = place
        self.at_s = time.monotonic() + longest_s

    def __enter__(self) -> Self:
        if self._watched:
            _watch.add(self)
        return self

    def watch(self) -> None:
        """Let a thread watch the deadline from now on."""
        if not self._watched:
            self._watched = True
            _watch.add(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._watched:
            _watch.remove(self)
        if self.passed and isinstance(error, Exception):
            raise LedgerUnavailableError(
                f"The database {self._place} gave no answer within {self._longest_s:g} s; the "
                "connection was closed."
            ) from error

    def peek(self, now_s: float) -> None:
        """Close the socket if the deadline has passed."""
        if not self.passed and now_s >= self.at_s:
            self.passed = True
            with contextlib.suppress(Exception):  # closed already
                shared = _socket.socket(fileno=os.dup(_fileno(self._driver)))
                try:
                    shared.shutdown(_socket.SHUT_RDWR)
                finally:
                    shared.close()

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """Suspend the deadline in the block, which waits for no answer. Restart it afterwards."""
        self.at_s = float("inf")
        try:
            yield
        finally:
            self.at_s = time.monotonic() + self._longest_s


def _fileno(driver: Any) -> int:
    ask = getattr(driver, "fileno", None)
    return int(driver._sock.fileno() if ask is None else ask())  # noqa: SLF001 - PyMySQL has no other


class _Watch:
    """One thread for all deadlines of the process, while there are any."""

    def __init__(self) -> None:
        self._mutex = allocate_lock()
        self._open: set[Deadline] = set()
        self._running = False
        self._needed: Wakeup | None = None  # of a thread that sleeps

    def add(self, deadline: Deadline) -> None:
        with self._mutex:
            self._open.add(deadline)
            start, self._running = not self._running, True
            if self._needed is not None:
                self._needed.set()
                self._needed, start = None, False
        if start:
            try:
                start_thread(self._run)
            except BaseException:
                self._running = False  # the next deadline tries again to start the thread
                self.remove(deadline)
                raise

    def remove(self, deadline: Deadline) -> None:
        with self._mutex:
            self._open.discard(deadline)

    def _run(self) -> None:
        idle_rounds, never = 0, Wakeup()
        while True:
            never.wait(_LOOK_EVERY_S)
            with self._mutex:
                idle_rounds = 0 if self._open else idle_rounds + 1
                if idle_rounds > _LINGER_ROUNDS:
                    self._running, idle_rounds = False, 0
                    if not _SLEEPS_WHEN_IDLE:
                        return
                    self._needed = Wakeup()
                needed = self._needed
                now_s = time.monotonic()
                for deadline in self._open:
                    deadline.peek(now_s)
                self._open = {each for each in self._open if not each.passed}
            if needed is not None:
                needed.wait(None)


_watch = _Watch()


def _watch_nothing() -> None:
    """Reset in a forked child, which has neither the thread nor its parent's deadlines."""
    global _watch  # noqa: PLW0603 - one for the process
    _watch = _Watch()


os.register_at_fork(after_in_child=_watch_nothing)
