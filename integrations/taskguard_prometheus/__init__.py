"""A listener that counts into a registry of prometheus_client, in this process.

Guarantees: names, labels and buckets are those of `taskguard exporter`. A task's counters begin at
0 with its first event.

Use it if there is no ledger, or if your processes are scraped anyway. Otherwise use
`taskguard exporter`, which needs no port and no files of workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from taskguard.events import Event
from taskguard.integration import HEARD, Metric, labels_of, measured

__all__ = ["listener"]


def listener(registry: CollectorRegistry | None = REGISTRY) -> Callable[[Event], None]:
    """Return a listener that counts in a registry.

    In a process that forks, such as a worker of Celery or RQ, each child has numbers of its own.
    Set PROMETHEUS_MULTIPROC_DIR before the first import of prometheus_client there.

    Args:
        registry: the registry, which can have one listener. Default: that of prometheus_client.

    Raises:
        ValueError: the registry has metrics of these names.
    """
    made = {metric: _made(metric, registry) for metric in HEARD}
    begun: set[str] = set()
    for metric in HEARD:
        if not metric.by_task:
            _begin(made[metric], metric, "")

    def listen(event: Event) -> None:
        for metric, labels, number in measured(event):
            if metric.by_task and labels[0] not in begun:
                begun.add(labels[0])
                for each in HEARD:
                    if each.by_task:
                        _begin(made[each], each, labels[0])
            child = made[metric].labels(*labels)
            child.inc(number) if metric.kind == "counter" else child.observe(number)

    return listen


def _made(metric: Metric, registry: CollectorRegistry | None) -> Any:
    if metric.kind == "counter":
        return Counter(metric.prometheus, metric.help, metric.all_labels, registry=registry)
    return Histogram(
        metric.prometheus,
        metric.help,
        metric.all_labels,
        buckets=metric.buckets,
        registry=registry,
    )


def _begin(made: Any, metric: Metric, task: str) -> None:
    for labels in labels_of(metric, task):
        made.labels(*labels)
