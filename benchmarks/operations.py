"""Questions of operators among ten million work items and a million messages that wait.

The pages of the web page are asked without a network. So is a scrape, with counters of 50 tasks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import taskguard
from benchmarks.measure import CONSOLE
from taskguard.integration import exposition
from taskguard.ledger.sql import SqlLedger
from taskguard.model.states import State
from taskguard.model.views import WorkFilter
from taskguard.operations import Operations
from taskguard_dashboard.http import Request
from taskguard_dashboard.routes import Dashboard
from taskguard_sandbox.full_ledger import fill
from taskguard_sandbox.servers import Postgres

FEW = {"works": 20_000, "waiting": 5_000, "lines": 100}
MANY = {"works": 10_000_000, "waiting": 1_000_000, "lines": 1_000}
QUESTION_MS, PAGE_MS, SCRAPE_MS = 50.0, 100.0, 10.0
TASKS = 50

QUESTIONS: dict[str, Callable[[Operations], Any]] = {
    "explain a key": lambda ops: ops.explain("order:77"),
    "explain a held key": lambda ops: ops.explain("trouble:6"),
    "explain a key with a long line": lambda ops: ops.explain("account:0"),
    "explain work": lambda ops: ops.explain("shop.ship trouble:5"),
    "explain an unknown key": lambda ops: ops.explain("nothing:1"),
    "keys --held": lambda ops: ops.keys(),
    "keys --paused": lambda ops: ops.keys(paused=True),
    "work list --state DEAD": lambda ops: ops.list_work(WorkFilter(state=State.DEAD)),
    "work list --overdue": lambda ops: ops.list_work(WorkFilter(overdue=True)),
    "work list --key": lambda ops: ops.list_work(WorkFilter(key="order:77")),
    "waiting": lambda ops: ops.waiting(),
    "waiting --key": lambda ops: ops.waiting(key="account:0"),
    "waiting --by-line": lambda ops: ops.lines(limit=20),
    "workers": lambda ops: ops.workers(),
    "actions": lambda ops: ops.actions(),
}


PAGES = {
    "/": {},
    "/keys": {},
    "/key": {"key": "account:0"},
    "/waiting": {},
    "/work": {},
    "/work?task=shop.ship": {"task": "shop.ship"},
    "/dead": {},
    "/workers": {},
    "/actions": {},
    "/doctor": {},
}


def main(*, quick: bool) -> None:
    """Print the median and the 95th percentile of each question, page and scrape."""
    sizes = FEW if quick else MANY
    with Postgres(shared_buffers="512MB", max_wal_size="8GB") as postgres:
        url = postgres.create_database("operations")
        ledger = SqlLedger(url)
        ledger.create_schema()
        fill(url, **sizes)
        tg = taskguard.connect(locks=None, ledger=ledger, listeners=())
        ledger.begin_counts([f"shop.task_{number}" for number in range(TASKS)])
        CONSOLE.print(
            f"Among {sizes['works']:,} work items, {sizes['waiting']:,} of whose messages wait; "
            "milliseconds, warm"
        )
        repeats = 10 if quick else 40
        for name, question in QUESTIONS.items():
            _show(name, lambda: question(tg.operations), repeats, QUESTION_MS)  # noqa: B023
        page = Dashboard(tg)
        for path, query in PAGES.items():
            request = Request(
                method="GET", path=path.partition("?")[0], query=query, role="operator"
            )
            _show(f"page {path}", lambda: _page(page, request), repeats, PAGE_MS)  # noqa: B023
        _show(f"scrape of {TASKS} tasks", lambda: exposition(tg.operations), repeats, SCRAPE_MS)
        tg.close()


def _page(page: Dashboard, request: Request) -> None:
    answer = page.respond(request)
    assert answer.status == 200, (request.path, answer.status)


def _show(name: str, ask: Callable[[], Any], repeats: int, budget_ms: float) -> None:
    ask()
    found = []
    for _ in range(repeats):
        begun_s = time.perf_counter()
        ask()
        found.append((time.perf_counter() - begun_s) * 1_000)
    found.sort()
    p95 = found[int(len(found) * 0.95)]
    late = f"  over {budget_ms:g} ms" if p95 > budget_ms else ""
    CONSOLE.print(f"  {name:32} p50 {found[len(found) // 2]:7.1f}  p95 {p95:7.1f}{late}")
