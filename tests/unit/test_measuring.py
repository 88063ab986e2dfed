"""Listeners of prometheus_client and OpenTelemetry: each event adds to the metrics of the table."""

from __future__ import annotations

import os
from typing import Any

import pytest

from taskguard import events
from taskguard.events import Event
from taskguard.measuring import HEARD, measured
from taskguard.metrics import OPERATION, WAIT
from taskguard.model.outcomes import Ended

DONE = events.Delivered(
    key="k", task="ship", outcome=Ended.DONE, waited_s=7.0, held_s=0.02, attempt=1, fence=9
)
REFUSED = events.Delivered(key="k", task="ship", outcome=Ended.REFUSED)
EVENTS = [
    DONE,
    REFUSED,
    events.Claimed(key="k", task="ship", took_s=0.003),
    events.Takeover(key="k", task="ship"),
    events.StaleRefused(key="k", task="ship"),
    events.Lost(key="k", task="ship", cause="expired"),
    events.Renewed(key="k", task="ship", count=3),
    events.RenewalFailed(key="k", task="ship", count=2),
    events.LockUnavailable(key="k", task="ship"),
]


def test_each_metric_is_told_by_an_event_with_values_of_its_labels() -> None:
    """No listener gets a label that the table does not have."""
    found = [each for event in EVENTS for each in measured(event)]
    assert {metric for metric, _, _ in found} == set(HEARD)
    for metric, labels, number in found:
        own = labels[1:] if metric.by_task else labels
        assert own in (metric.values or ((),))
        assert number > 0


def test_a_delivery_without_its_key_waited_and_held_nothing() -> None:
    """Otherwise each refused delivery would be a wait of 0 seconds."""
    assert [metric.name for metric, _, _ in measured(REFUSED)] == ["deliveries"]
    assert [metric.name for metric, _, _ in measured(DONE)] == ["deliveries", "wait", "hold"]
    assert list(measured(events.Parked(key="k"))) == []


def test_the_listener_of_prometheus() -> None:
    """It counts in its registry. Counters of a task begin at 0 with its first event."""
    prometheus_client = pytest.importorskip("prometheus_client")
    from taskguard_prometheus import listener

    registry = prometheus_client.CollectorRegistry()
    listen = listener(registry)
    assert registry.get_sample_value("taskguard_renewals_total", {"outcome": "failed"}) == 0
    for each in EVENTS:
        listen(each)

    def value(name: str, **labels: str) -> float | None:
        found: float | None = registry.get_sample_value(f"taskguard_{name}", labels)
        return found

    assert value("deliveries_total", task="ship", outcome="done") == 1
    assert value("deliveries_total", task="ship", outcome="dead") == 0
    assert value("wait_seconds_bucket", task="ship", le="5.0") == 0
    assert value("wait_seconds_bucket", task="ship", le="10.0") == 1
    assert value("hold_seconds_sum", task="ship") == pytest.approx(0.02)
    assert value("renewals_total", outcome="ok") == 3
    assert value("leases_lost_total", task="ship", reason="expired") == 1
    assert value("operation_seconds_count", server="ledger", op="claim") == 1
    with pytest.raises(ValueError, match="Duplicated"):
        listener(registry)


def opentelemetry() -> tuple[Any, Any]:
    """Return a reader in memory, and a provider of meters with it."""
    sdk = pytest.importorskip("opentelemetry.sdk.metrics")
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    return reader, sdk.MeterProvider([reader])


def points(reader: Any) -> dict[str, Any]:
    """Return the metrics that were recorded, by name."""
    data = reader.get_metrics_data()
    if data is None:
        return {}
    return {
        metric.name: metric
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_the_listener_of_opentelemetry() -> None:
    """Names, units and buckets are those of the table, so that Prometheus gets the same series."""
    reader, provider = opentelemetry()
    from taskguard_otel import metrics_listener

    listen = metrics_listener(provider)
    for each in EVENTS:
        listen(each)
    found = points(reader)
    assert set(found) == {metric.opentelemetry for metric in HEARD}
    wait = found[WAIT.opentelemetry]
    assert (wait.unit, wait.description) == (WAIT.unit, WAIT.help)
    [point] = wait.data.data_points
    assert tuple(point.explicit_bounds) == WAIT.buckets
    assert (point.sum, dict(point.attributes)) == (7.0, {"task": "ship"})
    [claim] = found[OPERATION.opentelemetry].data.data_points
    assert dict(claim.attributes) == {"server": "ledger", "op": "claim"}
    provider.shutdown()


def test_a_forked_child_asks_for_its_own_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that has set another meter provider does not record into its parent's."""
    pytest.importorskip("opentelemetry.sdk.metrics")
    from taskguard_otel import metrics

    (of_parent, parents), (of_child, in_child) = opentelemetry(), opentelemetry()
    providers = iter([parents, in_child])
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: next(providers))
    listen = metrics.metrics_listener()
    listen(DONE)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for each in (DONE, REFUSED):
        listen(each)
    assert len(points(of_parent)["taskguard.deliveries"].data.data_points) == 1
    assert len(points(of_child)["taskguard.deliveries"].data.data_points) == 2
    for each in (parents, in_child):
        each.shutdown()


def test_without_an_sdk_nothing_is_recorded_and_nothing_fails() -> None:
    """The API's own meters do nothing."""
    api = pytest.importorskip("opentelemetry.metrics")
    from taskguard_otel import metrics_listener

    listen = metrics_listener(api.NoOpMeterProvider())
    for each in EVENTS:
        listen(each)


def test_an_event_of_another_version_is_no_metric() -> None:
    """Listeners get each event."""
    assert list(measured(Event(key="k"))) == []
