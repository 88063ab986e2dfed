"""Alert rules and the dashboard: made from the table, with runbooks, and tried by promtool."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support import promtool
from support.ops_files import (
    ALERTS,
    DASHBOARD,
    RULES,
    RUNBOOK,
    dashboard_as_generated,
    rules_as_generated,
)
from support.pages import ROOT
from taskguard.metrics import METRICS

pytestmark = pytest.mark.once

SERIES = {
    f"{each.prometheus}{part}"
    for each in METRICS
    for part in (("_bucket", "_sum", "_count") if each.kind == "histogram" else ("",))
}
STALE = 'taskguard_stale_commits_total{task="ship"}'
TAKEN = 'taskguard_takeovers_total{task="ship"}'
DONE = 'taskguard_deliveries_total{task="ship",outcome="done"}'
LOST = 'taskguard_leases_lost_total{task="ship",reason="expired"}'
LOCKS, LEDGER = '{server="locks",op="acquire"}', '{server="ledger",op="claim"}'
ANSWERED = f"taskguard_operation_seconds_count{LOCKS}"
DAY = 86_400
ROWS = 'taskguard_ledger_rows{table="taskguard_work"}'
BUILD = 'taskguard_build_info{version="1",schema="5"}'

# For each alert: series that make it fire, series that do not, and in which minute the test looks.
# Series have one value a minute. promtool repeats: "0+5x9" is 0, 5, 10 … 45; "_x9" is no value.
CASES: dict[str, tuple[dict[str, str], dict[str, str], int]] = {
    "TaskguardWorkDead": (
        {'taskguard_work{task="ship",state="dead"}': "0x4 1x4"},
        {'taskguard_work{task="ship",state="dead"}': "0x8"},
        8,
    ),
    "TaskguardStaleCommits": ({STALE: "0x20 1x10"}, {STALE: "3x30"}, 30),
    "TaskguardManyStaleCommits": ({STALE: "0x20 9x10"}, {STALE: "0x20 2x10"}, 30),
    # Four of 10,000 deliveries are no trouble, four of 100 are.
    "TaskguardTakeovers": (
        {TAKEN: "0x20 9x40", DONE: "0x20 100x40"},
        {TAKEN: "0x20 9x40", DONE: "0x20 10000x40"},
        60,
    ),
    "TaskguardLeasesLost": ({LOST: "0x5 8x9"}, {LOST: "0x5 1x9"}, 14),
    "TaskguardOldestWait": (
        {"taskguard_oldest_wait_seconds": "1000x9"},
        {"taskguard_oldest_wait_seconds": "100x9"},
        9,
    ),
    "TaskguardLineGrows": (
        {'taskguard_waiting{task="ship"}': "2000+10x99"},
        {'taskguard_waiting{task="ship"}': "4000-10x99"},
        99,
    ),
    "TaskguardOverdue": (
        {'taskguard_work{task="ship",state="overdue"}': "1x20"},
        {'taskguard_work{task="ship",state="overdue"}': "1x9 0x10"},
        19,
    ),
    "TaskguardLockServerDown": (
        {f"taskguard_server_errors_total{LOCKS}": "0+60x20", ANSWERED: "0+9x20"},
        {f"taskguard_server_errors_total{LOCKS}": "0+60x20", ANSWERED: "0+99x20"},
        20,
    ),
    "TaskguardLedgerDown": (
        {f"taskguard_server_errors_total{LEDGER}": "0+60x20", DONE: "5x20"},
        {f"taskguard_server_errors_total{LEDGER}": "0+60x20", DONE: "0+5x20"},
        20,
    ),
    "TaskguardNoMetrics": ({BUILD: "1x3 _x30"}, {BUILD: "1x33"}, 33),
    "TaskguardSnapshotOld": (
        {'taskguard_snapshot_timestamp_seconds{metric="work"}': "0x20"},
        {'taskguard_snapshot_timestamp_seconds{metric="work"}': "0+60x20"},
        20,
    ),
    "TaskguardNotPurged": (
        {"taskguard_oldest_ended_seconds": f"{40 * DAY}x70"},
        {"taskguard_oldest_ended_seconds": f"{20 * DAY}x70"},
        70,
    ),
    # This one has one value an hour.
    "TaskguardRowsDoubled": ({ROWS: "900000x9 2000000x170"}, {ROWS: "1500000x9 2000000x170"}, 175),
    "TaskguardKeyPaused": (
        {"taskguard_paused_keys": "1x70"},
        {"taskguard_paused_keys": "1x30 0x40"},
        70,
    ),
}


def test_the_files_are_as_generated() -> None:
    """If not: PYTHONPATH=tests python tests/support/ops_files.py."""
    assert RULES.read_text(encoding="utf-8") == rules_as_generated()
    assert DASHBOARD.read_text(encoding="utf-8") == dashboard_as_generated()


def test_each_alert_has_a_runbook() -> None:
    """Its heading is the alert's name, and there are no others."""
    text = (ROOT / RUNBOOK).read_text(encoding="utf-8")
    assert re.findall(r"^### (\w+)$", text, re.MULTILINE) == [each.name for each in ALERTS]


def test_expressions_name_metrics_of_the_table() -> None:
    """A metric that was renamed would be an alert that never fires."""
    queries = [each.expr for each in ALERTS] + [
        target["expr"] for panel in panels() for target in panel["targets"]
    ]
    named = {name for query in queries for name in re.findall(r"taskguard_\w+", query)}
    assert named - {"taskguard_work"} - SERIES == set()


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return found


def test_panels_are_as_linters_of_dashboards_want_them() -> None:
    """Each has a title, a unit, a text, a data source that can be chosen, and a place of its own.
    Rates use Grafana's own interval."""
    places = [tuple(each["gridPos"].values()) for each in panels()]
    assert len(set(places)) == len(places)
    assert len({each["id"] for each in panels()}) == len(places)
    for each in panels():
        assert each["title"]
        assert each["description"]
        assert each["fieldConfig"]["defaults"]["unit"]
        for target in each["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            assert 'job=~"$job"' in target["expr"]
            assert "rate(" not in target["expr"] or "[$__rate_interval]" in target["expr"]


def test_grafana_reads_the_dashboard() -> None:
    """Grafana's own types take each part of it."""
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    text = DASHBOARD.read_text(encoding="utf-8")
    read = models.Dashboard.from_json(json.loads(text))
    assert [each.title for each in read.panels] == [each["title"] for each in panels()]
    assert read.uid == "taskguard"


@pytest.mark.debian
def test_promtool_takes_rules_and_queries(tmp_path: Path) -> None:
    """The rules, and each query of the dashboard with values for Grafana's variables."""
    promtool.run("check", "rules", str(RULES))
    queries = [target["expr"] for panel in panels() for target in panel["targets"]]
    rules = [
        {"record": f"query:{number}", "expr": query.replace("$__rate_interval", "5m")}
        for number, query in enumerate(queries)
    ]
    file = tmp_path / "queries.yml"  # JSON is YAML
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool.run("check", "rules", str(file))


@pytest.mark.debian
def test_each_alert_fires_when_it_has_to(tmp_path: Path) -> None:
    """With recorded series, and not with others that are close."""
    assert set(CASES) == {each.name for each in ALERTS}
    tests: dict[str, list[Any]] = {"1m": [], "1h": []}
    for name, (firing, quiet, at) in CASES.items():
        interval = "1h" if name == "TaskguardRowsDoubled" else "1m"
        for series, fires in ((firing, True), (quiet, False)):
            when = f"{at}{interval[-1]}"
            tests[interval].append({"interval": interval, **_case(name, series, when, fires=fires)})
    for interval, some in tests.items():
        file = tmp_path / f"alerts-{interval}.yml"
        text = {"rule_files": [str(RULES)], "evaluation_interval": interval, "tests": some}
        file.write_text(json.dumps(text))
        promtool.run("test", "rules", str(file))


def _case(name: str, series: dict[str, str], when: str, *, fires: bool) -> dict[str, Any]:
    """Return a test of promtool: how many alerts of this name fire at this time."""
    query = f'count(ALERTS{{alertname="{name}",alertstate="firing"}})'
    found = [{"labels": "{}", "value": 1}] if fires else []
    return {
        "input_series": [{"series": each, "values": values} for each, values in series.items()],
        "promql_expr_test": [{"expr": query, "eval_time": when, "exp_samples": found}],
    }
