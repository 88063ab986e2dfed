"""Runs blocking calls of coroutines in threads, so that their event loop goes on.

Guarantees: a call that has begun runs to its end, even if the coroutine that awaits it is cancelled
or its event loop ends. There are as many threads as calls, so a call never waits for another one to
end. Threads are used again. A forked child has threads of its own.

A guarded coroutine function runs in two places: its delivery in a thread, and its body in the event
loop of its caller. If the caller is cancelled, so is the body, and the caller waits for its end.

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


class _Caller:
    """The coroutine that awaits a delivery, as the thread of the delivery sees it.

    Attributes:
        loop: its event loop. The other attributes are for the thread of that loop.
        body: the task of the body. None: the body has not begun.
        cancelled: whether the caller was cancelled.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.body: asyncio.Task[Any] | None = None
        self.cancelled = False

    def begin(self, coroutine: Coroutine[Any, Any, Any], ended: Future[Any]) -> None:
        """Begin the body in the context of this call, and hand its result to `ended`."""
        if self.cancelled:
            coroutine.close()
            ended.set_exception(asyncio.CancelledError())
            return
        self.body = self.loop.create_task(coroutine)
        self.body.add_done_callback(lambda body: _hand_over(body, ended))


_caller: contextvars.ContextVar[_Caller] = contextvars.ContextVar("taskguard_caller")


def _hand_over(body: asyncio.Task[Any], ended: Future[Any]) -> None:
    error = asyncio.CancelledError() if body.cancelled() else body.exception()
    if error is None:
        ended.set_result(body.result())
    else:
        ended.set_exception(error)


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
        if caller.body is None:
            _executor().submit(give_up)
            raise
        caller.body.cancel()
        await asyncio.wait([waits])
        raise


def run_body(coroutine: Coroutine[Any, Any, Any], attempt: Attempt) -> Any:
    """Run a body in the event loop of the caller, and wait for its end.

    With `on_lost="interrupt"`, the body is cancelled when the lease is lost.
    """
    caller, ended = _caller.get(), Future[Any]()

    def cancel() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            caller.loop.call_soon_threadsafe(lambda: caller.body and caller.body.cancel())

    attempt.interrupt_by(cancel)
    try:
        caller.loop.call_soon_threadsafe(
            caller.begin, coroutine, ended, context=contextvars.copy_context()
        )
    except RuntimeError:  # the loop has ended
        coroutine.close()
        raise asyncio.CancelledError from None
    try:
        return ended.result()
    except asyncio.CancelledError:
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
