"""Numbers that the storm's parts share."""

from __future__ import annotations

__all__ = ["QUEUE", "RQ_QUEUE", "TTL_S", "VISIBILITY_S"]

QUEUE = "storm"
RQ_QUEUE = "storm-rq"
# Longer than any body: what the others do wrong, they do because of a fault.
TTL_S = 4.0
# So short that the broker delivers again what takes long, or is in the hands of who is frozen.
VISIBILITY_S = 5.0
