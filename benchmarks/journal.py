"""The journal of `contention.py`: key, number, begin and end of bodies, by the monotonic clock."""

from __future__ import annotations

import functools
import json
import os
import time

from taskguard import Guard


@functools.cache
def journal() -> int:
    """The file that all processes append to; a line is written in one piece."""
    return os.open(os.environ["CONTENTION_JOURNAL"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def note(key: str, number: int, began_s: float) -> None:
    """A body has ended now."""
    line = [key, number, began_s, time.monotonic()]
    os.write(journal(), json.dumps(line).encode() + b"\n")


def work_until_commit(key: str, number: int, body_s: float, guard: Guard) -> None:
    """A body whose end is that of its transaction's COMMIT."""
    began_s = time.monotonic()
    time.sleep(body_s)
    with guard.transaction() as db:
        db.exec_driver_sql("select 1")
    note(key, number, began_s)
