"""Write ops/taskguard.rules.yml and ops/taskguard.json from the table of metrics.

PYTHONPATH=tests python tests/support/ops_files.py
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from support.pages import ROOT
from taskguard.metrics import (
    BUILD_INFO,
    DELIVERIES,
    HOLD,
    LEASES_LOST,
    LEDGER_BYTES,
    LEDGER_ROWS,
    LONGEST_HOLD,
    OLDEST_ENDED,
    OLDEST_WAIT,
    OPERATION,
    OPERATOR_ACTIONS,
    PAUSED_KEYS,
    SERVER_ERRORS,
    SNAPSHOT_TIMESTAMP,
    STALE_COMMITS,
    TAKEOVERS,
    WAIT,
    WAITING,
    WORK,
    WORKERS,
    Metric,
)

__all__ = [
    "ALERTS",
    "DASHBOARD",
    "RULES",
    "RUNBOOK",
    "dashboard_as_generated",
    "rules_as_generated",
]

RULES = ROOT / "ops" / "taskguard.rules.yml"
DASHBOARD = ROOT / "ops" / "taskguard.json"
RUNBOOK = "docs/how-to/alerts.md"
_GENERATED = "tests/support/ops_files.py"
_DAY_S = 86_400


@dataclass(frozen=True)
class Alert:
    """An alert: its expression in PromQL, and how long that must hold."""

    name: str
    expr: str
    lasts: str
    severity: str
    summary: str
    description: str


def _increase(metric: Metric, window: str, matchers: str = "") -> str:
    return f"sum by (task) (increase({metric.prometheus}{matchers}[{window}]))"


def _rate(name: str, matchers: str) -> str:
    return f"sum(rate({name}{matchers}[5m]))"


_LOCKS, _LEDGER = '{server="locks"}', '{server="ledger"}'
_LOCK_ERRORS = _rate(SERVER_ERRORS.prometheus, _LOCKS)
_LOCK_ANSWERS = _rate(f"{OPERATION.prometheus}_count", _LOCKS)
_DONE = _rate(DELIVERIES.prometheus, '{outcome="done"}')
_ROWS = f'max by (table) ({LEDGER_ROWS.prometheus}{{table="taskguard_work"}}'
_TAKEN_OVER = _increase(TAKEOVERS, "1h")

ALERTS = (
    Alert(
        "TaskguardWorkDead",
        f'max by (task) ({WORK.prometheus}{{state="dead"}}) > 0',
        "0m",
        "warning",
        "Work is DEAD.",
        "{{ $value }} work items of {{ $labels.task }} are DEAD. No delivery runs them.",
    ),
    Alert(
        "TaskguardStaleCommits",
        f"{_increase(STALE_COMMITS, '1h')} > 0",
        "0m",
        "info",
        "The database refused a late commit.",
        "{{ $labels.task }}: {{ $value | humanize }} late commits were refused within an hour.",
    ),
    Alert(
        "TaskguardManyStaleCommits",
        f"{_increase(STALE_COMMITS, '1h')} > 5",
        "0m",
        "warning",
        "The database refuses many late commits.",
        "{{ $labels.task }}: {{ $value | humanize }} late commits were refused within an hour.",
    ),
    Alert(
        "TaskguardTakeovers",
        f"{_TAKEN_OVER} > 3 and {_TAKEN_OVER} > 0.01 * {_increase(DELIVERIES, '1h')}",
        "0m",
        "warning",
        "Workers vanish while they run a task.",
        "{{ $labels.task }}: {{ $value | humanize }} holders vanished within an hour.",
    ),
    Alert(
        "TaskguardLeasesLost",
        _increase(LEASES_LOST, "15m", '{reason="expired"}') + " > 3",
        "0m",
        "warning",
        "Leases expire while bodies run.",
        "{{ $labels.task }}: {{ $value | humanize }} leases expired within 15 minutes.",
    ),
    Alert(
        "TaskguardOldestWait",
        f"max({OLDEST_WAIT.prometheus}) > 900",
        "5m",
        "warning",
        "A message waits for its key for a long time.",
        "The oldest message has waited for {{ $value | humanizeDuration }}.",
    ),
    Alert(
        "TaskguardLineGrows",
        f"sum({WAITING.prometheus}) > 10000 or"
        f" (sum({WAITING.prometheus}) > 1000 and sum(deriv({WAITING.prometheus}[30m])) > 0)",
        "30m",
        "warning",
        "More messages wait than are run.",
        "{{ $value }} messages wait for their keys. More than 10,000 are not counted.",
    ),
    Alert(
        "TaskguardOverdue",
        f'max by (task) ({WORK.prometheus}{{state="overdue"}}) > 0',
        "15m",
        "warning",
        "No worker runs work that should run.",
        "{{ $value }} work items of {{ $labels.task }} are overdue.",
    ),
    Alert(
        "TaskguardLockServerDown",
        f"{_LOCK_ERRORS} > 0.5 * ({_LOCK_ERRORS} + {_LOCK_ANSWERS})",
        "5m",
        "critical",
        "The lock server gives no answers.",
        "{{ $value | humanize }} requests to the lock server fail each second.",
    ),
    Alert(
        "TaskguardLedgerDown",
        f"{_rate(SERVER_ERRORS.prometheus, _LEDGER)} > 0 and {_DONE} == 0",
        "5m",
        "critical",
        "The ledger gives no answers, and no work is done.",
        "{{ $value | humanize }} requests to the ledger fail each second.",
    ),
    Alert(
        "TaskguardNoMetrics",
        f"absent({BUILD_INFO.prometheus})",
        "10m",
        "critical",
        "There are no metrics of taskguard.",
        "The exporter does not run, or its ledger gives no answer.",
    ),
    Alert(
        "TaskguardSnapshotOld",
        f"time() - max by (metric) ({SNAPSHOT_TIMESTAMP.prometheus}) > 180",
        "5m",
        "warning",
        "A gauge of taskguard is old.",
        "{{ $labels.metric }} was read {{ $value | humanizeDuration }} ago.",
    ),
    Alert(
        "TaskguardNotPurged",
        f"max({OLDEST_ENDED.prometheus}) > {35 * _DAY_S}",
        "1h",
        "info",
        "Old work is not purged.",
        "The oldest work ended {{ $value | humanizeDuration }} ago.",
    ),
    Alert(
        "TaskguardRowsDoubled",
        f"{_ROWS}) > 2 * {_ROWS} offset 1w) and {_ROWS}) > 1000000",
        "1h",
        "info",
        "The ledger has twice as many rows as a week ago.",
        "{{ $labels.table }} has {{ $value | humanize }} rows.",
    ),
    Alert(
        "TaskguardKeyPaused",
        f"max({PAUSED_KEYS.prometheus}) > 0",
        "1h",
        "info",
        "A key has been paused for an hour.",
        "{{ $value }} keys are paused.",
    ),
)
"""Rules for `taskguard exporter`. critical: call a person. warning: open a ticket."""


def rules_as_generated() -> str:
    """Return the file of rules as it has to be."""
    lines = [f"# Generated by {_GENERATED} from taskguard/metrics.py.", "groups:"]
    lines += ["  - name: taskguard", "    rules:"]
    for each in ALERTS:
        lines += [
            f"      - alert: {each.name}",
            f"        expr: {json.dumps(each.expr)}",
            f"        for: {each.lasts}",
            "        labels:",
            f"          severity: {each.severity}",
            "        annotations:",
            f"          summary: {json.dumps(each.summary)}",
            f"          description: {json.dumps(each.description)}",
            f"          runbook_url: {RUNBOOK}#{each.name.lower()}",
        ]
    return "\n".join(lines) + "\n"


# -- the dashboard ------------------------------------------------------------------------------

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_JOB, _TASK = 'job=~"$job"', 'task=~"$task"'
_RATE = "$__rate_interval"


def _of(metric: Metric, *more: str, part: str = "") -> str:
    """Return the selector of a metric's series: of the chosen job and tasks."""
    matchers = [_JOB, *([_TASK] if metric.by_task else ()), *more]
    return f"{metric.prometheus}{part}{{{', '.join(matchers)}}}"


def _quantiles(metric: Metric, by: str) -> list[tuple[str, str]]:
    buckets = f"sum by (le, {by}) (rate({_of(metric, part='_bucket')}[{_RATE}]))"
    legend = " ".join(f"{{{{{name}}}}}" for name in by.split(", "))
    return [
        (f"histogram_quantile({share}, {buckets})", f"{legend} {name}")
        for share, name in ((0.5, "p50"), (0.99, "p99"))
    ]


def _sum(metric: Metric, by: str, function: str = "rate", window: str = _RATE) -> tuple[str, str]:
    legend = " ".join(f"{{{{{name}}}}}" for name in by.split(", "))
    return f"sum by ({by}) ({function}({_of(metric)}[{window}]))", legend


def _max(metric: Metric, *more: str, by: str = "") -> tuple[str, str]:
    if not by:
        return f"max({_of(metric, *more)})", metric.name
    legend = " ".join(f"{{{{{name}}}}}" for name in by.split(", "))
    return f"max by ({by}) ({_of(metric, *more)})", legend


_DEAD, _ = _max(WORK, 'state="dead"', by="task")
_OVERDUE, _ = _max(WORK, 'state="overdue"', by="task")
_Panel = tuple[str, str, str, list[tuple[str, str]], str]

# Title, kind, unit, queries with their legends, and description.
_STATS: list[_Panel] = [
    (
        "DEAD work",
        "stat",
        "short",
        [(f"sum({_DEAD})", "dead")],
        WORK.help,
    ),
    (
        "Overdue work",
        "stat",
        "short",
        [(f"sum({_OVERDUE})", "overdue")],
        WORK.help,
    ),
    ("Oldest wait", "stat", "s", [_max(OLDEST_WAIT)], OLDEST_WAIT.help),
    ("Longest hold", "stat", "s", [_max(LONGEST_HOLD)], LONGEST_HOLD.help),
    ("Paused keys", "stat", "short", [_max(PAUSED_KEYS)], PAUSED_KEYS.help),
    ("Workers", "stat", "short", [_max(WORKERS, by="kind")], WORKERS.help),
]
_CHARTS: list[_Panel] = [
    ("Deliveries by outcome", "timeseries", "ops", [_sum(DELIVERIES, "outcome")], DELIVERIES.help),
    ("Deliveries by task", "timeseries", "ops", [_sum(DELIVERIES, "task")], DELIVERIES.help),
    ("Messages that wait", "timeseries", "short", [_max(WAITING, by="task")], WAITING.help),
    ("Wait for the key", "timeseries", "s", _quantiles(WAIT, "task"), WAIT.help),
    ("Hold of the key", "timeseries", "s", _quantiles(HOLD, "task"), HOLD.help),
    ("Work by state", "timeseries", "short", [_max(WORK, by="task, state")], WORK.help),
    (
        "Takeovers",
        "timeseries",
        "short",
        [_sum(TAKEOVERS, "task", "increase", "1h")],
        TAKEOVERS.help,
    ),
    (
        "Stale commits",
        "timeseries",
        "short",
        [_sum(STALE_COMMITS, "task", "increase", "1h")],
        STALE_COMMITS.help,
    ),
    (
        "Leases lost",
        "timeseries",
        "short",
        [_sum(LEASES_LOST, "task, reason", "increase", "1h")],
        LEASES_LOST.help,
    ),
    (
        "Requests without an answer",
        "timeseries",
        "ops",
        [_sum(SERVER_ERRORS, "server, op")],
        SERVER_ERRORS.help,
    ),
    (
        "Time of a request",
        "timeseries",
        "s",
        _quantiles(OPERATION, "server, op"),
        OPERATION.help,
    ),
    (
        "Changes by operators",
        "timeseries",
        "short",
        [_sum(OPERATOR_ACTIONS, "action", "increase", "1h")],
        OPERATOR_ACTIONS.help,
    ),
    ("Rows", "timeseries", "short", [_max(LEDGER_ROWS, by="table")], LEDGER_ROWS.help),
    ("Bytes", "timeseries", "bytes", [_max(LEDGER_BYTES, by="table")], LEDGER_BYTES.help),
    (
        "Age of the snapshot",
        "timeseries",
        "s",
        [(f"time() - {_max(SNAPSHOT_TIMESTAMP, by='metric')[0]}", "{{metric}}")],
        SNAPSHOT_TIMESTAMP.help,
    ),
]
_WIDTH, _STAT_HEIGHT, _HEIGHT = 24, 4, 8


def dashboard_as_generated() -> str:
    """Return the dashboard as it has to be, for Grafana 10 or later."""
    panels = [
        _panel(number, each, x=number * 4, y=0, width=4, height=_STAT_HEIGHT)
        for number, each in enumerate(_STATS)
    ]
    for number, each in enumerate(_CHARTS):
        x, y = number % 3 * 8, _STAT_HEIGHT + number // 3 * _HEIGHT
        panels.append(_panel(len(_STATS) + number, each, x=x, y=y, width=8, height=_HEIGHT))
    dashboard = {
        "uid": "taskguard",
        "title": "taskguard",
        "description": f"Generated by {_GENERATED} from taskguard/metrics.py.",
        "tags": ["taskguard"],
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "schemaVersion": 39,
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                },
                _variable("job", f"label_values({BUILD_INFO.prometheus}, job)"),
                _variable("task", f"label_values({DELIVERIES.prometheus}{{{_JOB}}}, task)"),
            ]
        },
        "panels": panels,
    }
    return json.dumps(dashboard, indent=2) + "\n"


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "sort": 1,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panel(
    number: int, panel: _Panel, *, x: int, y: int, width: int, height: int
) -> dict[str, Any]:
    title, kind, unit, queries, description = panel
    return {
        "id": number + 1,
        "title": title,
        "type": kind,
        "description": description,
        "datasource": _SOURCE,
        "gridPos": {"x": x, "y": y, "w": width, "h": height},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": _SOURCE,
                "expr": expr,
                "legendFormat": legend,
            }
            for at, (expr, legend) in enumerate(queries)
        ],
    }


if __name__ == "__main__":
    RULES.write_text(rules_as_generated(), encoding="utf-8")
    DASHBOARD.write_text(dashboard_as_generated(), encoding="utf-8")
