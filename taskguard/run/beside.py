"""Runs blocking calls of coroutines in threads, so that their event loop goes on.

Guarantees: a call that has begun runs to its end, even if the coroutine that awaits it is cancelled
or its event loop ends. There are as many threads as calls, so a call never waits for another one to
end. Threads are used again. A forked child has threads of its own.

This module loads asyncio. It is imported when a coroutine first needs it.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

__all__ = ["in_line", "run"]

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
