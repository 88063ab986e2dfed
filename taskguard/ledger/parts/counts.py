"""Adds up the counts of processes, and keeps happenings of keys: `ports.Counts`.

Guarantees: rows of one call are committed together. Processes change counters in the same order, so
that they do not deadlock. A call has one short deadline, waits a moment for a row, and is not
repeated.

Read next: `run/flush.py`, which calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from taskguard.ledger.connections.retrying import retried
from taskguard.ledger.operations import counts
from taskguard.ledger.parts.base import Part
from taskguard.model.counts import Count, Noted

__all__ = ["SqlCounts"]

_LONGEST_S, _LOCK_S = 3.0, 0.5


def _nothing() -> None:
    pass


class SqlCounts(Part):
    """Counts in minutes and in total, and happenings."""

    def add_counts(
        self,
        rows: Sequence[Count],
        *,
        happened: Sequence[Noted] = (),
        committing: Callable[[], None] = _nothing,
    ) -> None:
        """Add numbers to the present minute and to the totals, and store happenings."""
        with self._database.transaction(lock_timeout_s=_LOCK_S, longest_s=_LONGEST_S) as db:
            counts.add(db, self._database.dialect, rows)
            counts.note(db, self._database.dialect, happened, self._storable)
            committing()

    def note_happenings(self, rows: Sequence[Noted]) -> None:
        """Store what happened to keys."""
        self.add_counts((), happened=rows)

    def begin_counts(self, tasks: Sequence[str]) -> None:
        """Store a zero for each counter of these tasks that has no row yet."""
        with self._database.transaction(lock_timeout_s=_LOCK_S, longest_s=_LONGEST_S) as db:
            counts.begin(db, self._database.dialect, tasks)

    @retried
    def counts(self, since_s: float | None = None) -> list[Count]:
        """Return the totals, or the numbers of each minute of the last `since_s` seconds."""
        with self._database.transaction() as db:
            return counts.read(db, self._database.dialect, since_s)
