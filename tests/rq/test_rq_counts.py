"""Work horses end after one job. Their deliveries are counted once each, by whichever worker."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from support.invoices import charge, recover
from support.scripts import run_script
from taskguard.metrics import OUTCOMES, zeros_of_task


def outcomes(office: Any, task: Any = charge) -> dict[str, int]:
    """Return how often deliveries of a task had which outcome."""
    counts = {
        row.what: int(row.n) for row in office.ledger.counts() if row.task.endswith(task.__name__)
    }
    by_name = {name: counts.get(f"deliveries/{name}", 0) for name in OUTCOMES}
    return {name: n for name, n in by_name.items() if n}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("taskguard_rq.GuardedWorker", ()),
        ("taskguard_rq.GuardedSimpleWorker", ()),
        ("rq.Worker", ("--with-scheduler",)),
        pytest.param("taskguard_rq.GuardedSpawnWorker", (), marks=pytest.mark.once),
    ],
)
def test_each_job_is_counted_once(office: Any, kind: str, options: tuple[str, ...]) -> None:
    """A worker that stops has sent all counts. Each task begins with zeros."""
    worker = office.worker(kind, *options, fresh=True)
    jobs = [office.queue.enqueue(charge, number) for number in (1, 2, 3, 1)]
    office.wait_for(
        lambda: all(job.get_status(refresh=True) == "finished" for job in jobs), "all finished"
    )
    worker.process.terminate()
    worker.process.wait()
    assert outcomes(office) == {"done": 3, "duplicate": 1}
    names = {row.what for row in office.ledger.counts() if row.task.endswith("charge")}
    assert set(zeros_of_task()) <= names


def test_an_idle_worker_sends_the_counts_of_its_last_jobs(office: Any) -> None:
    """It waits for jobs for a shorter time as long as there are counts."""
    office.worker()
    for number in range(3):
        office.queue.enqueue(charge, number)
    office.wait_for(lambda: outcomes(office) == {"done": 3}, "the counts")


def test_counts_of_a_killed_work_horse_are_reported_as_a_gap(office: Any) -> None:
    """Its delivery has no outcome. The next one has."""
    worker = office.worker(SHOP_TTL_S="2")
    office.queue.enqueue(recover, 1, 60.0)
    office.wait_for(lambda: office.steps("began"), "the body")
    os.kill(office.steps("began")[0][1], signal.SIGKILL)
    office.queue.enqueue(charge, 2)
    office.wait_for(lambda: office.effects()["2"], "the next job")
    worker.process.terminate()
    worker.process.wait()
    assert outcomes(office) == {"done": 1}
    counts = {row.what: row.n for row in office.ledger.counts() if not row.task}
    assert counts["counts_lost"] == 1


def test_a_worker_that_ends_leaves_no_pipe_open(redis_url: str, sqlite_url: str) -> None:
    """A program may run one burst after the other."""
    said = run_script(
        f"""
import os
from redis import Redis
from taskguard.ledger.sql import SqlLedger
from taskguard_rq import GuardedWorker, configure

ledger = SqlLedger({sqlite_url!r})
ledger.create_schema()
configure(locks=None, ledger=ledger)
connection, opened = Redis.from_url({redis_url!r}), []
for _ in range(3):
    GuardedWorker(["calm"], connection=connection).work(burst=True, with_scheduler=False)
    opened.append(len(os.listdir("/dev/fd")))
print(opened[-1] - opened[0])
"""
    )
    assert said.split()[-1] == "0"
