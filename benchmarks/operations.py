"""Questions of operators among ten million work items and a million messages that wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import taskguard
from benchmarks.measure import CONSOLE
from taskguard.ledger.sql import SqlLedger
from taskguard.model.states import State
from taskguard.model.views import WorkFilter
from taskguard.operations import Operations
from taskguard_sandbox.full_ledger import fill
from taskguard_sandbox.servers import Postgres

FEW = {"works": 20_000, "waiting": 5_000, "lines": 100}
MANY = {"works": 10_000_000, "waiting": 1_000_000, "lines": 1_000}
BUDGET_MS = 50.0

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


def main(*, quick: bool) -> None:
    """Print the median and the 95th percentile of each question."""
    sizes = FEW if quick else MANY
    with Postgres(shared_buffers="512MB", max_wal_size="8GB") as postgres:
        url = postgres.create_database("operations")
        ledger = SqlLedger(url)
        ledger.create_schema()
        fill(url, **sizes)
        tg = taskguard.connect(locks=None, ledger=ledger, listeners=())
        CONSOLE.print(
            f"Questions of operators among {sizes['works']:,} work items, {sizes['waiting']:,} of "
            f"whose messages wait; milliseconds, warm. Budget: {BUDGET_MS:g} ms at p95"
        )
        for name, ask in QUESTIONS.items():
            found = sorted(_measured(tg.operations, ask, repeats=10 if quick else 40))
            p95 = found[int(len(found) * 0.95)]
            late = "  over the budget" if p95 > BUDGET_MS else ""
            CONSOLE.print(f"  {name:32} p50 {found[len(found) // 2]:7.1f}  p95 {p95:7.1f}{late}")
        tg.close()


def _measured(ops: Operations, ask: Callable[[Operations], Any], *, repeats: int) -> list[float]:
    ask(ops)
    found = []
    for _ in range(repeats):
        begun_s = time.perf_counter()
        ask(ops)
        found.append((time.perf_counter() - begun_s) * 1_000)
    return found
