"""Decides whether a shutdown of this process ended a body, or the body itself.

A shutdown comes from outside. A signal's handler raises SystemExit in the code that it interrupts
(as in Celery's pool children, RQ's workers and gunicorn). Ctrl-C is KeyboardInterrupt. A greenlet
that is killed gets GreenletExit. After a shutdown another worker does the work at once, and no
crash is counted. If the body calls `sys.exit()` (argparse and click do), it ends every process that
runs it, so it counts as a crash.

Does not recognise a body that reads a flag of a handler and then exits by itself. That counts as a
crash. Such a body should return, or raise an exception.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

__all__ = ["is_cancellation", "is_shutdown", "is_time_limit", "raised_by_handler"]


def is_cancellation(error: BaseException) -> bool:
    """Return True for asyncio's CancelledError. In a body without a loop it is a failure."""
    # asyncio is not imported for this: a body that raises its error has it loaded.
    asyncio = sys.modules.get("asyncio.exceptions")
    return asyncio is not None and isinstance(error, asyncio.CancelledError)


def is_time_limit(error: BaseException) -> bool:
    """Return True for an Exception, and for the Timeout of gevent or eventlet, which is none."""
    modules = (sys.modules.get(f"{name}.timeout") for name in ("gevent", "eventlet"))
    kinds = (getattr(module, "Timeout", Exception) for module in modules)
    return isinstance(error, (Exception, *kinds))


def is_shutdown(error: BaseException) -> bool:
    """Return True if a signal or a kill told this process or greenlet to stop."""
    return any(_comes_from_outside(each) for each in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and those that it was raised from: click makes SystemExit of Ctrl-C."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            left += [each.__cause__, each.__context__]


def _comes_from_outside(error: BaseException) -> bool:
    if isinstance(error, Exception):
        return False  # a time limit, for example, which is raised by a signal's handler, too
    greenlet = sys.modules.get("greenlet")
    if greenlet is not None and isinstance(error, greenlet.GreenletExit):
        return True
    if isinstance(error, KeyboardInterrupt) and _may_be_ctrl_c():
        return True
    return raised_by_handler(error)


def _may_be_ctrl_c() -> bool:
    """The interpreter's own handler leaves no frame behind."""
    in_main = threading.current_thread() is threading.main_thread()
    return in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def raised_by_handler(error: BaseException) -> bool:
    """Return True if the handler of a signal raised the error, as that of a time limit does."""
    handlers = _handlers()
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code in handlers or _takes_signal(frame):
            return True
        traceback = traceback.tb_next
    return False


def _handlers() -> set[Any]:
    """The code of the signal handlers that are installed."""
    found = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        code = getattr(getattr(handler, "__func__", handler), "__code__", None)
        if code is not None:
            found.add(code)
    return found


def _takes_signal(frame: FrameType) -> bool:
    """Return True if a function was called like a handler: with a number and a frame.

    This finds handlers that install another handler before they raise.
    """
    code = frame.f_code
    known = code.co_argcount + code.co_kwonlyargcount
    values = [frame.f_locals.get(name) for name in code.co_varnames[:known]]
    if code.co_flags & inspect.CO_VARARGS:
        rest = frame.f_locals.get(code.co_varnames[known])
        values += rest if type(rest) is tuple else ()
    # With type(), because isinstance() reads the `__class__` of a proxy object.
    kinds = [type(value) for value in values]
    return any(
        interrupted is FrameType and issubclass(number, int)
        for number, interrupted in itertools.pairwise(kinds)
    )
