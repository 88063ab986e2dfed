"""The figures of a snapshot of the whole ledger. Values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from taskguard.values import value

__all__ = ["SnapshotView"]


@value
class SnapshotView:
    """The figures of the whole ledger that the exporter, the page and `taskguard top` show.

    Attributes:
        taken_s: when it was taken, by the database's clock.
        age_s: how long ago that was.
        values: its rows by the name of the metric, as `metrics.py` has it. A row has the values of
            the labels, and then the number.
        read_s: by the same names, when they were read. That is before `taken_s` if the database
            took too long to read them again.
    """

    taken_s: float
    age_s: float
    values: Mapping[str, Sequence[Sequence[Any]]]
    read_s: Mapping[str, float]

    def number(self, metric: str, *labels: str) -> float | None:
        """Return the number of a metric with these values of its labels, or None."""
        for *found, number in self.values.get(metric, ()):
            if (*found,) == labels:
                return float(number)
        return None
