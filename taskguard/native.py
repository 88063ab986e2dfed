"""Threads and locks of the operating system, also where gevent or eventlet replaced them.

The watchdog has to run while a greenlet computes: under gevent a patched thread got 1 tick in
3 s, a native one 15. So its thread and the locks that it shares with greenlets are native.
Guarantees: what is made here blocks and wakes real threads; an error that is raised in a thread
arrives there and nowhere else. Does not guarantee that a greenlet that waits here lets others run:
hold these locks for moments only; nor, on Python 3.11, where such an error arrives while that
thread is starting another one by `_thread` itself.
"""

from __future__ import annotations

import _thread
import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Wakeup", "allocate_lock", "greenlets", "raise_in_thread", "start_thread"]


def greenlets() -> str | None:
    """`gevent` or `eventlet` if threads of this process are greenlets, else None."""
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        return "gevent"
    patcher = sys.modules.get("eventlet.patcher")
    if patcher is not None and patcher.is_monkey_patched("thread"):
        return "eventlet"
    return None


def _original(name: str) -> Any:
    kind = greenlets()
    if kind == "gevent":
        return sys.modules["gevent.monkey"].get_original("_thread", name)
    if kind == "eventlet":
        return getattr(sys.modules["eventlet.patcher"].original("_thread"), name)
    return getattr(_thread, name)


# Found once: who patches later replaces a name in `_thread`, not what it stood for.
# `allocate_lock()` is a context manager with `acquire(blocking, timeout)` and `release()`.
allocate_lock: Callable[[], Any] = _original("allocate_lock")
_start_new_thread: Callable[..., Any] = _original("start_new_thread")


# Until 3.12 a thread that has not begun has its starter's number, and gets the errors that are
# meant for that one. It then dies, and whoever waits for it to begin waits for ever.
_BEGINS_AS_ITS_STARTER = sys.version_info < (3, 12)
_MOST_LOOKS = 10_000
_starting: set[int] = set()  # who waits in `start_thread()` for a thread that has not begun


def start_thread(function: Callable[[], None]) -> None:
    """Run `function` in a native thread that does not keep the process alive."""
    if not _BEGINS_AS_ITS_STARTER:
        _start_new_thread(function, ())
        return
    begun, starter = Wakeup(), threading.get_ident()

    def begin() -> None:
        _starting.discard(starter)
        begun.set()
        function()

    _starting.add(starter)
    try:
        _start_new_thread(begin, ())
    except BaseException:
        _starting.discard(starter)
        raise
    begun.wait(None)


def raise_in_thread(number: int, error: type[BaseException] | None) -> None:
    """Raise an error in a thread, once its present C call returns.

    None: one that has not arrived yet does not arrive any more.
    """
    import ctypes  # few processes interrupt a body, and it takes time to load

    thread, given = ctypes.c_ulong(number), error and ctypes.py_object(error)
    looks = _MOST_LOOKS if _BEGINS_AS_ITS_STARTER and error is not None else 0
    while looks and _is_starting_another(number):
        looks -= 1
        time.sleep(0.0001)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, given)


def _is_starting_another(number: int) -> bool:
    frame = sys._current_frames().get(number)  # noqa: SLF001 - there is no other way to see it
    while frame is not None:
        if frame.f_code is threading.Thread.start.__code__:
            return frame.f_locals["self"].ident is None
        frame = frame.f_back
    return number in _starting


class Wakeup:
    """An alarm that one thread waits for and any thread sets off; unheeded alarms merge."""

    def __init__(self) -> None:
        self._closed_gate = allocate_lock()
        self._closed_gate.acquire()

    def wait(self, timeout_s: float | None) -> bool:
        """Return at the next alarm, or, False, after `timeout_s` seconds; None waits for ever."""
        limit_s = -1 if timeout_s is None else max(0.0, timeout_s)
        return bool(self._closed_gate.acquire(True, limit_s))

    def set(self) -> None:
        """Set the alarm off."""
        with contextlib.suppress(RuntimeError):  # the alarm is set off already
            self._closed_gate.release()
