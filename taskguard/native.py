"""Threads and locks of the operating system, also where gevent or eventlet replaced them.

The watchdog has to run while a greenlet computes: under gevent a patched thread got 1 tick in
3 s, a native one 15. So its thread and the locks that it shares with greenlets are native.
Guarantees: what is made here blocks and wakes real threads. Does not guarantee that a greenlet
that waits here lets others run: hold these locks for moments only.
"""

from __future__ import annotations

import _thread
import contextlib
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["Wakeup", "allocate_lock", "greenlets", "start_thread"]


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


def start_thread(function: Callable[[], None]) -> None:
    """Run `function` in a native thread that does not keep the process alive."""
    _start_new_thread(function, ())


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
