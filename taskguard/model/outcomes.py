"""The outcomes of deliveries, as they are counted.

Guarantees: each delivery has one outcome. These names are stored, and are labels of metrics, so
they stay.

Read next: `run/counting.py`, which decides the outcome.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Ended"]


class Ended(StrEnum):
    """How a delivery ended."""

    DONE = "done"
    FAILED = "failed"
    """The body raised, or the message failed before its body."""
    DUPLICATE = "duplicate"
    """The ledger answered, because another delivery had ended the work."""
    OUTDATED = "outdated"
    """A newer message of its task and key took its position."""
    SUPERSEDED = "superseded"
    """A newer copy of the same message exists."""
    REPLACED = "replaced"
    """A newer `enqueue()` replaced the message."""
    DEFERRED = "deferred"
    PARKED = "parked"
    SKIPPED = "skipped"
    REFUSED = "refused"
    """The key was held, and the caller got an error."""
    STALE = "stale"
    """The body ran, and its lease was lost or its commit was refused."""
    REVOKED = "revoked"
    EXPIRED = "expired"
    DEAD = "dead"
    MISMATCH = "mismatch"
    """The fingerprint differs from that of the first message."""
    TOO_OLD = "too_old"
    MISSING = "missing"
    """The user's own row does not exist."""
    INELIGIBLE = "ineligible"
    """The user's own row is in another state."""
    UNAVAILABLE = "unavailable"
    """A server gave no answer, and the delivery could not be deferred."""
    INTERRUPTED = "interrupted"
    """The process had to end, or the body was cancelled. Its work was given back."""
