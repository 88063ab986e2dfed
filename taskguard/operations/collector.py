"""Metrics of the whole fleet for prometheus_client: a collector that reads the ledger.

Guarantees: a scrape reads the totals and the snapshot, each by its primary key. The totals are
those of all processes since the first one, so that no restart resets a counter. A counter of a
known task is 0 until it is counted, because Prometheus takes no increase from a series that begins
with 1. Characters of a task's name that are not printable are escaped.

Raises what the ledger does: a scrape without an answer fails, and `up` is 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

from taskguard import metrics
from taskguard.drivers import extras_named
from taskguard.metrics import Metric, counted_as

if TYPE_CHECKING:
    from taskguard.model.counts import Count
    from taskguard.model.snapshots import SnapshotView

__all__ = ["Collector", "exposition"]

_Labels = tuple[str, ...]
# Numbers by the name of their metric. A counter has one, under "". A histogram has one for each
# bucket, and "sum".
_Numbers = dict[str, dict[_Labels, dict[str, float]]]


class Source(Protocol):
    """The part of a ledger that a collector reads."""

    def counts(self, *, since_s: float | None = None) -> list[Count]:
        """Return the totals."""
        ...

    def snapshot(self, *, max_age_s: float = 15.0) -> SnapshotView:
        """Return the gauges."""
        ...


class Collector:
    """Reads a ledger at each scrape. Register it in a registry of prometheus_client.

    Args:
        ledger: the ledger.
        version: the version of taskguard, for `taskguard_build_info`.
        schema: the version of the ledger's tables.
    """

    def __init__(self, ledger: Source, *, version: str, schema: int) -> None:
        with extras_named("The metrics of Prometheus", "prometheus"):
            from prometheus_client import core
        self._core: Any = core
        self._ledger = ledger
        self._build = (version, str(schema))

    def describe(self) -> list[Any]:
        """Return nothing, so that a registration reads nothing."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the families of the table in `metrics.py`, in its order."""
        numbers = _summed(self._ledger.counts())
        of_tasks = (numbers.get(each.name, {}) for each in metrics.COUNTED if each.by_task)
        tasks = sorted({task for known in of_tasks for task, *_ in known})
        for metric in metrics.COUNTED:
            yield self._counted(metric, numbers.get(metric.name, {}), tasks)
        found = self._ledger.snapshot()
        values = {
            **found.values,
            metrics.SNAPSHOT_TIMESTAMP.name: [[name, at] for name, at in found.read_s.items()],
            metrics.BUILD_INFO.name: [[*self._build, 1]],
        }
        for metric in metrics.GAUGES:
            yield self._gauge(metric, values.get(metric.name), tasks)

    def _counted(
        self, metric: Metric, known: Mapping[_Labels, Mapping[str, float]], tasks: list[str]
    ) -> Any:
        names = metric.all_labels
        if metric.kind == "counter":
            family = self._core.CounterMetricFamily(metric.prometheus, metric.help, labels=names)
            for labels in _combinations(metric, tasks):
                family.add_metric(_shown(labels), known.get(labels, {}).get("", 0.0))
            return family
        family = self._core.HistogramMetricFamily(metric.prometheus, metric.help, labels=names)
        limits = [*(f"{each:g}" for each in metric.buckets), "+Inf"]
        # As prometheus_client writes them, so that a listener's series are the same.
        names_of_limits = [*map(str, metric.buckets), "+Inf"]
        for labels in _combinations(metric, tasks):
            counted = known.get(labels, {})
            sums = accumulate(counted.get(limit, 0.0) for limit in limits)
            buckets = list(zip(names_of_limits, sums, strict=True))
            family.add_metric(_shown(labels), buckets, counted.get("sum", 0.0))
        return family

    def _gauge(self, metric: Metric, rows: Iterable[Any] | None, tasks: list[str]) -> Any:
        family = self._core.GaugeMetricFamily(
            metric.prometheus, metric.help, labels=metric.all_labels
        )
        if rows is not None:
            known = {tuple(labels): float(number) for *labels, number in rows}
            zeros = dict.fromkeys(_combinations(metric, tasks) if metric.by_task else (), 0.0)
            for labels, number in {**zeros, **known}.items():
                family.add_metric(_shown(labels), number)
        return family


def exposition(source: Source) -> bytes:
    """Return one scrape in Prometheus' text format, for a page of a web application.

    Args:
        source: `tg.operations`.
    """
    from taskguard.ledger.tables import SCHEMA_VERSION

    with extras_named("The metrics of Prometheus", "prometheus"):
        from prometheus_client import CollectorRegistry, generate_latest
    registry = CollectorRegistry()
    registry.register(Collector(source, version=version("celery-taskguard"), schema=SCHEMA_VERSION))
    return generate_latest(registry)


def _summed(counts: Iterable[Count]) -> _Numbers:
    numbers: _Numbers = {}
    for each in counts:
        found = counted_as(each.what)
        if found is not None:  # otherwise a newer version counts it
            metric, values, part = found
            labels = (each.task, *values) if metric.by_task else values
            numbers.setdefault(metric.name, {}).setdefault(labels, {})[part] = each.n
    return numbers


def _combinations(metric: Metric, tasks: list[str]) -> Iterator[_Labels]:
    """Yield the values of the labels of each series."""
    for values in metric.values or ((),):
        if metric.by_task:
            yield from ((task, *values) for task in tasks)
        else:
            yield values


def _shown(labels: _Labels) -> list[str]:
    return [each if each.isprintable() else _escaped(each) for each in labels]


def _escaped(text: str) -> str:
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)
