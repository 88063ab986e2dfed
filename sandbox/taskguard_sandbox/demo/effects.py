"""The effects: rows of a table without a unique index, so that a double one would be seen."""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

import sqlalchemy as sa

from taskguard import Guard

__all__ = ["LINE", "count_effects", "create_effects", "duration_s", "write_effect"]

LINE = "line"
"""The name under which the effects of the line are stored, as if it were a queue."""

_CREATE = sa.text("create table effects (queue text, item text, fence bigint, pid int)")
_INSERT = sa.text("insert into effects values (:queue, :item, :fence, :pid)")
_SELECT = sa.text("select item from effects where queue = :queue")


def create_effects(engine: sa.Engine) -> None:
    """Make the table."""
    with engine.begin() as db:
        db.execute(_CREATE)


def duration_s(attempt: int) -> float:
    """How long a body works before its effect.

    A body after a takeover works longer: it may be the only one left for `faults.py` to stop.
    """
    return random.uniform(0.1, 0.3) if attempt == 1 else 0.6


def write_effect(db: Any, queue: str, item: str, guard: Guard) -> None:
    """Write the effect of `item`, which must occur once, in the guard's transaction."""
    db.execute(_INSERT, {"queue": queue, "item": item, "fence": guard.fence, "pid": os.getpid()})


def count_effects(engine: sa.Engine, queue: str) -> Counter[str]:
    """Return how often each item's effect is in the database."""
    with engine.connect() as db:
        return Counter(db.execute(_SELECT, {"queue": queue}).scalars())
