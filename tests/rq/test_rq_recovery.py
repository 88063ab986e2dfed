"""Work that RQ lost, and jobs enqueued in a transaction, on real workers."""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import Any

import pytest
import sqlalchemy as sa
from rq import Queue, Repeat, Retry, SimpleWorker
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer
from rq.utils import now
from sqlalchemy import orm

from support import invoices
from support.due import make_due
from support.office import SHORT_LEASES
from support.waiting import wait_until
from taskguard.cli import main
from taskguard.errors import ConfigurationError
from taskguard.model.states import State
from taskguard_rq import enqueue, sweep

pytestmark = pytest.mark.usefixtures("producer")


def wait_for_effects(office: Any, count: int) -> None:
    wait_until(
        lambda: sum(office.effects().values()) >= count,
        message=lambda: f"{count} effects, there are {dict(office.effects())}",
    )


def swept(office: Any) -> int:
    return sweep(office.connection).sent


@pytest.mark.parametrize("left", ["nothing", "the record"])
def test_a_killed_workers_job_is_enqueued_again_when_redis_lost_it(office: Any, left: str) -> None:
    """The job is enqueued again by its record if that exists, else by the message stored with the
    work."""
    job = office.queue.enqueue(invoices.recover, 1, 600)
    worker = office.worker(**SHORT_LEASES)
    wait_until(lambda: office.steps("began"), message="a body")
    worker.kill()
    if left == "nothing":
        office.connection.flushdb()
    else:
        for key in office.connection.keys("rq:*"):
            if key != f"rq:job:{job.id}".encode():
                office.connection.delete(key)
    wait_until(lambda: swept(office), message="an overdue work")
    office.worker()
    wait_for_effects(office, 1)
    wait_until(
        lambda: Job.fetch(job.id, connection=office.connection).is_finished,
        message="finished",
    )
    assert office.effects() == Counter({"1": 1})
    assert swept(office) == 0


def test_a_job_that_rq_gave_up_is_enqueued_again(office: Any) -> None:
    """After its horse was killed, a job is FAILED for RQ, and PROCESSING with an expired lease in
    the ledger. A sweep enqueues it again."""
    job = office.queue.enqueue(invoices.recover, 1, 600)
    office.worker(**SHORT_LEASES)
    wait_until(lambda: office.steps("began"), message="a body")
    os.kill(office.steps("began")[0][1], signal.SIGKILL)
    wait_until(lambda: job.get_status() == "failed", message="failed")
    wait_until(lambda: swept(office), message="an overdue work")
    wait_for_effects(office, 1)
    wait_until(lambda: job.get_status() == "finished", message="finished")
    assert not office.queue.failed_job_registry.get_job_ids()


def test_enqueued_in_a_transaction_it_runs_if_that_commits(office: Any) -> None:
    """A job that is enqueued in a transaction runs only if the transaction commits."""
    with orm.Session(office.engine) as session:
        gone = enqueue(office.queue, invoices.recover, (1,), session=session)
        session.rollback()
        kept = enqueue(office.queue, invoices.recover, (2,), session=session, result_ttl=300)
        assert office.queue.count == 0
        session.commit()
    gone.send()
    assert office.queue.job_ids == [kept.job.id]
    office.worker()
    wait_for_effects(office, 1)
    wait_until(
        lambda: office.ledger.view("support.invoices.recover invoice:2").state is State.DONE,
        message="DONE",
    )
    assert office.effects() == Counter({"2": 1})


def test_what_its_process_did_not_send_the_sweep_does(
    office: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """`taskguard sweep --rq` sends a job that its process did not send. A duplicate of it is
    answered."""
    with office.engine.connect() as db:
        left = enqueue(office.queue, invoices.recover, (1,), session=db)
        db.commit()
    assert (office.queue.count, left.outcome) == (0, "stored")
    make_due(office)
    assert main(["sweep", "--rq", office.broker]) == 0
    assert capsys.readouterr().out == "sent: 1, refused: 0\n"
    left.send()
    assert left.outcome == "sent"
    office.worker()
    wait_for_effects(office, 1)
    wait_until(lambda: office.queue.count == 0, message="an empty queue")
    assert office.effects() == Counter({"1": 1})


def test_only_guarded_functions_are_enqueued(office: Any) -> None:
    """A function without a guard is refused, because duplicates would run it. So are `depends_on`
    and `ttl`."""
    with office.engine.connect() as db:
        with pytest.raises(ConfigurationError, match="not guarded"):
            enqueue(office.queue, len, ("x",), session=db)
        with pytest.raises(ConfigurationError, match="depends_on"):
            enqueue(office.queue, invoices.recover, (1,), session=db, depends_on="x")
        with pytest.raises(ConfigurationError, match="ttl"):
            enqueue(office.queue, invoices.recover, (1,), session=db, ttl=60)


def test_outside_a_job_a_sweep_needs_the_queues_redis() -> None:
    """The error of a sweep outside a job says that it needs Redis."""
    with pytest.raises(ConfigurationError, match="Redis"):
        sweep()


def leave_open(office: Any, queue: Any, function: Any, *args: Any, **options: Any) -> Any:
    """Committed with its process gone before it could send, and overdue."""
    with office.engine.connect() as db:
        left = enqueue(queue, function, args, session=db, **options)
        db.commit()
    make_due(office)
    return left.job


class _Worker(SimpleWorker):
    def _install_signal_handlers(self) -> None:
        """They are the test's."""


def run_all(office: Any, queue: Any) -> None:
    _Worker([queue], connection=office.connection, serializer=queue.serializer).work(burst=True)


def test_a_failed_job_that_is_in_no_registry_is_enqueued_again(office: Any) -> None:
    """A FAILED job that its registry has forgotten is enqueued again."""
    job = leave_open(office, office.queue, invoices.recover, 1)
    assert swept(office) == 1
    office.connection.delete(office.queue.key)
    job.set_status(JobStatus.FAILED)
    make_due(office)
    assert swept(office) == 1
    assert office.queue.job_ids == [job.id]


@pytest.mark.parametrize("status", [JobStatus.CANCELED, JobStatus.STOPPED])
def test_a_job_that_was_cancelled_or_stopped_stays_so(office: Any, status: JobStatus) -> None:
    """A sweep does not enqueue a cancelled or stopped job."""
    job = leave_open(office, office.queue, invoices.recover, 1)
    assert swept(office) == 1
    if status is JobStatus.CANCELED:
        job.cancel()
    else:
        office.connection.delete(office.queue.key)
        job.set_status(status)
    make_due(office)
    swept(office)
    assert office.queue.count == 0


def test_a_job_of_another_serializer_is_sent_as_it_was_written(office: Any) -> None:
    """A sweep enqueues a job with the job's own serializer."""
    queue = Queue("invoices", connection=office.connection, serializer=JSONSerializer)
    job = leave_open(office, queue, invoices.recover, 1, meta={"by": "shop"})
    assert swept(office) == 1
    office.connection.delete(queue.key)
    make_due(office)
    assert swept(office) == 1
    run_all(office, queue)
    assert office.effects() == Counter({"1": 1})
    assert job.get_meta() == {"by": "shop"}


def test_an_enqueued_message_is_the_one_that_is_delivered(office: Any) -> None:
    """The message is that of its job, or that of its function's `message_id=`. Otherwise its work
    would remain overdue."""
    queue = office.queue
    leave_open(office, queue, invoices.book, 7, retry=Retry(max=3), repeat=Repeat(times=1))
    leave_open(office, queue, invoices.report, "monday", meta={"day": "monday"})
    assert swept(office) == 2
    run_all(office, queue)
    make_due(office)
    assert swept(office) == 0
    assert office.effects() == Counter({"7": 2, "monday": 1})  # one of them is the repeat


def test_a_sweep_enqueues_in_batches(office: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep enqueues all jobs in batches, also those that RQ gave up. It leaves out cancelled
    jobs."""
    jobs = [leave_open(office, office.queue, invoices.recover, number) for number in range(9)]
    for job in jobs[:4]:
        job.save()  # of the others there is no record
    jobs[0].set_status(JobStatus.CANCELED)
    jobs[1].set_status(JobStatus.FAILED)
    office.queue.failed_job_registry.add(jobs[1], ttl=600)
    alone: list[str] = []
    enqueue_job = Queue.enqueue_job

    def noted(queue: Any, job: Job, pipeline: Any = None, **options: Any) -> Job:
        if pipeline is None:
            alone.append(job.id)
        return enqueue_job(queue, job, pipeline=pipeline, **options)

    monkeypatch.setattr(Queue, "enqueue_job", noted)
    assert swept(office) == 9
    assert sorted(office.queue.job_ids) == sorted(job.id for job in jobs[1:])
    assert not office.queue.failed_job_registry.get_job_ids()
    assert alone == []


def test_a_job_that_depends_on_another_in_the_batch_waits_for_it(office: Any) -> None:
    """A job that depends on another one of its batch is DEFERRED, as RQ would have it."""
    first = leave_open(office, office.queue, invoices.recover, 1)
    second = leave_open(office, office.queue, invoices.recover, 2)
    second._dependency_ids = [first.id]
    second.save()
    assert swept(office) == 2
    assert office.queue.job_ids == [first.id]
    assert second.get_status() is JobStatus.DEFERRED


def test_a_job_that_is_cancelled_in_the_middle_of_a_batch_stays_so(
    office: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is cancelled while a batch is sent is not enqueued. The others are."""
    jobs = [leave_open(office, office.queue, invoices.recover, number) for number in range(3)]
    for job in jobs:
        office.queue.enqueue_job(job)
    fetch_many = Job.fetch_many

    def cancelled(*args: Any, **options: Any) -> Any:
        found = fetch_many(*args, **options)
        Job.fetch(jobs[1].id, connection=office.connection).cancel()
        return found

    monkeypatch.setattr(Job, "fetch_many", cancelled)
    swept(office)
    assert set(office.queue.job_ids) == {jobs[0].id, jobs[2].id}
    assert jobs[1].get_status() is JobStatus.CANCELED


def test_a_record_that_is_no_job_is_made_one(office: Any) -> None:
    """If Redis lost a record and a heartbeat wrote a part of it, the job is restored. Others are
    enqueued as well."""
    jobs = [leave_open(office, office.queue, invoices.recover, number) for number in range(3)]
    jobs[1].heartbeat(now(), 60)
    assert swept(office) == 3
    assert set(office.queue.job_ids) == {job.id for job in jobs}


def test_what_redis_refuses_at_the_end_of_a_batch_is_not_lost(office: Any) -> None:
    """If Redis refuses a batch, none of it counts as sent. A later sweep sends it."""
    for number in range(5):
        leave_open(office, office.queue, invoices.recover, number)
    make_due(office)
    office.connection.set(office.queue.key, "no list, so that no job can be put into it")
    assert swept(office) == 0
    office.connection.delete(office.queue.key)
    make_due(office)
    assert swept(office) == 5
    assert office.queue.count == 5


def test_a_stored_job_that_cannot_be_read_is_failed_and_holds_up_no_other(office: Any) -> None:
    """An unreadable job is FAILED, and the other one is enqueued."""
    queue = Queue("office", connection=office.connection)
    with orm.Session(office.engine) as session, session.begin():
        for number in (1, 2):
            enqueue(queue, invoices.charge, (number,), session=session)
    office.connection.flushdb()
    make_due(office)
    with office.engine.begin() as db:
        work_ids = db.execute(sa.text("select id from taskguard_work order by id")).scalars().all()
        bad = sa.text(
            "update taskguard_work set call = replace(call, '\"fields\"', '\"f\"') where id = :id"
        )
        assert db.execute(bad, {"id": work_ids[0]}).rowcount == 1
    done = sweep(office.connection)
    assert (done.sent, done.failed) == (1, 1)
    assert queue.count == 1


@pytest.mark.parametrize("url", ["redis://:s3/cret@127.0.0.1", "s3cret@127.0.0.1:6379"])
def test_a_url_of_the_queues_that_cannot_be_read_is_reported_without_its_password(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints one line, without the password."""
    assert main(["sweep", "--rq", url]) == 1
    said = capsys.readouterr().err
    assert "percent-encode" in said
    assert not {"s3", "cret"} & set(said.replace(":", " ").split())
    assert "s3cret" not in said
