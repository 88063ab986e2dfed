"""A listener that records OpenTelemetry metrics, by the API alone.

Guarantees: a forked child asks for its own meter provider. Without an SDK nothing is recorded, and
nothing fails. The names become those of `taskguard exporter` in Prometheus.

Does not guarantee right sums of forked children: an SDK may keep the parent's sums in the child.
`docs/how-to/metrics.md` says what to set.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from opentelemetry.metrics import MeterProvider, get_meter_provider

from taskguard import __version__
from taskguard.events import Event
from taskguard.integration import HEARD, Metric, measured

__all__ = ["metrics_listener"]


def metrics_listener(provider: MeterProvider | None = None) -> Callable[[Event], None]:
    """Return a listener that records metrics.

    Args:
        provider: the meter provider. None: the one that each process has set. A child that sets its
            provider after the fork must do so before its first delivery.
    """
    instruments: dict[Metric, Any] = {}
    of_process = None

    def listen(event: Event) -> None:
        nonlocal of_process, instruments
        if of_process != os.getpid():
            instruments, of_process = _instruments(provider or get_meter_provider()), os.getpid()
        for metric, labels, number in measured(event):
            attributes = dict(zip(metric.all_labels, labels, strict=True))
            instruments[metric](number, attributes)

    return listen


def _instruments(provider: MeterProvider) -> dict[Metric, Any]:
    meter = provider.get_meter("taskguard", __version__)
    return {metric: _made(meter, metric) for metric in HEARD}


def _made(meter: Any, metric: Metric) -> Any:
    name, unit, text = metric.opentelemetry, metric.unit, metric.help
    if metric.kind == "counter":
        return meter.create_counter(name, unit=unit, description=text).add
    buckets = list(metric.buckets)
    return meter.create_histogram(
        name, unit=unit, description=text, explicit_bucket_boundaries_advisory=buckets
    ).record
