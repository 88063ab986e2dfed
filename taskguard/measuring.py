"""The metrics that an event adds to, for listeners that feed another registry than the ledger.

Guarantees: the numbers of a listener are those of one process, under the names, labels and buckets
that `taskguard exporter` has. `HEARD` has the metrics that events tell.
"""

from __future__ import annotations

from collections.abc import Iterator

from taskguard import events
from taskguard.metrics import (
    DELIVERIES,
    HOLD,
    LEASES_LOST,
    OPERATION,
    RENEWALS,
    SERVER_ERRORS,
    STALE_COMMITS,
    TAKEOVERS,
    WAIT,
    Metric,
)

__all__ = ["HEARD", "Measurement", "labels_of", "measured"]

Measurement = tuple[Metric, tuple[str, ...], float]
"""A metric, the values of its labels, and the number to add or to observe."""

HEARD = (
    DELIVERIES,
    TAKEOVERS,
    STALE_COMMITS,
    LEASES_LOST,
    WAIT,
    HOLD,
    RENEWALS,
    SERVER_ERRORS,
    OPERATION,
)
"""Metrics that events tell."""


def measured(event: events.Event) -> Iterator[Measurement]:
    """Yield the metrics that an event adds to, the values of their labels, and the numbers."""
    task = event.task
    match event:
        case events.Delivered():
            yield DELIVERIES, (task, event.outcome.value), 1.0
            if event.attempt:  # otherwise it did not get its key
                yield WAIT, (task,), event.waited_s
                yield HOLD, (task,), event.held_s
        case events.Claimed():
            yield OPERATION, ("ledger", "claim"), event.took_s
        case events.Takeover():
            yield TAKEOVERS, (task,), 1.0
        case events.StaleRefused():
            yield STALE_COMMITS, (task,), 1.0
        case events.Lost():
            yield LEASES_LOST, (task, event.cause), 1.0
        case events.Renewed():
            yield RENEWALS, ("ok",), float(event.count)
        case events.RenewalFailed():
            yield RENEWALS, ("failed",), float(event.count)
        case events.LockUnavailable():
            yield SERVER_ERRORS, ("locks", "acquire"), 1.0


def labels_of(metric: Metric, task: str) -> Iterator[tuple[str, ...]]:
    """Yield the values of the labels of each series of a task, or of none if it is not by task."""
    for values in metric.values or ((),):
        yield (task, *values) if metric.by_task else values
