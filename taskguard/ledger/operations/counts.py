"""The statements that add and read `taskguard_counts`, and add to `taskguard_happenings`.

Guarantees: one statement adds to the minute and one to the totals. Both have their rows in the
order of the primary key, so that two processes wait for each other, and do not deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from taskguard.ledger.connections.dialects.base import Dialect
from taskguard.ledger.tables import COUNTS, HAPPENINGS
from taskguard.metrics import zeros_of_process, zeros_of_task
from taskguard.model.counts import Count, Noted

__all__ = ["KEPT_MINUTES", "MINUTE_US", "add", "begin", "note", "read"]

MINUTE_US = 60_000_000

KEPT_MINUTES = 48 * 60
"""For how many minutes the numbers of single minutes are kept."""

_MOST_ROWS = 500  # of a statement: SQLite allows few parameters
_DETAIL_CHARS = 500


def add(db: sa.Connection, dialect: Dialect, rows: Sequence[Count]) -> None:
    """Add numbers to the totals and to the present minute."""
    if not rows:
        return
    minute = dialect.now_us(db) // MINUTE_US
    ordered = sorted(rows, key=lambda row: (row.task, row.what))
    for bucket in (0, minute):
        for some in _in_parts(ordered):
            values = [
                {"bucket": bucket, "task": row.task, "what": row.what, "n": row.n} for row in some
            ]
            db.execute(dialect.insert_or_add(COUNTS, values, COUNTS.c.n))


def begin(db: sa.Connection, dialect: Dialect, tasks: Sequence[str]) -> None:
    """Insert the counters of tasks, and of no task, that are missing, with 0.

    It reads first, because most processes find all of them, and many rows are slow to write.
    """
    names = {("", what) for what in zeros_of_process()}
    names |= {(task, what) for task in tasks for what in zeros_of_task()}
    there = sa.select(COUNTS.c.task, COUNTS.c.what).where(
        COUNTS.c.bucket == 0, COUNTS.c.task.in_(["", *tasks])
    )
    names.difference_update((row.task, row.what) for row in db.execute(there))
    for some in _in_parts(sorted(names)):
        values = [{"bucket": 0, "task": task, "what": what, "n": 0.0} for task, what in some]
        db.execute(dialect.insert_missing(COUNTS, values))


def note(
    db: sa.Connection,
    dialect: Dialect,
    happened: Sequence[Noted],
    storable: Callable[[str], str],
) -> None:
    """Add happenings, with the database's time."""
    at_us = dialect.now_us(db) if happened else 0
    for some in _in_parts(happened):
        db.execute(sa.insert(HAPPENINGS), [_row(each, at_us, storable) for each in some])


def _row(each: Noted, at_us: int, storable: Callable[[str], str]) -> dict[str, Any]:
    detail = None if each.detail is None else storable(each.detail[:_DETAIL_CHARS])
    return {
        "at": at_us,
        "key": each.key,
        "task": each.task,
        "work": each.work,
        "what": each.what.value,
        "owner": each.owner,
        "fence": each.fence,
        "n": each.n,
        "detail": detail,
    }


def read(db: sa.Connection, dialect: Dialect, since_s: float | None) -> list[Count]:
    """Return the totals, or the numbers of the last minutes."""
    wanted = COUNTS.c.bucket == 0
    if since_s is not None:
        first = (dialect.now_us(db) - int(since_s * 1e6)) // MINUTE_US
        wanted = COUNTS.c.bucket >= max(1, first)
    columns = COUNTS.c.task, COUNTS.c.what, COUNTS.c.n, COUNTS.c.bucket
    return [Count(*row) for row in db.execute(sa.select(*columns).where(wanted))]


def _in_parts(rows: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for at in range(0, len(rows), _MOST_ROWS):
        yield rows[at : at + _MOST_ROWS]
