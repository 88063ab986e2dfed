"""Names for the ticks of a schedule, so that a tick that two schedulers sent is one work.

A tick is an entry of a schedule and its due time. Guarantees: two schedulers give a tick one name
if they know the same due time, even if their clocks differ. The due times of an interval differ
between schedulers, so its ticks are counted from 1970, and each covers the time until the next.

Does not guarantee that two runs of an interval are an interval apart if the scheduler changes: the
last tick of one scheduler and the first of the other may be close together.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from taskguard.keys import finish_key

__all__ = ["interval_due_at", "tick_name"]

_BEGIN = datetime(1970, 1, 1, tzinfo=UTC)


def tick_name(entry: str, due_at: datetime) -> str:
    """Return the name of a tick, for `MessageRef.tick`.

    Args:
        entry: the name of the entry in the schedule.
        due_at: when the tick is due, with a time zone.
    """
    stamp = due_at.astimezone(UTC).replace(tzinfo=None).isoformat()
    return f"{finish_key(entry)}@{stamp}Z"


def interval_due_at(moment: datetime, every: timedelta) -> datetime:
    """Return the last due time of an interval, counted from 1970.

    Args:
        moment: the present, with a time zone.
        every: the interval.
    """
    return _BEGIN + (moment - _BEGIN) // every * every
