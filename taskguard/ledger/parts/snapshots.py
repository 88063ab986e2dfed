"""Takes and reads the snapshot of the whole ledger: `ports.Snapshots`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskguard.ledger.parts.base import Part

if TYPE_CHECKING:
    from taskguard.model.snapshots import SnapshotView

__all__ = ["SqlSnapshots"]


class SqlSnapshots(Part):
    """The gauges of `metrics.py`."""

    def snapshot(self, max_age_s: float = 15.0) -> SnapshotView:
        """Return figures of the whole ledger, taken anew if they are older than `max_age_s`."""
        from taskguard.ledger.operations.snapshot import snapshot  # not for deliveries

        return snapshot(self._database, max_age_s=max_age_s)
