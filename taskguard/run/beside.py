"""Runs blocking calls of coroutines in threads, so that their event loop goes on.

Guarantees: a call that has begun runs to its end, even if the coroutine that awaits it is cancelled
or its event loop ends. There are as many threads as calls, so a call never waits for another one to
end. Threads are used again. A forked child has threads of its own.

A guarded coroutine function runs in two places: its delivery in a thread, and its body in the event
loop of its caller. If the caller is cancelled, so is the body, and the caller waits for its end. If
the body has not begun by then, it never does, and the work is given back.

This module loads asyncio. It is imported when a coroutine first needs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from taskguard.run.attempt import Attempt
from taskguard.run.current import for_caller

__all__ = ["deliver", "in_line", "run", "run_body"]

_Result = TypeVar("_Result")

_MOST_THREADS = 100_000

_threads: tuple[int, ThreadPoolExecutor] | None = None
_lines: weakref.WeakKeyDictionary[
    asyncio.AbstractEventLoop, weakref.WeakValueDictionary[object, asyncio.Lock]
] = weakref.WeakKeyDictionary()


async def run(
    function: Callable[[], _Result], abandon: Callable[[Future[_Result]], object] | None = None
) -> _Result:
    """Run `function()` in a thread.

    If the coroutine is cancelled meanwhile, the call goes on. Then `abandon(call)` runs in another
    thread.
    """
    call = _executor().submit(function)
    waits = asyncio.wrap_future(call)
    try:
        return await asyncio.shield(waits)
    except asyncio.CancelledError:
        waits.add_done_callback(lambda done: done.cancelled() or done.exception())
        if abandon is not None:
            _executor().submit(abandon, call)
        raise


class _Run:
    """One run of a body in the event loop of its caller.

    Attributes:
        ended: its result, for the thread of the delivery.
        begun: whether the code of the body has begun.
        task: the task of the body. None: the event loop has not come to it.
    """

    def __init__(self, body: Coroutine[Any, Any, Any]) -> None:
        self.ended: Future[Any] = Future()
        self.begun = False
        self.task: asyncio.Task[Any] | None = None
        self._body = body

    def begin(self) -> None:
        """Begin the body in the context of this call, unless it was cancelled before."""
        if not self.ended.done():
            self.task = asyncio.create_task(self._await())
            self.task.add_done_callback(self._end)

    def cancel(self) -> None:
        """Cancel the body. It ends later if it has begun."""
        if self.task is not None:
            self.task.cancel()
        elif not self.ended.done():
            self.ended.set_exception(asyncio.CancelledError())

    async def _await(self) -> Any:
        self.begun = True
        return await self._body

    def _end(self, task: asyncio.Task[Any]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            self.ended.set_result(task.result())
        else:
            self.ended.set_exception(error)


class _Caller:
    """The coroutine that awaits a delivery, as the thread of the delivery sees it.

    Attributes:
        loop: its event loop.
        run: the last run of the body. None: there was none.
        cancelled: whether the caller was cancelled.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.run: _Run | None = None
        self.cancelled = False


_caller: contextvars.ContextVar[_Caller] = contextvars.ContextVar("taskguard_caller")


async def deliver(delivery: Callable[[], _Result], give_up: Callable[[], object]) -> _Result:
    """Run a delivery in a thread. Its body calls `run_body()` there.

    If the coroutine is cancelled before the body begins, `give_up()` runs in another thread.
    """
    caller, context = _Caller(), for_caller()
    context.run(_caller.set, caller)
    waits = asyncio.wrap_future(_executor().submit(context.run, delivery))
    try:
        return await asyncio.shield(waits)
    except asyncio.CancelledError:
        waits.add_done_callback(lambda done: done.cancelled() or done.exception())
        caller.cancelled = True
        run = caller.run
        if run is not None:
            run.cancel()
        if run is None or run.task is None:
            _executor().submit(give_up)
            raise
        await asyncio.wait([waits])
        raise


def run_body(coroutine: Coroutine[Any, Any, Any], attempt: Attempt) -> Any:
    """Run a body in the event loop of the caller, and wait for its end.

    With `on_lost="interrupt"`, the body is cancelled when the lease is lost. If a body is cancelled
    before its code has begun, `attempt.never_began` is set.
    """
    caller, run = _caller.get(), _Run(coroutine)

    def cancel() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            caller.loop.call_soon_threadsafe(run.cancel)

    attempt.interrupt_by(cancel)
    caller.run = run  # the caller sets `cancelled` first, then reads this: one of the two sees it
    try:
        if caller.cancelled:
            raise asyncio.CancelledError
        try:
            caller.loop.call_soon_threadsafe(run.begin, context=contextvars.copy_context())
        except RuntimeError:  # the loop has ended
            raise asyncio.CancelledError from None
        return run.ended.result()
    except asyncio.CancelledError:
        if not run.begun:
            coroutine.close()
            attempt.never_began = True
        attempt.lease.check()  # raises if the lost lease is the reason
        raise


@asynccontextmanager
async def in_line(name: object, *, wait_s: float) -> AsyncIterator[None]:
    """Wait until the coroutines of this event loop that came earlier with this name have left.

    Raises TimeoutError after `wait_s`.
    """
    lines = _lines.setdefault(asyncio.get_running_loop(), weakref.WeakValueDictionary())
    turn = lines.setdefault(name, asyncio.Lock())
    async with asyncio.timeout(wait_s):
        await turn.acquire()
    try:
        yield
    finally:
        turn.release()


def _executor() -> ThreadPoolExecutor:
    global _threads  # noqa: PLW0603  # one for the process
    if _threads is None or _threads[0] != os.getpid():
        executor = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="taskguard")
        _threads = (os.getpid(), executor)
    return _threads[1]
