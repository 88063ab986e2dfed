"""Jobs with a `ttl` that wait in the line of their key, with real workers.

A job that expires there is CANCELED, with the reason, and the jobs behind it run.
"""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import pytest
import sqlalchemy as sa
from rq import Retry
from rq.job import Job

from support.invoices import latest, queue_up
from support.office import SHORT_LEASES
from support.waiting import wait_until
from taskguard.integration import MessageRef
from taskguard.ledger.tables import WORK
from taskguard.model.states import EXPIRED
from taskguard.run.parking import send_stored
from taskguard_rq.calls import RQSender

# Long enough for a busy machine to park what is to expire in its line.
TTL_S = 12


def put(office: Any, number: int, *words: Any, function: Any = queue_up, **options: Any) -> Job:
    job = office.queue.enqueue(function, "a", number, *words, **options)
    assert isinstance(job, Job)
    return job


def wait_for_line(office: Any, *jobs: Job) -> None:
    for job in jobs:
        wait_for_end(office, job, "deferred")
    assert len(office.ledger.waiting()) == len(jobs)


def wait_for_end(office: Any, job: Job, status: str) -> None:
    # An emptied Redis has no record of it for a while.
    office.wait_for(lambda: office.connection.hget(job.key, "status") == status.encode(), status)


def began(office: Any) -> list[str]:
    return [item for item, _ in office.steps("began")]


def is_announced(office: Any, job: Job) -> bool:
    """RQ and the ledger say that it has expired, for as long as RQ keeps a result."""
    wait_for_end(office, job, "canceled")
    with office.engine.connect() as db:
        select = sa.select(WORK.c.state, WORK.c.final, WORK.c.error)
        [row] = db.execute(select.where(WORK.c.message.startswith(job.id)))
    assert row == ("FAILED", 0, EXPIRED)
    assert 0 < office.connection.ttl(job.key) <= 500
    assert len(office.queue.canceled_job_registry) == 0  # RQ never cleans it
    return bool(job.get_meta()["taskguard_line"] == "expired")


def nothing_is_left(office: Any) -> bool:
    assert office.ledger.waiting() == []
    assert office.queue.deferred_job_registry.count == 0
    wait_until(lambda: office.queue.started_job_registry.count == 0)
    return office.queue.count == office.connection.scard("taskguard:parked") == 0


def test_in_line(office: Any) -> None:
    """Two jobs expire while their key is held. A third one does not: its record is kept, and it
    runs."""
    for _ in range(2):
        office.worker()
    first = put(office, 0, True)
    office.wait_for(lambda: began(office), "the first")
    soon = [put(office, number, ttl=TTL_S, retry=Retry(max=3)) for number in (1, 2)]
    later = put(office, 3, ttl=600)
    wait_for_line(office, *soon, later)
    assert {office.connection.ttl(job.key) for job in (*soon, later)} == {-1}
    after = office.queue.enqueue(queue_up, "b", 0, depends_on=soon[0])
    assert all(is_announced(office, job) for job in soon)
    # The holder is still at work.
    assert first.get_status(refresh=True) == "started"
    wait_for_line(office, later)
    office.let_go()
    for job in (first, later):
        wait_for_end(office, job, "finished")
    assert began(office) == ["a 0", "a 3"]
    assert set(office.effects().values()) == {1}
    later.refresh()
    assert later.ttl == 600
    assert after.get_status() == "deferred"  # as after a cancel()
    after.delete()
    assert nothing_is_left(office)


def test_on_its_way(office: Any) -> None:
    """A job that expires after its promotion does not run. The next one runs at once."""
    office.worker()
    with office.holding("queue:a"):
        late, later = put(office, 1, ttl=TTL_S), put(office, 2)
        wait_for_line(office, late, later)
        busy = office.queue.enqueue(queue_up, "b", 0, True)
        office.wait_for(lambda: began(office), "the worker is busy")
        sent_s = time.time()
    wait_for_end(office, late, "queued")
    assert office.connection.ttl(late.key) == -1
    wait_until(lambda: time.time() > sent_s + TTL_S)
    office.let_go()
    assert is_announced(office, late)
    for job in (busy, later):
        wait_for_end(office, job, "finished")
    assert began(office) == ["b 0", "a 2"]
    assert nothing_is_left(office)


def test_its_time_ends_with_its_line(office: Any) -> None:
    """If a horse is killed after its job's deadline, the body that began in time runs once more."""
    office.worker(**SHORT_LEASES)
    with office.holding("queue:a"):
        job = put(office, 1, True, ttl=TTL_S, retry=Retry(max=1))
        wait_for_line(office, job)
        parked_s = time.time()
    office.wait_for(lambda: began(office), "the body")
    wait_until(lambda: time.time() > parked_s + TTL_S)
    [(_, horse)] = office.steps("began")
    os.kill(horse, signal.SIGKILL)
    wait_for_end(office, job, "finished")
    assert office.effects() == {"a 1": 1}
    assert nothing_is_left(office)


def test_what_becomes_of_its_record_does_not_matter(office: Any) -> None:
    """If its meta is overwritten, or Redis is emptied, the ledger still knows when the job
    expires."""
    office.worker()
    with office.holding("queue:a"):
        jobs = [put(office, number, ttl=TTL_S) for number in (1, 2)]
        wait_for_line(office, *jobs)
        jobs[0].save_meta()
        busy = office.queue.enqueue(queue_up, "b", 0, True)
        office.wait_for(lambda: began(office), "the worker is busy")
        sent_s = time.time()
    wait_for_end(office, jobs[0], "queued")
    office.connection.delete(*(job.key for job in jobs), "taskguard:parked")
    wait_until(lambda: time.time() > sent_s + TTL_S)
    office.let_go()
    wait_for_end(office, busy, "finished")
    # Each job may be there several times by now, because it was sent again.
    started = office.queue.started_job_registry
    wait_until(lambda: office.queue.count == started.count == 0)
    assert all(is_announced(office, job) for job in jobs)
    assert began(office) == ["b 0"]


def test_put_off_by_a_stock_worker(office: Any) -> None:
    """A promoted job that is deferred because its key is taken again keeps the deadline of its
    line."""
    worker = office.worker()
    with office.holding("queue:a"):
        job = put(office, 1, ttl=TTL_S)
        wait_for_line(office, job)
        parked_s = time.time()
        worker.kill()
        [waits] = office.ledger.waiting()
        sender = RQSender(office.connection)
        sender.hand_off(json.loads(office.ledger.view(waits.work).call), MessageRef(waits.message))
        worker = office.worker("rq.Worker", "--with-scheduler")
        wait_for_end(office, job, "scheduled")
        worker.kill()
        wait_until(lambda: time.time() > parked_s + TTL_S)
    # RQ's record may be gone by now, as that of any job with a ttl that is put off.
    office.worker()
    assert is_announced(office, job)
    assert began(office) == []


def test_it_runs_if_it_is_enqueued_again(office: Any) -> None:
    """An expired job that is enqueued again runs, with a new deadline."""
    office.worker()
    with office.holding("queue:a"):
        job = put(office, 1, ttl=TTL_S)
        assert is_announced(office, job)
    office.queue.enqueue_job(job)
    wait_for_end(office, job, "finished")
    assert office.effects() == {"a 1": 1}
    assert nothing_is_left(office)


@pytest.mark.once
def test_an_emptied_redis(office: Any) -> None:
    """After Redis was emptied, waiting jobs are enqueued again from the ledger, with their
    deadlines."""
    office.worker()
    with office.holding("queue:a"):
        soon, later = put(office, 1, ttl=TTL_S), put(office, 2, ttl=600)
        wait_for_line(office, soon, later)
        office.connection.flushdb()
        assert is_announced(office, soon)
    wait_for_end(office, later, "finished")
    assert Job.fetch(later.id, connection=office.connection).ttl == 600
    assert office.effects() == {"a 2": 1}


def test_a_horse_that_dies_before_rq_hears_of_it(office: Any) -> None:
    """If a horse dies after its expired work is FAILED, the redelivered job ends as expired."""
    worker = office.worker()
    with office.holding("queue:a"):
        job = put(office, 1, ttl=TTL_S)
        wait_for_line(office, job)
        worker.kill()
        wait_until(office.ledger.expired)
        [late] = office.ledger.overdue(parked=True)
        send_stored(late, {"rq": RQSender(office.connection).hand_off})
        assert office.ledger.expire(late.work, message=late.message, retries=0, due=True)
        office.worker()
        assert is_announced(office, job)
    assert began(office) == []
    assert nothing_is_left(office)


def test_a_stock_worker_says_failed(office: Any) -> None:
    """A stock worker sets an expired job to FAILED, with the reason."""
    office.worker()
    with office.holding("queue:a"):
        job = put(office, 1, ttl=TTL_S, retry=Retry(max=3))
        wait_for_line(office, job)
        after = office.queue.enqueue(queue_up, "c", 0, depends_on=job)
        busy = office.queue.enqueue(queue_up, "b", 0, True)
        office.wait_for(lambda: began(office), "the worker is busy")
        office.worker("rq.Worker", "--with-scheduler")
        wait_for_end(office, job, "failed")
    assert "until its ttl was over" in job.latest_result().exc_string
    office.let_go()
    wait_for_end(office, busy, "finished")
    assert after.get_status() == "deferred"
    assert office.effects() == {"b 0": 1}


def test_the_newest_expires_too(office: Any) -> None:
    """With `busy="latest"`, the newest waiting job expires. An older one that it superseded does
    not run."""
    for _ in range(2):
        office.worker()
    first = put(office, 1, 600.0, function=latest)
    office.wait_for(lambda: began(office), "the first")
    older = put(office, 2, function=latest)
    wait_for_line(office, older)
    newest = put(office, 3, function=latest, ttl=TTL_S)
    assert is_announced(office, newest)
    assert older.get_status(refresh=True) == "canceled"
    office.let_go()
    wait_for_end(office, first, "finished")
    assert office.effects() == {"a 1": 1}
    assert nothing_is_left(office)
