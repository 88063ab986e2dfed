"""Events of the storm's workers: a line of JSON for each event, a file for each process.

Guarantees: written lines survive the death of their writer. All times are of one clock, that of the
machine since its start, so that lines of all processes can be sorted.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from taskguard import events

FOLDER_VARIABLE = "STORM_FOLDER"
BODIES = "bodies"


def folder() -> Path:
    """Return the storm's folder, from the environment."""
    return Path(os.environ[FOLDER_VARIABLE])


def say(name: str, **values: Any) -> None:
    """Append a line."""
    line = {
        "t": time.clock_gettime(time.CLOCK_MONOTONIC),
        "at_us": time.time_ns()
        // 1000,  # to compare with the database's clock, of the same machine
        "pid": os.getpid(),
        "name": name,
    }
    with (folder() / f"journal-{os.getpid()}").open("ab", buffering=0) as file:
        file.write(json.dumps(line | values).encode() + b"\n")


def listen(event: events.Event) -> None:
    """Return a listener for taskguard's events."""
    values = {each.name: getattr(event, each.name) for each in fields(event)}
    say(event.name, **values)


@contextmanager
def in_body(item: str) -> Iterator[None]:
    """Note the process as running a body, so that faults can select it."""
    mark = folder() / BODIES / str(os.getpid())
    mark.write_text(item)
    say("began", item=item)
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            mark.unlink()


def reported(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a guarded function, and note what is reported to the queue in the end."""

    @functools.wraps(function)
    def wrapper(item: str, *args: Any, **kwargs: Any) -> Any:
        try:
            value = function(item, *args, **kwargs)
        except BaseException as error:
            say("reported", item=item, how=type(error).__name__)
            raise
        say("reported", item=item, how=type(value).__name__ if value is not None else "ok")
        return value

    return wrapper


def read(where: Path) -> list[dict[str, Any]]:
    """Return every complete line of all processes, sorted by time."""
    lines = []
    for file in where.glob("journal-*"):
        for text in file.read_bytes().split(b"\n"):
            with suppress(ValueError):  # its writer died while writing it
                lines.append(json.loads(text))
    return sorted(lines, key=lambda line: float(line["t"]))
