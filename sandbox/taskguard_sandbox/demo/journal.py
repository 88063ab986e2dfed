"""The workers' journal for the demo: one line for each event, in one file for each worker.

Guarantees: one system call appends a line, so lines of several processes never mix. A written line
survives the death of its process. Readers see only whole lines, each once.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from taskguard import events
from taskguard_sandbox.workers import FOLDER_VARIABLE

__all__ = ["BEGAN", "FILE", "WRITES", "Line", "Tail", "listener", "write"]

FILE = "journal"
# Not events of the library: the body's own words.
BEGAN = "began"
WRITES = "writes"

_WRITTEN = (
    events.Completed, events.Dead, events.Deferred, events.Duplicate, events.Failed,
    events.LockUnavailable, events.Lost, events.StaleRefused, events.Takeover,
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """Something that happened in the process `pid` of `queue`'s worker, at `at_s` since 1970."""

    queue: str
    name: str
    key: str
    message: str = ""
    pid: int = 0
    at_s: float = 0.0
    fence: int = 0
    attempt: int = 0
    reason: str = ""


def write(line: Line) -> None:
    """Append `line`, with the pid of this process and the time, to its worker's journal."""
    entry = {**asdict(line), "pid": os.getpid(), "at_s": time.time()}
    path = Path(os.environ[FOLDER_VARIABLE]) / FILE
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(entry).encode() + b"\n")


def listener(queue: str) -> Callable[[events.Event], None]:
    """Return a listener for taskguard's events that logs them, and writes what the demo counts.

    The demo counts events of orders and invoices, but not of the relays' leases.
    """

    def listen(event: events.Event) -> None:
        events.log_event(event)
        if isinstance(event, _WRITTEN) and not event.key.startswith("leader:"):
            values: dict[str, Any] = {
                name: getattr(event, name)
                for name in ("fence", "attempt", "reason")
                if hasattr(event, name)
            }
            write(Line(queue, event.name, event.key, event.message, **values))

    return listen


class Tail:
    """The new lines of several journals, which need not exist yet."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._read_bytes = dict.fromkeys(paths, 0)

    def read(self) -> list[Line]:
        """Return the lines since the last call, ordered by time."""
        lines = [line for path in self._read_bytes for line in self._new(path)]
        return sorted(lines, key=lambda line: line.at_s)

    def _new(self, path: Path) -> list[Line]:
        try:
            with path.open("rb") as file:
                file.seek(self._read_bytes[path])
                whole = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return []
        if not whole:
            return []
        self._read_bytes[path] += len(whole) + 1
        return [Line(**json.loads(text)) for text in whole.splitlines()]
