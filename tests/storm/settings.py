"""Numbers that the storm's parts share."""

from __future__ import annotations

__all__ = ["QUEUE", "RQ_QUEUE", "TTL_S", "VISIBILITY_S"]

QUEUE = "storm"
RQ_QUEUE = "storm-rq"
# Longer than any body, so that other libraries fail only because of a fault.
TTL_S = 4.0
# Short, so that the broker delivers messages of slow or frozen workers again.
VISIBILITY_S = 5.0
