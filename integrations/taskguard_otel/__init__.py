"""OpenTelemetry: metrics and traces of deliveries, by the API alone."""

from __future__ import annotations

from taskguard_otel.metrics import metrics_listener
from taskguard_otel.traces import trace_deliveries

__all__ = ["metrics_listener", "trace_deliveries"]
