"""Whether the next message of a line may be promoted: what its key has room for.

A key without `limit=` and `rate=` has room if no delivery holds it, and no promoted message is
expected. For the others, slots and rate count in addition.

Read next: `taskguard/model/bounds.py` for the rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import sqlalchemy as sa

from taskguard.ledger.lines import states
from taskguard.ledger.tables import KEYS, WORK
from taskguard.model.bounds import Bounds, Rate, range_of_slots

__all__ = ["Room", "holders", "of_bounds", "of_key"]


class Room(Protocol):
    """Whether somebody may be called: in how many µs his work may begin; None: nobody may be."""

    def __call__(self, db: sa.Connection, key: str, now_us: int, task: str) -> int | None: ...


def of_key(db: sa.Connection, key: str, now_us: int, task: str) -> int | None:
    """Nobody may be called while the key is held, or another one is expected."""
    del task
    held = sa.select(sa.literal(1)).where(KEYS.c.key == key, KEYS.c.lease_until > now_us)
    called = sa.select(sa.literal(1)).where(states.called_of(WORK, key, now_us))
    return 0 if db.execute(sa.union_all(held, called).limit(1)).first() is None else None


def of_bounds(
    db: sa.Connection,
    key: str,
    now_us: int,
    task: str,
    *,
    bounds: Bounds | None,
    ahead_us: int,
    rates: Mapping[str, Rate | None],
) -> int | None:
    """Whether somebody may be called: fewer hold a key, and are expected, than its limit allows.

    And its rate allows a start in at most `ahead_us`: in how many µs. Without `bounds` it goes by
    what was noted last, and of a key with a rate it calls one at a time. What `rates` says of the
    task counts more than a rate that was noted: a deploy has removed or raised it.
    """
    noted = db.execute(sa.select(KEYS.c.slots, KEYS.c.next_start).where(KEYS.c.key == key)).first()
    slots, next_start = (None, None) if noted is None else noted
    limit = bounds.limit if bounds is not None else slots or 1
    called = sa.select(sa.func.count()).select_from(WORK)
    called = called.where(states.called_of(WORK, key, now_us))
    expected = int(db.execute(called).scalar_one())
    alone = sa.select(KEYS.c.key).where(KEYS.c.key == key, KEYS.c.lease_until > now_us)
    held = 0
    if limit > 1:
        held = int(db.execute(sa.select(holders(key, now_us))).scalar_one())
    if expected + held >= limit or db.execute(alone).first() is not None:
        return None
    if bounds is None and next_start is not None and task in rates:
        rate = rates[task]
        opens_us = None if rate is None else rate.opens_us(next_start, now_us)
        if opens_us is not None and opens_us != next_start:
            # Noted, as a claim does: from the next look on the interval has begun.
            db.execute(sa.update(KEYS).where(KEYS.c.key == key).values(next_start=opens_us))
        next_start = opens_us
    opens_us = next_start or 0
    if bounds is not None and bounds.rate is not None:
        opens_us = bounds.rate.opens_us(next_start, now_us)
        for _ in range(expected):  # each of them is going to start
            opens_us = bounds.rate.charged_us(opens_us, max(opens_us, now_us))
    elif expected and next_start is not None:
        return None
    wait_us = max(0, opens_us - now_us)
    return wait_us if wait_us <= ahead_us else None


def holders(key: Any, now_us: int) -> Any:
    """How many hold one of a key's slots; a key of a template with a '#' may count as one."""
    held = KEYS.alias()
    first, after = range_of_slots(key)
    slots = held.c.key > first, held.c.key < after, held.c.lease_until > now_us
    return sa.select(sa.func.count()).select_from(held).where(*slots).scalar_subquery()
