"""What all pages of one application share: its ledger, its settings, and what was read just now.

Guarantees: `Board.shared()` reads once, while others wait for the same answer. So a hundred viewers
cost the ledger what one viewer costs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from taskguard import TaskGuard

__all__ = ["Board"]

_Value = TypeVar("_Value")


class Board:
    """The application that the pages show. Safe for threads.

    Args:
        tg: the application's locks and ledger.
        trusted_origins: further origins whose forms may change something.
        show_arguments: whether operators see stored arguments, results and progress.
    """

    def __init__(
        self, tg: TaskGuard, *, trusted_origins: Iterable[str] = (), show_arguments: bool = False
    ) -> None:
        self.tg = tg
        self.trusted_origins = frozenset(trusted_origins)
        self.show_arguments = show_arguments
        self._read: dict[str, tuple[float, Any]] = {}
        self._reading: dict[str, threading.Lock] = {}

    def shared(self, name: str, read: Callable[[], _Value], *, for_s: float = 2.0) -> _Value:
        """Return what was read under this name in the last seconds, or read it."""
        with self._reading.setdefault(name, threading.Lock()):
            if name in self._read and time.monotonic() - self._read[name][0] <= for_s:
                found: _Value = self._read[name][1]
                return found
            value = read()
            self._read[name] = (time.monotonic(), value)
            return value
