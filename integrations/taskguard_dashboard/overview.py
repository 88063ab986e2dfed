"""The first page: present troubles, and the deliveries of the last hour.

Guarantees: it reads the first rows of indexes, never a whole table. So a number that reached its
maximum has a plus behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from taskguard.integration import State, WorkFilter
from taskguard_dashboard.charts import bars
from taskguard_dashboard.texts import lasts, number

__all__ = ["Trouble", "overview_of"]

_MOST = 100
_HOUR_S = 3_600.0
_STEP_S = 300.0
_LONG_WAIT_S = 900.0
_LONG_HOLD_S = 600.0
SERIES = {
    "done": ("done",),
    "duplicate": ("duplicate", "outdated", "superseded", "replaced", "skipped"),
    "deferred or parked": ("deferred", "parked", "refused"),
    "failed or dead": (
        "failed",
        "dead",
        "stale",
        "mismatch",
        "missing",
        "ineligible",
        "expired",
        "too_old",
        "revoked",
    ),
    "interrupted": ("interrupted", "unavailable"),
}


@dataclass(frozen=True)
class Trouble:
    """Something that an operator should look at.

    Attributes:
        level: "bad" or "warn".
        title: what it is.
        text: since when, or what to do.
        link: the page that shows it.
        query: the values behind its question mark.
    """

    level: str
    title: str
    text: str
    link: str
    query: dict[str, str]


@dataclass(frozen=True)
class TaskRates:
    """How the deliveries of a task ended in the last hour."""

    task: str
    deliveries: float
    by_series: tuple[float, ...]


def overview_of(operations: Any, now_s: float) -> dict[str, Any]:
    """Return what the first page shows."""
    dead, failed = (
        operations.list_work(WorkFilter(state=state), limit=_MOST)
        for state in (State.DEAD, State.FAILED)
    )
    overdue = operations.list_work(WorkFilter(overdue=True), limit=_MOST)
    paused = operations.keys(paused=True, limit=_MOST)
    held = _without_leaders(operations.keys(limit=_MOST))
    lines = operations.lines(limit=10)
    workers = [each for each in operations.workers().items if each.age_s < _HOUR_S]
    counts = operations.counts(since_s=now_s - _HOUR_S)
    troubles = _troubles(
        now_s, dead=dead, overdue=overdue, paused=paused, held=held, lines=lines, workers=workers
    )
    return {
        "troubles": list(troubles),
        "tiles": [
            ("keys", {}, _some(held), "keys held for long", ""),
            ("waiting", {}, _waiting(lines), "messages in line", ""),
            ("dead", {}, _some(dead), "dead", "bad" if dead.items else ""),
            ("work", {"state": "FAILED"}, _some(failed), "failed", ""),
            ("work", {"overdue": "1"}, _some(overdue), "overdue", "warn" if overdue.items else ""),
            ("keys", {"paused": "1"}, _some(paused), "keys paused", "warn" if paused.items else ""),
            ("workers", {}, number(len(workers)), "workers in the last hour", ""),
        ],
        "held": held.items[:8],
        "lines": lines,
        "tasks": _rates(counts),
        "names": list(SERIES),
        "chart": bars(_columns(counts, now_s), list(SERIES), now_s=now_s),
        "taken": now_s,
    }


def _troubles(
    now_s: float, *, dead: Any, overdue: Any, paused: Any, held: Any, lines: Any, workers: list[Any]
) -> Iterator[Trouble]:
    if dead.items:
        tasks = sorted({each.task for each in dead.items})
        yield Trouble(
            "bad",
            f"{_items(dead)} DEAD",
            f"The holders of this work vanished too often: {', '.join(tasks[:4])}.",
            "dead",
            {},
        )
    if overdue.items:
        yield Trouble(
            "bad",
            f"{_items(overdue)} overdue",
            "No worker is at them, although one should be.",
            "work",
            {"overdue": "1"},
        )
    long = [each for each in held.items if now_s - each.since_s > _LONG_HOLD_S]
    for each in long[:3]:
        yield Trouble(
            "warn",
            f"{each.key} is held for {lasts(now_s - each.since_s)}",
            f"Its holder is {each.process.label or each.process.owner}.",
            "key",
            {"key": each.key},
        )
    for each in lines.items:
        if now_s - each.oldest_s > _LONG_WAIT_S:
            yield Trouble(
                "warn",
                f"Messages wait for {each.key}",
                f"The oldest one waits for {lasts(now_s - each.oldest_s)}.",
                "key",
                {"key": each.key},
            )
            break
    for each in paused.items[:3]:
        pause = each.paused
        yield Trouble(
            "warn",
            f"{each.key} is paused for {lasts(now_s - each.since_s)}",
            f"{pause.actor}: {pause.reason}" if pause else "",
            "key",
            {"key": each.key},
        )
    versions = sorted({each.version for each in workers})
    if len(versions) > 1:
        yield Trouble(
            "warn",
            "Workers have different versions of taskguard",
            f"{', '.join(versions)}. That is normal only during a deploy.",
            "workers",
            {},
        )


def _without_leaders(page: Any) -> Any:
    """Return the page of held keys without leases of leaders, which are held for ever."""
    kept = tuple(each for each in page.items if each.task != "leader")
    return type(page)(kept, page.after, page.note)


def _some(page: Any) -> str:
    return f"{len(page.items):,}{'+' if page.after else ''}"


def _items(page: Any) -> str:
    return "1 work item is" if len(page.items) == 1 else f"{_some(page)} work items are"


def _waiting(lines: Any) -> str:
    more = any(each.more for each in lines.items) or lines.after or lines.note
    return f"{sum(each.waiting for each in lines.items):,}{'+' if more else ''}"


def _series_of(counted: Any) -> str | None:
    """Return the series of a counter of deliveries, or None for another counter."""
    metric, _, outcome = counted.what.partition("/")
    if metric != "deliveries":
        return None
    return next((name for name, outcomes in SERIES.items() if outcome in outcomes), None)


def _rates(counts: Any) -> list[TaskRates]:
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for each in counts:
        series = _series_of(each)
        if series is not None and each.n:
            found[each.task][series] += each.n
    rows = [
        TaskRates(task, sum(by.values()), tuple(by.get(name, 0.0) for name in SERIES))
        for task, by in found.items()
    ]
    return sorted(rows, key=lambda row: -row.deliveries)[:12]


def _columns(counts: Any, now_s: float) -> list[tuple[float, list[float]]]:
    """Return the deliveries of each five minutes of the last hour."""
    steps = int(_HOUR_S / _STEP_S)
    first = int(now_s // _STEP_S) - steps + 1
    columns = [[0.0] * len(SERIES) for _ in range(steps)]
    names = list(SERIES)
    for each in counts:
        at, series = int(each.minute * 60 // _STEP_S) - first, _series_of(each)
        if series is not None and 0 <= at < steps:
            columns[at][names.index(series)] += each.n
    return [((first + at) * _STEP_S, values) for at, values in enumerate(columns)]
