"""OpenTelemetry: metrics of deliveries, by the API alone."""

from __future__ import annotations

from taskguard_otel.metrics import metrics_listener

__all__ = ["metrics_listener"]
