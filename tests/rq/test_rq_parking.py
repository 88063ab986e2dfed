"""`busy="park"` for RQ, on real workers: jobs wait in the ledger, and come in their order."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import rq
import sqlalchemy as sa
from rq import Repeat
from rq.exceptions import DuplicateJobError
from rq.job import Job
from rq.registry import clean_registries

from support.invoices import by_priority, index_in_line, queue_up
from support.waiting import patience_s, wait_until
from taskguard.ledger.tables import WORK
from taskguard_rq import enqueue
from taskguard_rq.marks import marks_of


def records(office: Any) -> list[Any]:
    """Return the records in line, in order."""
    with office.engine.connect() as db:
        select = sa.select(WORK).where(WORK.c.parked.is_not(None), WORK.c.state == "NEW")
        return list(db.execute(select.order_by(WORK.c.parked)))


def failed(office: Any) -> list[Any]:
    with office.engine.connect() as db:
        return list(db.execute(sa.select(WORK).where(WORK.c.state == "FAILED")))


def put(office: Any, account: str, numbers: Any, **options: Any) -> list[Job]:
    return [office.queue.enqueue(queue_up, account, number, **options) for number in numbers]


def line_up(office: Any, count: int, **options: Any) -> tuple[Job, list[Job]]:
    """Enqueue a job that holds the account until it may go, and jobs that wait."""
    first = office.queue.enqueue(queue_up, "a", 0, True)
    office.wait_for(lambda: office.steps("began"), "the first")
    later = put(office, "a", range(1, count + 1), **options)
    wait_for_line(office, later)
    return first, later


def wait_for_line(office: Any, jobs: list[Job]) -> None:
    deferred = office.queue.deferred_job_registry
    office.wait_for(lambda: deferred.get_job_ids() == [job.id for job in jobs], "a line")


def numbers_of(office: Any, account: str) -> list[int]:
    """In which order bodies of an account began."""
    items = [item.split() for item, _ in office.steps("began")]
    return [int(number) for name, number in items if name == account]


def wait_for_all(office: Any, jobs: list[Job]) -> None:
    office.wait_for(
        lambda: {job.get_status(refresh=True) for job in jobs} == {"finished"}, "all finished"
    )


def test_jobs_run_in_order_and_occupy_no_worker(office: Any) -> None:
    """Waiting jobs are DEFERRED, and are in no queue and in no worker. A job of another key runs
    meanwhile."""
    office.worker()
    office.worker()
    first, later = line_up(office, 8)
    assert {job.get_status() for job in later} == {"deferred"}
    assert {office.connection.ttl(job.key) for job in later} == {-1}
    assert office.queue.count == 0
    assert len(office.queue.started_job_registry) == 1
    cold = put(office, "b", [0])
    wait_for_all(office, cold)
    assert first.get_status() == "started"
    office.let_go()
    wait_for_all(office, [first, *later])
    assert numbers_of(office, "a") == list(range(9))
    assert [job.return_value() for job in later] == list(range(1, 9))
    assert set(office.effects().values()) == {1}
    assert records(office) == []
    assert office.queue.deferred_job_registry.get_job_ids() == []
    assert office.connection.scard("taskguard:parked") == 0
    assert not marks_of(later[0]).line


def relays(worker: Any) -> list[psutil.Process]:
    """The relay's process of a worker: of its own group, and deaf to the terminal's interrupt."""
    found = []
    for child in psutil.Process(worker.process.pid).children():
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            status = Path(f"/proc/{child.pid}/status").read_text()
            [ignored] = re.findall(r"SigIgn:\s*(\w+)", status)
            is_deaf = int(ignored, 16) & 1 << signal.SIGINT - 1
            if is_deaf and os.getpgid(child.pid) == os.getpgid(worker.process.pid):
                found.append(child)
    return found


def test_a_job_that_is_taken_back_does_not_run(office: Any) -> None:
    """When the turn of a cancelled or deleted job comes, it leaves the line, FAILED in the ledger.
    Those behind it go on."""
    office.worker()
    office.worker()
    first, [second, cancelled, deleted, last] = line_up(office, 4)
    cancelled.cancel()
    deleted.delete()
    office.let_go()
    office.wait_for(lambda: "a 4" in office.effects(), "the last")
    assert numbers_of(office, "a") == [0, 1, 4]
    assert [row.parked for row in failed(office)] == [None, None]
    errors = [row.error for row in failed(office)]
    assert any("canceled" in error for error in errors)
    assert any("deleted" in error for error in errors)
    assert cancelled.get_status(refresh=True) == "canceled"
    wait_for_all(office, [first, second, last])
    assert office.connection.scard("taskguard:parked") == 0


def test_rq_says_where_they_are(office: Any) -> None:
    """RQ counts waiting jobs neither as queued nor as executing, and its cleaning leaves them
    alone."""
    worker = office.worker()
    other = office.worker()
    wait_until(lambda: not relays(worker) and not relays(other))
    first, later = line_up(office, 3)
    clean_registries(office.queue)
    asked = [sys.executable, "-m", "rq.cli", "info", "-u", office.broker, "-R"]
    said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    assert "0, 1 executing, 0 finished, 0 failed" in said
    wait_for_line(office, later)
    wait_until(lambda: relays(worker) or relays(other))
    office.let_go()
    wait_for_all(office, [first, *later])
    wait_until(lambda: relays(worker) and relays(other))


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_relay_that_died_is_started_again_and_ends_with_its_worker(office: Any, how: str) -> None:
    """The worker starts another relay after its next job, and leaves no zombie. The relay ends soon
    after its worker, even if that is killed."""
    worker = office.worker()
    wait_for_all(office, put(office, "a", [0]))
    wait_until(lambda: relays(worker))
    [died] = relays(worker)
    died.kill()
    wait_for_all(office, put(office, "a", [1]))
    wait_until(lambda: relays(worker) and not died.is_running())
    [relay] = relays(worker)
    assert relay != died
    worker.process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGTERM)
    worker.process.wait(patience_s())
    wait_until(lambda: not relay.is_running() or relay.status() == psutil.STATUS_ZOMBIE)


def test_a_stock_worker_puts_off(office: Any) -> None:
    """A stock worker defers a job until its key is free."""
    for _ in range(2):
        office.worker("rq.Worker", "--with-scheduler")
    first = office.queue.enqueue(queue_up, "a", 0, True)
    office.wait_for(lambda: office.steps("began"), "the first")
    [second] = put(office, "a", [1])
    wait_until(lambda: second.get_status(refresh=True) == "scheduled")
    assert records(office) == []
    office.let_go()
    wait_for_all(office, [first, second])
    assert set(office.effects().values()) == {1}


def test_a_job_that_cannot_wait_in_line_is_refused(office: Any) -> None:
    """The job fails with the reason, and no body begins. A promoted job is enqueued once more: one
    of rq-scheduler would be another message, and one with a rate limit of RQ's would wait for a
    slot."""
    [scheduled] = put(office, "a", [0], meta={"interval": 60})
    why = {scheduled: "for another one of the job"}
    if hasattr(rq, "RateLimit"):
        limit = rq.RateLimit(key="accounts", concurrency=1)
        [limited] = put(office, "a", [1], rate_limit=limit)
        why[limited] = "wait for RQ's slot"
    office.worker()
    office.wait_for(lambda: {job.get_status(refresh=True) for job in why} == {"failed"}, "failed")
    for job, reason in why.items():
        assert reason in job.latest_result().exc_string
    assert office.steps("began") == []


def test_what_hangs_on_a_job_waits_with_it(office: Any) -> None:
    """The dependents, repetitions and retries of a job wait with it. RQ's `unique` refuses a second
    job of its id."""
    office.worker()
    office.worker()
    first, [waits] = line_up(office, 1, repeat=Repeat(times=1), job_id="one")
    after = office.queue.enqueue(queue_up, "b", 0, depends_on=waits)
    assert after.get_status() == "deferred"
    with pytest.raises(DuplicateJobError):
        office.queue.enqueue(queue_up, "a", 1, job_id="one", unique=True)
    office.let_go()
    office.wait_for(lambda: office.effects()["a 1"] == 2, "the repetition")
    wait_for_all(office, [first, after, waits])
    assert numbers_of(office, "a") == [0, 1, 1]
    assert waits.retries_left is None


@pytest.mark.usefixtures("producer")
def test_arguments_of_a_job_that_waits_are_replaced(office: Any) -> None:
    """A replaced job is CANCELED, and the newer job waits in its place. Other callers get the
    newest result."""

    def index(words: str, duplicate: Any) -> Any:
        return enqueue(office.queue, index_in_line, (1, words), duplicate=duplicate)

    office.worker()
    office.worker()
    with office.holding("newest:1"):
        older = index("older", "replace")
        wait_for_line(office, [older.job])
        attached = index("ignored", "attach")
        assert (attached.outcome, attached.job.id) == ("attached", older.job.id)
        newer = index("newer", "replace")
        assert newer.outcome == "replaced"
        wait_for_line(office, [newer.job])
        office.wait_for(lambda: older.job.get_status(refresh=True) == "canceled", "replaced")
    wait_for_all(office, [newer.job])
    assert newer.job.return_value() == "newer"
    assert office.effects() == {"1 newer": 1}


def test_the_command_relays_lines(office: Any) -> None:
    """`taskguard relay --rq` promotes waiting jobs if no guarded worker is left."""
    worker = office.worker()
    with office.holding("queue:a"):
        jobs = put(office, "a", [0, 1])
        wait_for_line(office, jobs)
        worker.kill()
    office.worker("rq.SimpleWorker", "--with-scheduler")
    command = [sys.executable, "-m", "taskguard", "relay", "--rq", office.broker]
    with subprocess.Popen(command, env={**os.environ, **office.environment}) as relay:
        wait_for_all(office, jobs)
        relay.terminate()
        assert relay.wait(patience_s()) == 0
    assert numbers_of(office, "a") == [0, 1]


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("GuardedWorker", "default"),
        ("GuardedWorker", "round_robin"),
        pytest.param(
            "GuardedSpawnWorker",
            "default",
            marks=pytest.mark.skipif(not hasattr(rq, "RateLimit"), reason="parks from RQ 3 on"),
        ),
    ],
)
def test_by_priority(office: Any, kind: str, strategy: str) -> None:
    """A job of the queue that the worker looks into first goes first. The job that was sent first
    goes first within a queue, and if the worker takes its queues in turns."""
    later = rq.Queue("later", connection=office.connection)
    office.worker(f"taskguard_rq.{kind}", "later", "--dequeue-strategy", strategy)
    with office.holding("queue:a"):
        jobs = []
        # A child of SpawnWorker imports all that it needs, and each job is started twice.
        for number in range(4 if "Spawn" in kind else 6):
            queue = office.queue if number % 3 == 2 else later
            jobs.append(queue.enqueue(by_priority, "a", number))
            office.wait_for(lambda: len(records(office)) == len(jobs), "a line")
    wait_for_all(office, jobs)
    by_queue = strategy == "default"
    order = sorted(range(len(jobs)), key=lambda number: (by_queue and number % 3 != 2, number))
    # A child of SpawnWorker may start later than a promoted job is waited for. The next job is then
    # promoted, to the front of its queue, and only the first one is sure.
    sure = 1 if "Spawn" in kind else len(order)
    assert numbers_of(office, "a")[:sure] == order[:sure]
    assert office.effects() == {f"a {number}": 1 for number in order}
