"""Names for the ticks of a schedule, so that a tick that two schedulers sent is one work.

A tick is an entry of a schedule and the time at which it is due. Guarantees: two schedulers name a
tick in the same way if both say the same due time, however their clocks differ and whenever
they send it. An interval has no due times that two schedulers have in common; its ticks are those
of a clock that began in 1970, and each stands for the time until the next.

Does not guarantee that two runs of an interval are an interval apart where the scheduler changes:
the last tick of one and the first of the other may be close together.
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
