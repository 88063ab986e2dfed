"""The ledger, the settings and the latest readings, shared by all pages of one application.

Guarantees: `Board.shared()` reads once, while others wait for the same answer, or for its error. So
a hundred viewers cost the ledger what one viewer costs, and wait no longer than one if it is down.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from taskguard.errors import TaskguardError

if TYPE_CHECKING:
    from taskguard import TaskGuard

__all__ = ["Board"]

_Value = TypeVar("_Value")
# For how long an error is the answer: viewers that waited for it do not ask again.
_ERROR_FOR_S = 2.0


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
            until_s, found = self._read.get(name, (0.0, None))
            if until_s < time.monotonic():
                try:
                    found = read()
                except TaskguardError as error:
                    found, for_s = error, _ERROR_FOR_S
                self._read[name] = (time.monotonic() + for_s, found)
        if isinstance(found, TaskguardError):
            raise found
        answer: _Value = found
        return answer
