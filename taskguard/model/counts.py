"""Counts and happenings of deliveries, as processes send them to the ledger. Values only.

`metrics.py` has the names of counts, and `model/history.py` those of happenings.
"""

from __future__ import annotations

from taskguard.model.history import Happened
from taskguard.values import value

__all__ = ["Count", "Noted"]


@value
class Count:
    """A number to add to a counter, or the number that a counter has.

    Attributes:
        task: the task's name, or "" for a counter without a task.
        what: the counter, as "deliveries/done".
        n: the number.
        minute: minutes since 1970 of the period that it counts. 0: since the first count.
    """

    task: str
    what: str
    n: float
    minute: int = 0


@value(kw_only=True)
class Noted:
    """A happening of a key or a work, `n` times since the last flush of a process.

    Attributes:
        what: what happened.
        n: how often.
        key: the key, "" for those that a process left out because it had too many.
        task: the task's name.
        work: the id of the work of the last time, or None.
        owner: the attempt that it happened to, "" if several or none.
        fence: that attempt's fencing token, or None.
        detail: more about the last time, or None.
    """

    what: Happened
    n: int = 1
    key: str
    task: str = ""
    work: str | None = None
    owner: str = ""
    fence: int | None = None
    detail: str | None = None
