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
    """Returns in how many µs the next message may begin. None: no message may be promoted."""

    def __call__(self, db: sa.Connection, key: str, now_us: int, task: str) -> int | None: ...


def of_key(db: sa.Connection, key: str, now_us: int, task: str) -> int | None:
    """Return 0 if no delivery holds the key, and no promoted message is expected. Else None."""
    del task
    held = sa.select(sa.literal(1)).where(KEYS.c.key == key, KEYS.c.lease_until > now_us)
    promoted = sa.select(sa.literal(1)).where(states.expected_of(WORK, key, now_us))
    return 0 if db.execute(sa.union_all(held, promoted).limit(1)).first() is None else None


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
    """Return in how many µs the next message may begin, or None if no message may be promoted.

    A message may be promoted if fewer deliveries hold the key, and are expected, than its limit
    allows, and if its rate allows a start in at most `ahead_us`. Without `bounds` the limit and
    the start on record count, and a key with a rate gets one promotion at a time. A rate in `rates`
    counts more than the start on record, because a deploy may have removed or raised the rate.
    """
    noted = db.execute(sa.select(KEYS.c.slots, KEYS.c.next_start).where(KEYS.c.key == key)).first()
    slots, next_start = (None, None) if noted is None else noted
    limit = bounds.limit if bounds is not None else slots or 1
    promoted = sa.select(sa.func.count()).select_from(WORK)
    promoted = promoted.where(states.expected_of(WORK, key, now_us))
    expected = int(db.execute(promoted).scalar_one())
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
            # Recorded, as a claim does, so that the interval has begun at the next look.
            db.execute(sa.update(KEYS).where(KEYS.c.key == key).values(next_start=opens_us))
        next_start = opens_us
    opens_us = next_start or 0
    if bounds is not None and bounds.rate is not None:
        opens_us = bounds.rate.opens_us(next_start, now_us)
        for _ in range(expected):  # each of them will start
            opens_us = bounds.rate.charged_us(opens_us, max(opens_us, now_us))
    elif expected and next_start is not None:
        return None
    wait_us = max(0, opens_us - now_us)
    return wait_us if wait_us <= ahead_us else None


def holders(key: Any, now_us: int) -> Any:
    """Return how many slots of a key are held. A key whose template has a '#' may count as one."""
    held = KEYS.alias()
    first, after = range_of_slots(key)
    slots = held.c.key > first, held.c.key < after, held.c.lease_until > now_us
    return sa.select(sa.func.count()).select_from(held).where(*slots).scalar_subquery()
