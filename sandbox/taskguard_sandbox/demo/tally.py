"""Count effects and deliveries, and check the counts.

Effects are counted in the database. Deliveries are counted by their end: committed (completed),
answered from the record (duplicate), deferred, failed, or killed. The delivery of a stale commit
ends as a duplicate or is deferred.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

from taskguard.events import Completed, Dead, Deferred, Duplicate, Failed, StaleRefused, Takeover

__all__ = ["Tally", "tally", "total", "verdict"]


@dataclass(frozen=True, kw_only=True)
class Tally:
    """The counts of one queue, or of all."""

    queue: str
    items: int
    sent: int
    deliveries: int
    effects: int
    duplicates: int
    deferred: int
    killed: int
    paused: int
    takeovers: int
    refused: int
    double: int
    lost: int
    unanswered: int

    @property
    def ok(self) -> bool:
        """Each item has exactly one effect, and every message was answered."""
        return not (self.double or self.lost or self.unanswered)


def tally(
    queue: str,
    *,
    items: Sequence[str],
    sent: int,
    effects: Counter[str],
    events: Counter[str],
    killed: int = 0,
    paused: int = 0,
    unanswered: int = 0,
) -> Tally:
    """Count one queue: `effects` by item, `events` by name."""
    ends = (Completed.name, Duplicate.name, Deferred.name, Failed.name, Dead.name)
    return Tally(
        queue=queue,
        items=len(items),
        sent=sent,
        deliveries=sum(events[name] for name in ends) + killed,
        effects=effects.total(),
        duplicates=events[Duplicate.name],
        deferred=events[Deferred.name],
        killed=killed,
        paused=paused,
        takeovers=events[Takeover.name],
        refused=events[StaleRefused.name],
        double=sum(count - 1 for count in effects.values()),
        lost=sum(item not in effects for item in items),
        unanswered=unanswered,
    )


def total(tallies: Sequence[Tally]) -> Tally:
    """The sum over all queues."""
    numbers = [field.name for field in fields(Tally) if field.name != "queue"]
    sums = {name: sum(getattr(each, name) for each in tallies) for name in numbers}
    return Tally(queue="total", **sums)


def verdict(counted: Tally) -> str:
    """One sentence on the sum of all queues."""
    if not counted.ok:
        return (
            f"WRONG: {counted.double} double and {counted.lost} lost effects, "
            f"{counted.unanswered} messages without an answer."
        )
    return (
        f"Right: {counted.deliveries:,} deliveries of {counted.items:,} orders and invoices left "
        f"{counted.effects:,} effects, one each, and every message was answered."
    )
