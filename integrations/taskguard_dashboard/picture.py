"""The picture of a key: its holders, takeovers, refused commits and pauses over time.

Guarantees nothing about what is older than the key's last works, or was purged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from markupsafe import Markup

from taskguard_dashboard.charts import Bar, Mark, lanes
from taskguard_dashboard.texts import lasts

__all__ = ["HELD", "TROUBLE", "picture_of"]

DONE, HELD, PAUSE, TROUBLE, OTHER = 1, 2, 3, 4, 5
_TROUBLES = frozenset({"takeover", "crashed", "dead", "stale", "lease_lost", "failed"})
_AGGREGATED = frozenset({"duplicate", "deferred", "skipped"})


def picture_of(key: Any, *, now_s: float) -> Markup:
    """Return the picture, or nothing if the key has no past."""
    held = [*_bars(key, now_s)]
    return lanes(held, list(_marks(key, held)), now_s=now_s)


def _bars(key: Any, now_s: float) -> Iterator[Bar]:
    current = {each.work for each in key.holders if each.work}
    for each in key.holders:
        pause = each.paused
        what = f"paused by {pause.actor}: {pause.reason}" if pause else each.task or "a lock"
        yield Bar(
            "paused" if pause else each.process.label or each.process.owner,
            each.since_s,
            now_s,
            PAUSE if pause else HELD,
            f"{what}, held for {lasts(now_s - each.since_s)}",
        )
    for work in key.works:
        if work.id in current or work.started_s is None:
            continue
        end_s = work.finished_s or min(work.lease_until_s or now_s, now_s)
        good = work.state == "DONE"
        yield Bar(
            _label(work.process),
            work.started_s,
            max(end_s, work.started_s),
            DONE if good else TROUBLE,
            f"{work.task}, attempt {work.attempts}, {work.state}, {lasts(end_s - work.started_s)}",
        )


def _marks(key: Any, held: list[Bar]) -> Iterator[Mark]:
    lane = held[0].lane if held else "the key"
    for past in key.past:
        if past.what not in _AGGREGATED:
            label = _label(past.process) if past.process else lane
            kind = TROUBLE if past.what in _TROUBLES else OTHER
            yield Mark(label, past.at_s, kind, f"{past.what}: {past.text}")


def _label(process: Any) -> str:
    return (process.label or process.owner) if process else "unknown"
