"""Counters of many processes: nothing is lost unreported, and memory does not grow.

Each process counts outcomes at a steady rate, without deliveries, and sends them to one PostgreSQL
as a worker does. The sum in the ledger and the counts that were reported as lost are all outcomes.
By default a few processes count for a few seconds. `--processes 50 --rate 200 --seconds 60` is a
large fleet.
"""

from __future__ import annotations

import multiprocessing
import resource
import time

from rich.table import Table

from benchmarks.measure import CONSOLE
from taskguard.ledger.sql import SqlLedger
from taskguard.metrics import COUNTS_LOST, DELIVERIES
from taskguard.model.outcomes import Ended
from taskguard.run.flush import Flush
from taskguard.run.tally import Tally
from taskguard_sandbox.servers import Postgres

_TASKS = 20
_STEP_S = 0.05
_OUTCOMES = tuple(Ended)


def main(*, quick: bool, processes: int = 4, rate: int = 200, seconds: float | None = None) -> None:
    """Count, then compare the ledger with what was counted."""
    for_s = seconds or (3.0 if quick else 15.0)
    with Postgres() as postgres:
        url = postgres.create_database("counts")
        ledger = SqlLedger(url)
        ledger.create_schema()
        found = _run(url, processes, rate, for_s)
        totals = ledger.counts()
        ledger.close()
    counted = sum(count for count, _, _ in found)
    names = {DELIVERIES.what(ended) for ended in _OUTCOMES}
    stored = int(sum(row.n for row in totals if row.what in names))
    lost = int(sum(row.n for row in totals if row.what == COUNTS_LOST.what()))
    table = Table("processes", "outcomes", "in the ledger", "reported lost", "memory grew by, kB")
    grew = max(after - before for _, before, after in found)
    table.add_row(*map(str, (processes, counted, stored, lost, grew)))
    CONSOLE.print(table)
    CONSOLE.print(__doc__)
    if stored + lost != counted:
        raise SystemExit(f"{counted} outcomes were counted, and {stored + lost} are accounted for")


def _run(url: str, processes: int, rate: int, for_s: float) -> list[tuple[int, int, int]]:
    fork = multiprocessing.get_context("fork")
    with fork.Pool(processes) as pool:
        return pool.starmap(_count, [(url, rate, for_s)] * processes, chunksize=1)


def _count(url: str, rate: int, for_s: float) -> tuple[int, int, int]:
    """Return the number of outcomes, and the most memory in kB after a third and at the end."""
    ledger, tally = SqlLedger(url), Tally()
    flush = Flush(tally, ledger)
    flush.due_at_s = time.monotonic() + 1.0  # often enough for a short run
    began_s, counted, early = time.monotonic(), 0, 0
    while (passed_s := time.monotonic() - began_s) < for_s:
        while counted < passed_s * rate:
            tally.delivery(f"task{counted % _TASKS}", _OUTCOMES[counted % len(_OUTCOMES)], 0.2, 0.1)
            counted += 1
        if flush.is_due:
            flush.flush()
            flush.due_at_s = min(flush.due_at_s, time.monotonic() + 1.0)
        if not early and passed_s > for_s / 3:
            early = _memory_kb()
        time.sleep(_STEP_S)
    while not tally.is_empty:
        flush.flush()
    ledger.close()
    return counted, early or _memory_kb(), _memory_kb()


def _memory_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
