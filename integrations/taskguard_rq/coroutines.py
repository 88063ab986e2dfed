"""Run coroutine functions as bodies: RQ awaits what a job's function returns.

Guarantees: the body runs in an event loop of its own, as RQ would run it. The claim comes before
that loop and DONE after it, in the same thread, so neither blocks the loop. A timeout or a signal
cancels the body's tasks and ends the body like any other. If a coroutine awaits a guarded job, the
job runs in a thread, and the caller's loop goes on. If that caller is cancelled, the body is
cancelled, and the caller waits until it has ended.

Not guaranteed: `guard.transaction()`, `checkpoint()` and `step()` block the body's event loop while
they wait for the database. If other tasks of the body must go on, put the block into a plain
function and `await asyncio.to_thread(…)` it. `current_guard()` works there as well. Before RQ 3, a
timeout does not cancel a body that another coroutine awaits.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from taskguard import Guard
from taskguard.integration import attempt_of

__all__ = ["in_thread", "loop_runs_here", "mark", "run_body"]


def loop_runs_here() -> bool:
    """Return True if an event loop runs in this thread."""
    return asyncio._get_running_loop() is not None  # noqa: SLF001  # exported


def mark(function: Callable[..., Any]) -> None:
    """Mark a plain function that returns coroutines as a coroutine function."""
    if sys.version_info >= (3, 12):
        inspect.markcoroutinefunction(function)
    else:  # the mark that asyncio.iscoroutinefunction() reads
        function._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]  # noqa: SLF001


def run_body(coroutine: Coroutine[Any, Any, Any], guard: Guard) -> Any:
    """Run a body in an event loop of its own. The thread must not run one already.

    With `on_lost="interrupt"`, the body is cancelled when the lease is lost.
    """
    cancellation = _of_caller.get()

    async def body() -> Any:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None  # noqa: S101

        def cancel() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(task.cancel)

        attempt_of(guard).interrupt_by(cancel)
        if cancellation is not None:
            cancellation.reaches(cancel)
        return await coroutine

    try:
        return asyncio.run(body())
    except asyncio.CancelledError:
        guard.check()  # raises if the lost lease is the reason
        raise


async def in_thread(call: Callable[[], Any]) -> Any:
    """Run `call()` in a thread. A cancellation is passed on to the body, and its end awaited."""
    cancellation = _Cancellation()
    context = contextvars.copy_context()
    context.run(_of_caller.set, cancellation)
    # A future, not a task: when the caller's loop ends, it cancels tasks, but the body goes on.
    thread = asyncio.get_running_loop().run_in_executor(None, context.run, call)
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        cancellation.cancel()
        await asyncio.wait([thread])
        if not thread.cancelled():
            thread.exception()  # the caller gets the cancellation in its place
        raise


class _Cancellation:
    """Carries a caller's cancellation to the event loop of the body."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._wanted = False
        self._cancel: Callable[[], None] | None = None

    def reaches(self, cancel: Callable[[], None]) -> None:
        """Register how to cancel the body, which has begun."""
        with self._mutex:
            self._cancel = cancel
            wanted = self._wanted
        if wanted:
            cancel()

    def cancel(self) -> None:
        """Cancel the body, now or when it begins."""
        with self._mutex:
            self._wanted = True
            cancel = self._cancel
        if cancel is not None:
            cancel()


_of_caller: contextvars.ContextVar[_Cancellation | None] = contextvars.ContextVar(
    "taskguard_cancellation", default=None
)
