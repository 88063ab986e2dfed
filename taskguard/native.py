"""Native threads and locks of the operating system, even if gevent or eventlet replaced them.

The watchdog must run while a greenlet computes. Under gevent a patched thread got 1 tick in 3 s, a
native one 15. So its thread is native, and so are the locks that it shares with greenlets.

Guarantees: these locks block and wake native threads. An error that is raised in a thread arrives
in that thread only.

Does not guarantee:

* that other greenlets run while one waits here, so hold these locks briefly;
* on Python 3.11, where the error arrives if the thread is starting another one with `_thread`.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Wakeup", "allocate_lock", "greenlets", "raise_in_thread", "start_thread"]


def greenlets() -> str | None:
    """Return `gevent` or `eventlet` if this process's threads are greenlets, otherwise None."""
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


# Read at import. A later patch replaces the name in `_thread`, and not this function.
# `allocate_lock()` is a context manager with `acquire(blocking, timeout)` and `release()`.
allocate_lock: Callable[[], Any] = _original("allocate_lock")
_start_new_thread: Callable[..., Any] = _original("start_new_thread")
_get_ident: Callable[[], int] = _original("get_ident")


# Before 3.12, a thread that has not begun has the number of its starter, and gets the errors that
# are raised in the starter. It then dies, and the starter waits for it forever.
_BEGINS_AS_ITS_STARTER = sys.version_info < (3, 12)
_MOST_LOOKS = 10_000
# Before 3.13, the interpreter looks for an error at each call until one has arrived, even if it was
# withdrawn. On 3.11 a traced thread (a debugger, coverage) then never ends its first look.
_LOOKS_UNTIL_ONE_ARRIVES = sys.version_info < (3, 13)
_starting: set[int] = set()  # threads in `start_thread()` that wait for the new thread to begin
_before_start = allocate_lock()  # guards additions to it


def _forget_other_threads() -> None:
    """Another thread may have had the lock at a fork. The child does not have that thread."""
    global _before_start  # noqa: PLW0603
    _before_start = allocate_lock()
    _starting.clear()


if _BEGINS_AS_ITS_STARTER:
    os.register_at_fork(after_in_child=_forget_other_threads)


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

    try:
        with _before_start:
            _starting.add(starter)
        _start_new_thread(begin, ())
    except BaseException:
        _starting.discard(starter)
        raise
    begun.wait(None)


def raise_in_thread(number: int, error: type[BaseException] | None) -> None:
    """Raise an error in a thread when its current C call returns.

    None withdraws an error that has not arrived yet.
    """
    import ctypes  # few processes interrupt a body, and it takes time to load

    thread, given = ctypes.c_ulong(number), error and ctypes.py_object(error)
    set_error = ctypes.pythonapi.PyThreadState_SetAsyncExc
    if _BEGINS_AS_ITS_STARTER and error is not None:
        for _ in range(_MOST_LOOKS):
            # `Thread.start()` takes the first lock, and `start_thread()` the second one. So the
            # thread starts no other between the look and the error.
            with threading._active_limbo_lock, _before_start:  # type: ignore[attr-defined]  # noqa: SLF001
                if not _is_starting_another(number):
                    set_error(thread, given)
                    return
            time.sleep(0.0001)
    set_error(thread, given)
    if error is None and _LOOKS_UNTIL_ONE_ARRIVES:
        own = ctypes.c_ulong(_get_ident())
        try:
            set_error(own, ctypes.py_object(_ArrivedError))
            while True:  # it arrives at once
                time.sleep(0)
        except _ArrivedError:
            pass
        except BaseException:  # of a signal, which comes first
            set_error(own, None)
            raise


class _ArrivedError(BaseException):
    """Arrives in the thread that withdraws an error, and ends the interpreter's look for one."""


def _is_starting_another(number: int) -> bool:
    frame = sys._current_frames().get(number)  # noqa: SLF001 - there is no other way to see it
    while frame is not None:
        if frame.f_code is threading.Thread.start.__code__:
            return frame.f_locals["self"].ident is None
        frame = frame.f_back
    return number in _starting


class Wakeup:
    """An alarm for one waiting thread. Any thread may set it off. Unnoticed alarms merge."""

    def __init__(self) -> None:
        self._closed_gate = allocate_lock()
        self._closed_gate.acquire()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the next alarm. Return False after `timeout_s` seconds; None: wait forever."""
        limit_s = -1 if timeout_s is None else max(0.0, timeout_s)
        return bool(self._closed_gate.acquire(True, limit_s))

    def set(self) -> None:
        """Set the alarm off."""
        with contextlib.suppress(RuntimeError):  # the alarm is set off already
            self._closed_gate.release()
