"""The first page: present troubles, and the deliveries of the last hour.

Guarantees: its numbers are those of the snapshot that all viewers share. Otherwise it reads the
first rows of indexes. A number that reached its maximum has a plus behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from taskguard_dashboard.charts import bars
from taskguard_dashboard.texts import lasts, number

__all__ = ["Trouble", "overview_of"]

_MOST = 100
_MOST_COUNTED = 10_000
_NAMED = 4
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
    snapshot = operations.snapshot()
    paused = operations.keys(paused=True, limit=_NAMED).items if _n(snapshot, "paused_keys") else ()
    held = _without_leaders(operations.keys(limit=_MOST))
    lines = operations.lines(limit=10)
    workers = [each for each in operations.workers().items if each.age_s < _HOUR_S]
    counts = operations.counts(since_s=now_s - _HOUR_S)
    troubles = [
        *_of_work(snapshot),
        *_of_keys(now_s, held=held.items, paused=paused, lines=lines.items),
        *_of_workers(workers),
    ]
    return {
        "troubles": troubles,
        "tiles": [
            _tile("keys", {}, _some(held), "key", " held for long"),
            _tile("waiting", {}, _at_most(_n(snapshot, "waiting")), "message", " in line"),
            _of_state(snapshot, "dead", "dead", {}, "bad"),
            _of_state(snapshot, "failed", "work", {"state": "FAILED"}, ""),
            _of_state(snapshot, "overdue", "work", {"overdue": "1"}, "warn"),
            _tile(
                "keys",
                {"paused": "1"},
                number(_n(snapshot, "paused_keys")),
                "key",
                " paused",
                "warn" if paused else "",
            ),
            _tile("workers", {}, number(len(workers)), "worker", " in the last hour"),
        ],
        "held": held.items[:8],
        "lines": lines,
        "tasks": _rates(counts),
        "names": list(SERIES),
        "chart": bars(_columns(counts, now_s), list(SERIES), now_s=now_s),
        "taken": snapshot.taken_s,
    }


def _n(snapshot: Any, metric: str, *labels: str) -> float:
    """Return the sum of a metric over all tasks, with these values of its last labels."""
    rows = snapshot.values.get(metric, ())
    return float(sum(row[-1] for row in rows if row[len(row) - 1 - len(labels) : -1] == [*labels]))


def _at_most(n: float) -> str:
    """Return a number of a snapshot, which counts at most 10,001."""
    return "10,000+" if n > _MOST_COUNTED else number(n)


def _tile(
    link: str, query: dict[str, str], n: str, noun: str, what: str, level: str = ""
) -> tuple[str, dict[str, str], str, str, str]:
    return link, query, n, f"{noun}{'s' * (n != '1')}{what}", level


def _of_state(
    snapshot: Any, state: str, link: str, query: dict[str, str], level: str
) -> tuple[str, dict[str, str], str, str, str]:
    n = _n(snapshot, "work", state)
    return link, query, _at_most(n), state, level if n else ""


def _of_work(snapshot: Any) -> Iterator[Trouble]:
    for state, text, link, query in (
        ("dead", "The holders of this work vanished too often: {}.", "dead", {}),
        ("overdue", "No worker is at it, although one should be: {}.", "work", {"overdue": "1"}),
    ):
        tasks = [task for task, its, n in snapshot.values.get("work", ()) if its == state and n]
        n = _n(snapshot, "work", state)
        if n:
            what = "1 work item is" if n == 1 else f"{_at_most(n)} work items are"
            title = f"{what} {state.upper() if state == 'dead' else state}"
            yield Trouble("bad", title, text.format(", ".join(tasks[:_NAMED])), link, query)


def _of_keys(now_s: float, *, held: Any, paused: Any, lines: Any) -> Iterator[Trouble]:
    for each in [each for each in held if now_s - each.since_s > _LONG_HOLD_S][:_NAMED]:
        title = f"{each.key} has been held for {lasts(now_s - each.since_s)}"
        holder = each.process.label or each.process.owner
        yield Trouble("warn", title, f"Its holder is {holder}.", "key", {"key": each.key})
    late = sorted(lines, key=lambda line: float(line.oldest_s))[:1]
    for each in [each for each in late if now_s - each.oldest_s > _LONG_WAIT_S]:
        text = f"The oldest one has waited for {lasts(now_s - each.oldest_s)}."
        yield Trouble("warn", f"Messages wait for {each.key}", text, "key", {"key": each.key})
    for each in paused:
        title = f"{each.key} has been paused for {lasts(now_s - each.since_s)}"
        pause = each.paused
        text = f"{pause.actor}: {pause.reason}" if pause else ""
        yield Trouble("warn", title, text, "key", {"key": each.key})


def _of_workers(workers: list[Any]) -> Iterator[Trouble]:
    versions = sorted({each.version for each in workers})
    if len(versions) > 1:
        text = f"{', '.join(versions)}. That is normal only during a deploy."
        title = "Workers have different versions of taskguard"
        yield Trouble("warn", title, text, "workers", {})


def _without_leaders(page: Any) -> Any:
    """Return the page of held keys without leases of leaders, which are held for ever."""
    kept = tuple(each for each in page.items if each.task != "leader")
    return type(page)(kept, page.after, page.note)


def _some(page: Any) -> str:
    return f"{len(page.items):,}{'+' if page.after else ''}"


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
