"""The counters of one process for one ledger, until they are sent to it.

Guarantees: to count is one append to a queue, which takes no lock. So a signal's handler may count
at any moment, and a count takes less than a microsecond. A forked child begins at zero. Counters of
at most `TASKS` tasks are kept apart; those of further tasks are those of the task `OTHER_TASK`. The
queue is added up when it is long, so memory does not grow.

Read next: `flush.py`, which sends the counters.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from typing import Any

from taskguard.metrics import (
    COUNTS_LOST,
    DELIVERIES,
    HOLD,
    LEASES_LOST,
    OPERATION,
    OTHER_TASK,
    RENEWALS,
    SERVER_ERRORS,
    STALE_COMMITS,
    TAKEOVERS,
    TASKS,
    WAIT,
    Metric,
)
from taskguard.model.counts import Count, Noted
from taskguard.model.history import Happened
from taskguard.model.lease import Lease
from taskguard.model.outcomes import Ended
from taskguard.native import allocate_lock
from taskguard.run.happenings import Happenings

__all__ = ["Tally"]

# Entries of the queue that wait to be added up.
_MOST_HEARD = 256

_DELIVERIES = {ended: DELIVERIES.what(ended) for ended in Ended}
_RENEWED, _NOT_RENEWED = RENEWALS.what("ok"), RENEWALS.what("failed")
_OPERATION = {values: OPERATION.what(*values) for values in OPERATION.values}
_process = object()  # another one in each forked process


def _begin_in_child() -> None:
    global _process  # noqa: PLW0603  # one for the process
    _process = object()


os.register_at_fork(after_in_child=_begin_in_child)


class Tally:
    """Counters by task and name. Thread-safe.

    Args:
        kept: False: there is no ledger to send them to, so nothing is counted.
    """

    def __init__(self, *, kept: bool = True) -> None:
        self.kept = kept
        self._begin()

    def _begin(self) -> None:
        self._of = _process
        self._heard: deque[tuple[Any, ...]] = deque(maxlen=None if self.kept else 0)
        self._adding_up = allocate_lock()
        self._counts: dict[tuple[str, str], float] = {}
        # By task and name: how many values each bucket has, then their sum.
        self._values: dict[tuple[str, str], list[float]] = {}
        self._metrics: dict[str, Metric] = {}
        self._labels: dict[str, str] = {}
        self._happenings = Happenings()

    # -- what is counted ------------------------------------------------------------------------

    def delivery(self, task: str, ended: Ended, waited_s: float, held_s: float) -> None:
        """Count a delivery. `held_s`: below 0.0 if it did not get its key."""
        self._hear((_DELIVERIES[ended], task, waited_s, held_s))

    def takeover(self, task: str) -> None:
        """Count a claim of work whose holder vanished."""
        self._hear((TAKEOVERS.name, task, 1))

    def stale_commit(self, task: str) -> None:
        """Count a commit that the database refused."""
        self._hear((STALE_COMMITS.name, task, 1))

    def lease_lost(self, task: str, kind: str, lease: Lease, reason: str) -> None:
        """Count a lost lease by its kind: "expired", "max_hold" or "taken"."""
        self._hear((LEASES_LOST.what(kind), task, 1))
        self.happened(
            Noted(
                what=Happened.LEASE_LOST,
                key=lease.key,
                task=task,
                owner=str(lease.owner),
                fence=lease.fence,
                detail=reason,
            )
        )

    def renewals(self, n: int, *, renewed: bool) -> None:
        """Count the renewals of `n` leases, which were renewed or got no answer."""
        self._hear((_RENEWED if renewed else _NOT_RENEWED, "", n))

    def answer(self, server: str, op: str, took_s: float) -> None:
        """Count a request to a server that was answered: "locks", "acquire"."""
        self._hear((server, op, took_s, _OPERATION, None))

    def no_answer(self, server: str, op: str) -> None:
        """Count a request to a server that got no answer."""
        self._hear((SERVER_ERRORS.what(server, op), "", 1))

    def count(self, task: str, what: str, n: float = 1) -> None:
        """Add to a counter of `metrics.py` by its name in the ledger."""
        self._hear((what, task, n))

    def happened(self, noted: Noted) -> None:
        """Note what happened to a key."""
        self._hear((noted,))

    def _hear(self, entry: tuple[Any, ...]) -> None:
        if self._of is not _process:
            self._begin()
        heard = self._heard
        heard.append(entry)
        if len(heard) >= _MOST_HEARD:
            self._add_up()

    # -- adding up --------------------------------------------------------------------------------

    def _add_up(self) -> bool:
        """Add the queue up. Return False if another thread, or code that this interrupts, does."""
        mutex = self._adding_up
        if not mutex.acquire(False):
            return False
        try:
            heard = self._heard
            while heard:
                self._add(heard.popleft())
        finally:
            mutex.release()
        return True

    def _add(self, entry: tuple[Any, ...]) -> None:
        parts = len(entry)
        if parts == 3:  # name, task, number
            what, task, n = entry
            self._count(self._label(task), what, n)
        elif parts == 4:  # of a delivery
            what, task, waited_s, held_s = entry
            label = self._label(task)
            self._count(label, what, 1)
            if held_s >= 0.0:
                self._value(label, WAIT.name, WAIT, waited_s)
                self._value(label, HOLD.name, HOLD, held_s)
        elif parts == 1:
            left_out = self._happenings.add(entry[0])
            if left_out:
                self._count("", Happenings.dropped, left_out)
        else:
            server, op, took_s, names, _ = entry
            self._value("", names[server, op], OPERATION, took_s)

    def _count(self, task: str, what: str, n: float) -> None:
        place = task, what
        self._counts[place] = self._counts.get(place, 0) + n

    def _value(self, task: str, name: str, metric: Metric, seconds: float) -> None:
        values = self._values.get((task, name))
        if values is None:
            values = self._values[task, name] = [0.0] * (len(metric.buckets) + 2)
            self._metrics[name] = metric
        values[bisect_left(metric.buckets, seconds)] += 1
        values[-1] += seconds

    def _label(self, task: str) -> str:
        label = self._labels.get(task)
        if label is None:
            if not task:
                return task
            label = task if len(self._labels) < TASKS else OTHER_TASK
            if label is task:  # otherwise the names of tasks would fill the memory
                self._labels[task] = label
        return label

    # -- sending ----------------------------------------------------------------------------------

    @property
    def tasks(self) -> list[str]:
        """The tasks that this process has counted, by their labels."""
        return list(self._labels)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        if self._of is not _process:
            self._begin()
        return not (self._heard or self._counts or self._values or self._happenings)

    def drain(self) -> tuple[list[Count], list[Noted]]:
        """Return all counters and happenings, and begin at zero. Empty while others add up."""
        if self._of is not _process:
            self._begin()
        if not self._add_up() or not self._adding_up.acquire(False):
            return [], []
        try:
            # One row for each counter: some may have been put back. Nothing is forgotten before the
            # end, because a time limit may arrive here.
            counts = dict(self._counts)
            for (task, name), numbers in self._values.items():
                for row in _rows(task, name, self._metrics[name], numbers):
                    place = task, row.what
                    counts[place] = counts.get(place, 0) + row.n
            rows = [Count(task, what, n) for (task, what), n in counts.items()]
            self._counts, self._values = {}, {}
            return rows, self._happenings.drain()
        finally:
            self._adding_up.release()

    def put_back(self, rows: list[Count], happened: list[Noted]) -> None:
        """Add counters and happenings that were not sent, or that another process handed over.

        Empties the lists, so that none is added twice if a time limit arrives here.
        """
        while rows:
            row = rows.pop()
            self._hear((row.what, row.task, row.n))
        while happened:
            self._hear((happened.pop(),))

    def lose(self, rows: Iterable[Count]) -> None:
        """Count what may or may not have been sent."""
        lost = sum(row.n for row in rows if "/le/" not in row.what and not _is_sum(row.what))
        if lost:
            self._hear((COUNTS_LOST.what(), "", lost))


def _is_sum(what: str) -> bool:
    return what.endswith("/sum")


def _rows(task: str, name: str, metric: Metric, numbers: list[float]) -> list[Count]:
    *counts, total = numbers
    limits = [*(f"{limit:g}" for limit in metric.buckets), "+Inf"]
    rows = [
        Count(task, f"{name}/le/{limit}", n) for limit, n in zip(limits, counts, strict=True) if n
    ]
    return [*rows, Count(task, f"{name}/sum", total)]
