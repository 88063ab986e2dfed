"""The boundaries of one delivery, by name, and processes that die at one of them.

    crashes = Crashes()
    runner = Runner(locks=crashes.locks(locks), ledger=crashes.ledger(ledger))
    crashes.at = "ledger.claim done"         # call `strike()` at the next such boundary

Each call of the lock server, the ledger and the queue has two boundaries: "asked" before it and
"done" after it. So has each statement inside `guard.transaction()`, and its COMMIT. The names come
from the methods of the interfaces, so a new method adds boundaries.

Guarantees: `strike` is called only before a call leaves the process, or after its reply came back.
`strike` decides whether the process dies: `kill_process` kills it, and `Killed` ends only the
delivery, in a test that runs in one process.
"""

from __future__ import annotations

import inspect
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from taskguard.integration import ExternalConnection, Parking, Queue
from taskguard.ledger.ports import DatabaseLedger, LedgerTransaction, LineLedger
from taskguard.locks import HintingLocks, LockProvider

__all__ = ["Crashes", "Killed", "boundaries", "kill_process"]

# Methods that no delivery calls: those for operators, the outbox and the relay.
_BESIDE = frozenset(
    {"check", "close", "expire", "revoke", "view"}
    | {"abandon", "enqueue", "enqueue_external", "expired", "look", "overdue", "sent"}
)
_MOMENTS = ("asked", "done")


class Killed(BaseException):
    """Stops a delivery whose process counts as dead from here on."""


def kill_process() -> None:
    """Kill this process at once, as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def _calls(interface: type[Any]) -> list[str]:
    found = inspect.getmembers(interface, inspect.isfunction)
    return [name for name, _ in found if not name.startswith("_") and name not in _BESIDE]


_INTERFACES: dict[str, type[Any]] = {
    "locks": HintingLocks,
    "ledger": LineLedger,
    "queue": Queue,
    "parking": Parking,
    "transaction": LedgerTransaction,
}


def boundaries() -> list[str]:
    """Return the names of all boundaries, from the methods of the interfaces."""
    calls = [
        f"{port}.{name}" for port, interface in _INTERFACES.items() for name in _calls(interface)
    ]
    calls.remove("ledger.transaction")
    calls += ["transaction.begin", "transaction.statement", "transaction.commit"]
    calls += ["body", "delivery"]
    return [f"{call} {moment}" for call in sorted(calls) for moment in _MOMENTS]


class Crashes:
    """Counts the boundaries that a delivery reaches, and calls `strike` once, at one of them.

    `strike` ends the process or raises Killed. If it returns, the delivery goes on, as after a
    pause.

    Attributes:
        at: the boundary to strike at. `"ledger.renew asked#2"` means the second time. None: none.
        seen: the boundaries that were reached, in order.
        struck: True if `at` was reached.
    """

    def __init__(self, strike: Callable[[], None] = kill_process) -> None:
        self.at: str | None = None
        self.seen: list[str] = []
        self.struck = False
        self._strike = strike
        self._times: Counter[str] = Counter()
        self._dead = False

    def reset(self, at: str | None = None) -> None:
        """Forget the boundaries that were reached, and strike at `at` in the next delivery."""
        self.at, self.seen, self.struck, self._dead = at, [], False, False
        self._times.clear()

    def reach(self, boundary: str) -> None:
        """Note that a boundary was reached, and strike if it is `at`."""
        if self._dead:
            raise Killed  # a dead process does nothing more
        self._times[boundary] += 1
        times = self._times[boundary]
        name = boundary if times == 1 else f"{boundary}#{times}"
        self.seen.append(name)
        if name == self.at:
            self.struck = True
            try:
                self._strike()
            except Killed:
                self._dead = True
                raise

    @contextmanager
    def around(self, call: str) -> Iterator[None]:
        """Run a call between its two boundaries, "asked" and "done"."""
        self.reach(f"{call} asked")
        yield
        self.reach(f"{call} done")

    # -- ports --------------------------------------------------------------------------------

    def locks(self, locks: LockProvider) -> LockProvider:
        """Return the lock provider with boundaries around its calls."""
        return _Port(locks, "locks", _calls(HintingLocks), self)

    def ledger(self, ledger: DatabaseLedger) -> DatabaseLedger:
        """Return the ledger with boundaries around its calls."""
        return _PortLedger(ledger, "ledger", _calls(LineLedger), self)

    def queue(self, queue: Queue) -> Queue:
        """Return the queue with boundaries around its calls."""
        return _Port(queue, "queue", _calls(Queue), self)

    def parking(self, parking: Parking) -> Parking:
        """Return the object that parks a message with boundaries around its calls."""
        return _Port(parking, "parking", _calls(Parking), self)


class _Port:
    """Replaces an object, with boundaries around some of its methods."""

    def __init__(self, target: Any, name: str, calls: list[str], crashes: Crashes) -> None:
        self._target = target
        self._name = name
        self._calls = frozenset(calls)
        self._crashes = crashes

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if name not in self._calls:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._crashes.around(f"{self._name}.{name}"):
                return found(*args, **kwargs)

        return call


class _PortLedger(_Port):
    """Replaces a ledger, with boundaries inside its transactions as well."""

    @contextmanager
    def transaction(self, *args: Any, **kwargs: Any) -> Iterator[_Port]:
        """Open a transaction with boundaries around BEGIN, statements, its methods and COMMIT."""
        crashes = self._crashes
        opened = self._target.transaction(*args, **kwargs)
        crashes.reach("transaction.begin asked")
        tx = opened.__enter__()
        stop: Callable[[], None] = lambda: None  # noqa: E731
        try:
            try:
                crashes.reach("transaction.begin done")
                stop = _listen(tx.db, kwargs.get("on"), crashes)
                yield _Port(tx, "transaction", _calls(LedgerTransaction), crashes)
                stop()
                crashes.reach("transaction.commit asked")
            except BaseException as error:
                stop()
                if not opened.__exit__(type(error), error, error.__traceback__):
                    raise
                return
            opened.__exit__(None, None, None)
            crashes.reach("transaction.commit done")
        finally:
            stop()


def _listen(db: Any, on: Any, crashes: Crashes) -> Callable[[], None]:
    """Add boundaries around each statement of the body. Return a function that removes them."""
    statement = "transaction.statement"
    if isinstance(on, ExternalConnection):
        return on.watch_statements(
            lambda: crashes.reach(f"{statement} asked"), lambda: crashes.reach(f"{statement} done")
        )
    if not isinstance(db, sa.Connection):
        return lambda: None
    listeners = {
        "before_cursor_execute": lambda *_: crashes.reach(f"{statement} asked"),
        "after_cursor_execute": lambda *_: crashes.reach(f"{statement} done"),
    }
    for name, function in listeners.items():
        sa.event.listen(db, name, function)

    def stop() -> None:
        for name, function in list(listeners.items()):
            sa.event.remove(db, name, function)
        listeners.clear()

    return stop
