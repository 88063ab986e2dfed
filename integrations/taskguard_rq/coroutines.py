"""Coroutines as bodies: RQ awaits what a job's function returns, so `@guarded_job` does.

Guarantees: the body has an event loop of its own for as long as it runs, as RQ would give it one.
The claim comes before that loop and DONE after it, in the same thread, so that neither holds up
the loop, and a time-out or a signal ends the body as it ends any other: its tasks are cancelled,
and what it was told is what the record says. A call from within another loop goes to a thread, and
its caller's loop goes on; cancelled there, the body is cancelled and its end waited for.

Does not guarantee that the guard's own calls in the body leave its loop alone:
`guard.transaction()`, `checkpoint()` and `step()` block it while they talk to the database. Where
other tasks of the body must go on meanwhile, `await asyncio.to_thread(…)` a plain function that has
the block in it; `current_guard()` works there, too. Nor that a body which another coroutine awaits
ends at a time-out of RQ's before 3: that leaves its loop without cancelling what runs there.
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
    """Whether an event loop runs in this thread."""
    return asyncio._get_running_loop() is not None  # noqa: SLF001  # exported


def mark(function: Callable[..., Any]) -> None:
    """Mark a plain function that returns coroutines as a coroutine function."""
    if sys.version_info >= (3, 12):
        inspect.markcoroutinefunction(function)
    else:  # the mark that asyncio.iscoroutinefunction() reads
        function._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]  # noqa: SLF001


def run_body(coroutine: Coroutine[Any, Any, Any], guard: Guard) -> Any:
    """Run a body in an event loop of its own; the thread must have none.

    With `on_lost="interrupt"` the body is cancelled once the lease is lost.
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
    """`call()` in a thread. Cancelled, it cancels the body that runs there, and waits for it."""
    cancellation = _Cancellation()
    context = contextvars.copy_context()
    context.run(_of_caller.set, cancellation)
    # A future, not a task: the end of the caller's loop would cancel a task, and the body goes on.
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
        """The body has begun."""
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
