"""Finds the guarded bodies and locks around a call, and their keys: `current_guard()`.

Guarantees: a body or lock that has ended is not found, in any context. A context is copied (asyncio
copies it for a task, `to_thread` for a thread), and the copy may outlive the body. Bodies of
another asyncio task are not found either, because that task runs at the same time.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any

from taskguard.errors import TransactionUsageError
from taskguard.run.attempt import Attempt
from taskguard.run.guard import Guard

__all__ = [
    "Running",
    "begin",
    "current_guard",
    "current_task",
    "end",
    "for_caller",
    "guard_here",
    "guard_on",
    "held_keys",
    "holders_around",
    "running",
]

_innermost: ContextVar[Running | None] = ContextVar("taskguard_running", default=None)
# The asyncio tasks that wait for this call in another thread or task: see `for_caller()`.
_callers: ContextVar[tuple[Any, ...]] = ContextVar("taskguard_callers", default=())


class Running:
    """A body or a lock that has begun.

    Attributes:
        attempt: the attempt that holds the key.
        guard: the guard of its body.
        ended: whether the body or lock has ended.
        enclosing: the body or lock around it when it began. That may have ended since.
    """

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.guard = Guard(attempt)
        self.enclosing = _not_ended(_innermost.get())
        self.ended = False
        self._task = _reference(current_task())

    @property
    def outer(self) -> Running | None:
        """The innermost body or lock around it that has not ended."""
        return _not_ended(self.enclosing)

    def forget_ended(self) -> None:
        """Drop the references to bodies and locks around it that have ended."""
        running: Running | None = self
        while running is not None:
            following = running.outer
            running.enclosing = following
            running = following

    def is_around(self, tasks: tuple[Any, ...]) -> bool:
        """Whether a call in one of these asyncio tasks runs within this body.

        A call in no task does, as in a thread that the body waits for (`to_thread`).
        """
        mine = None if self._task is None else self._task()
        return mine is None or not tasks or any(mine is each for each in tasks)


@contextmanager
def running(attempt: Attempt) -> Iterator[Guard]:
    """Make the attempt's guard the current one for a block."""
    entered = begin(attempt)
    try:
        yield entered.guard
    finally:
        end(entered)


def begin(attempt: Attempt) -> Running:
    """Make the attempt's guard the current one until `end()`."""
    entered = Running(attempt)
    _innermost.set(entered)
    return entered


def end(entered: Running) -> None:
    """End a body or a lock.

    A lock may end in another context than it began in (a `yield` dependency of FastAPI), or before
    a lock that began after it.
    """
    entered.ended = True
    here = _innermost.get()
    if here is not None:
        _innermost.set(_not_ended(here))
        here.forget_ended()


def for_caller() -> Context:
    """Return a copy of the context for a thread that the current asyncio task waits for."""
    context = copy_context()
    context.run(_callers.set, (current_task(), *_callers.get()))
    return context


def current_guard() -> Guard:
    """Return the guard of the guarded body that is running here.

    Raises:
        TransactionUsageError: no guarded body is running in this thread or greenlet.
    """
    guard = guard_here()
    if guard is None:
        raise TransactionUsageError(
            "current_guard() was called outside a guarded body. Call it in the body itself, in "
            "the thread that runs it, or take `guard` as a parameter."
        )
    return guard


def guard_here() -> Guard | None:
    """Return the guard of the guarded body that is running here, or None."""
    # `with tg.lock()` within a body has a guard, too, but not that of a body.
    bodies = (each.guard for each in _around() if not each.attempt.delivery.is_lock)
    return next(bodies, None)


def guard_on(db: Any) -> Guard | None:
    """Return the guard of a body around this call whose open transaction is on `db`."""
    return next((each.guard for each in _around() if each.attempt.is_on(db)), None)


def holders_around(keys: Iterable[str]) -> list[Attempt]:
    """Return the attempts around this call that hold one of the keys, or a slot of it.

    The innermost one comes first.
    """
    wanted = set(keys)
    return [each.attempt for each in _around() if wanted.intersection(each.attempt.held)]


def held_keys() -> set[str]:
    """Return the keys that bodies and locks around this call hold, or hold a slot of."""
    return {key for each in _around() for key in each.attempt.held}


def _around() -> Iterator[Running]:
    """Yield the bodies and locks around this call, innermost first."""
    found = _not_ended(_innermost.get())
    task, callers = current_task(), _callers.get()
    tasks = callers if task is None else (task, *callers)
    while found is not None:
        if found.is_around(tasks):
            yield found
        found = found.outer


def _not_ended(running: Running | None) -> Running | None:
    """Return this one, or the innermost one around it that has not ended."""
    while running is not None and running.ended:
        running = running.enclosing
    return running


def current_task() -> Any:
    """Return the asyncio task that runs here, or None."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or asyncio._get_running_loop() is None:  # noqa: SLF001  # exported
        return None
    return asyncio.current_task()


def _reference(task: Any) -> Callable[[], Any] | None:
    return None if task is None else weakref.ref(task)
