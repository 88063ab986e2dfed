"""Ways to stop a process."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def exiting_at_sigterm(handler: Any = None) -> Iterator[None]:
    """SIGTERM is SystemExit in whatever runs, as in Celery's children. In the main thread only."""

    def exit_now(number: int, frame: object) -> None:
        # As billiard does: a second one ends the process at once.
        signal.signal(number, signal.SIG_DFL)
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, handler or exit_now)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
