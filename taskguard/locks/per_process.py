"""Clients that must not be shared by processes, or by native threads whose sockets are greenlets'.

Guarantees: after a fork the child makes a client of its own. Under gevent and eventlet each native
thread has its own, because their sockets belong to the native thread that opened them.
Does not guarantee that the child closes the parent's connections. They stay open and unused in the
child, because closing them may need a lock that another thread of the parent held at the fork.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["PerProcess"]

T = TypeVar("T")


class PerProcess(Generic[T]):
    """An object of which each process has its own, made by `make()` when first needed."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: dict[tuple[int, int], T] = {}

    def get(self) -> T:
        """Return the object of this process; under gevent and eventlet, of this native thread."""
        plain = socket.socket.__module__ == "socket"
        key = os.getpid(), 0 if plain else threading.get_native_id()
        found = self._made.get(key)
        return self._made.setdefault(key, self._make()) if found is None else found
