"""RQ's messages, and jobs whose settings, arguments or results are wrong."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from rq import Queue, Repeat
from rq.job import Job

from support.invoices import book, book_again, book_unless_busy, charge, outlast, report, strange
from taskguard.model.states import State
from taskguard_rq import enqueue
from taskguard_rq.marks import marks_of
from taskguard_rq.recognition import message_of


def finished(job: Any) -> bool:
    return bool(job.get_status(refresh=True) == "finished")


def failed(job: Any) -> bool:
    return bool(job.get_status(refresh=True) == "failed")


def test_each_repeat_is_a_message_of_its_own(office: Any) -> None:
    """With `once_per="message"`, each repetition of a job has its effect."""
    office.queue.enqueue(book, 1, repeat=Repeat(times=2, interval=1))
    office.worker()
    office.wait_for(lambda: office.effects()["1"] >= 3, "three effects")
    assert office.effects() == Counter({"1": 3})


def test_a_queue_without_workers_runs_jobs_where_they_are_sent(office: Any, producer: None) -> None:
    """With `is_async=False`, a job runs where it is sent, also by `enqueue()`. A job for the key of
    the body that sends it fails with the reason. It does not count as sent, so a sweep sends it."""
    queue = Queue("invoices", connection=office.connection, is_async=False)
    job = enqueue(queue, book_again, (5, 1)).job
    assert finished(job)
    refused = Job.fetch(job.return_value(), connection=office.connection)
    assert failed(refused)
    assert "with is_async=False" in str(refused.latest_result().exc_string)
    assert office.effects() == Counter({"5 1": 1})
    with office.holding("account:6"), ThreadPoolExecutor(1) as another:
        busy = another.submit(queue.enqueue, book_again, 6, 0).result()
        skipped = another.submit(queue.enqueue, book_unless_busy, 6).result()
    assert failed(busy)
    assert "KeyBusyError" in str(busy.latest_result().exc_string)
    assert finished(skipped)
    assert skipped.return_value() is None
    assert office.queue.scheduled_job_registry.count == 0
    [overdue] = office.ledger.list_work(State.NEW, limit=9)
    assert (overdue.message.partition("@")[0], overdue.sends) == (refused.id, 0)


def test_a_job_that_never_runs_is_canceled(office: Any, producer: None) -> None:
    """A skipped job, or a job of revoked work, is CANCELED without a result, and its meta has the
    reason. A job that RQ repeats goes on with its next message."""
    first = enqueue(office.queue, charge, (3,)).job
    record = office.ledger.view("support.invoices.charge invoice:3")
    assert office.ledger.revoke(record.id, message=record.message)
    later = office.queue.enqueue(charge, 3)
    with office.holding("account:4"):
        office.worker()
        skipped = office.queue.enqueue(book_unless_busy, 4, result_ttl=600)
        repeated = office.queue.enqueue(book_unless_busy, 4, repeat=Repeat(times=1, interval=1))
        for job, why in ((first, "revoked"), (later, "revoked"), (skipped, "skipped")):
            office.wait_for(lambda job=job: job.get_status(refresh=True) == "canceled", "canceled")
            assert job.return_value() is None
            assert job.get_meta()["taskguard_line"] == why
        assert 0 < office.connection.ttl(skipped.key) <= 600
        office.wait_for(lambda: repeated.get_status(refresh=True) == "scheduled", "repeated")
    office.wait_for(lambda: office.effects()["4"] == 1, "the repetition")
    assert office.effects() == Counter({"4": 1})


def test_a_stock_worker_fails_a_job_of_revoked_work(office: Any, producer: None) -> None:
    """A stock worker fails a job of revoked work. A skipped job ends with None."""
    first = enqueue(office.queue, charge, (3,)).job
    record = office.ledger.view("support.invoices.charge invoice:3")
    assert office.ledger.revoke(record.id, message=record.message)
    with office.holding("account:4"):
        office.worker("rq.SimpleWorker")
        skipped = office.queue.enqueue(book_unless_busy, 4)
        office.wait_for(lambda: failed(first) and finished(skipped), "both ended")
    assert "WorkRevokedError" in str(first.latest_result().exc_string)
    assert office.effects() == Counter()


@pytest.mark.parametrize("options", [{"repeat": Repeat(times=1)}, {"meta": {"interval": 60}}, {}])
def test_a_job_that_is_used_again_is_not_too_old(office: Any, options: Any) -> None:
    """The age of a repeated job counts from when it was last enqueued. The age of any other job
    counts from when it was made."""
    job = office.queue.create_job(book, (1,), **options)
    job.created_at -= timedelta(days=40)
    office.queue.enqueue_job(job)
    office.worker("taskguard_rq.GuardedSimpleWorker")
    office.wait_for(lambda: finished(job) or failed(job), "ended")
    assert finished(job) is bool(options)
    assert office.effects()["1"] == (0 if not options else 2 if "repeat" in options else 1)
    assert failed(job) is ("MessageTooOldError" in str(job.latest_result().exc_string))


def test_a_record_written_back_as_it_once_was_loses_nothing(office: Any) -> None:
    """A deferral survives if RQ saves an older copy of the job's record."""
    with office.holding("invoice:9"):
        job = office.queue.enqueue(charge, 9)
        before = Job.fetch(job.id, office.connection)
        office.worker()
        office.wait_for(lambda: marks_of(job).deferrals, "put off")
        before.save()
    office.wait_for(lambda: finished(job), "done")
    assert office.effects() == Counter({"9": 1})


def test_messages_can_be_told_apart_by_what_the_sender_says(office: Any) -> None:
    """With `message_id=`, two jobs with one id are one message."""
    office.worker()
    jobs = [office.queue.enqueue(report, "mo", meta={"day": day}) for day in ("mo", "mo", "tu")]
    for job in jobs:
        office.wait_for(lambda j=job: finished(j), "finished")
    assert office.effects() == Counter({"mo": 2})


def test_jobs_of_rq_scheduler_are_told_apart_by_when_they_were_enqueued(
    office: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A job of rq-scheduler is a new message each time it is enqueued. A warning names
    `message_id=`."""
    job = office.queue.enqueue(book, 3, meta={"interval": 60})
    first = message_of(job)
    office.queue.enqueue_job(job)
    assert message_of(job).id != first.id
    assert "message_id=" in caplog.text


def test_a_time_out_ends_a_body_that_the_database_had_ended_before(office: Any) -> None:
    """A time-out in a body that the database has ended fails the job. The body does not run again
    without a time-out."""
    office.worker()
    job = office.queue.enqueue(outlast, 1, job_timeout=10)
    office.wait_for(lambda: failed(job), "failed")
    assert len(office.steps("began")) == 1


def test_a_job_beyond_its_timeout_fails_and_can_be_done_again(office: Any) -> None:
    """JobTimeoutException is an error of the body: the work is FAILED at once, and a requeued job
    need not wait for a lease."""
    job = office.queue.enqueue(charge, 4, 60.0, job_timeout=10)
    office.worker()
    office.wait_for(lambda: failed(job), "failed")
    view = office.ledger.view("support.invoices.charge invoice:4")
    assert view is not None
    assert view.state.value == "FAILED"
    assert "JobTimeoutException" in (view.error or "")
    job.requeue()
    office.wait_for(lambda: finished(job), "finished")
    assert office.effects() == Counter({"4": 1})


def test_an_argument_that_cannot_be_a_key_fails_with_its_name(office: Any) -> None:
    """The job fails with the argument's name, and later jobs run."""
    job = office.queue.enqueue(strange, None)
    after = office.queue.enqueue(charge, 5)
    office.worker()
    office.wait_for(lambda: failed(job), "failed")
    assert "invoice" in job.latest_result().exc_string
    assert "KeyArgumentError" in job.latest_result().exc_string
    office.wait_for(lambda: finished(after), "the next job")
    assert office.effects() == Counter({"5": 1})


def test_a_result_that_is_not_json_leaves_done_and_warns(office: Any) -> None:
    """The effect is committed, and a warning says that duplicates get None."""
    job = office.queue.enqueue(strange, 6)
    office.worker()
    office.wait_for(lambda: finished(job), "finished")
    office.wait_for(lambda: "duplicates will get None" in office.logs(), "the warning")
    assert office.effects() == Counter({"6": 1})


def test_a_missing_setting_fails_the_job_and_loses_it_not(office: Any) -> None:
    """The job fails with an error that says what to do, and shows no password. A requeued job is
    done."""
    right = dict(office.environment)
    jobs = []
    for number, (name, value, says) in enumerate(
        [
            ("TASKGUARD_LEDGER_URL", "", "ledger=None"),
            ("TASKGUARD_LOCKS_URL", "", "TASKGUARD_LOCKS_URL"),
            ("TASKGUARD_LEDGER_URL", "nonsense://shop:secret@h/d", "postgresql+psycopg://"),
        ]
    ):
        jobs.append(office.queue.enqueue(charge, number))
        office.environment = {**right, name: value}
        worker = office.worker()
        office.wait_for(lambda: failed(jobs[-1]), "failed")
        text = jobs[-1].latest_result().exc_string
        assert says in text
        assert "secret" not in text + office.logs()
        # Killed, because RQ forgets a request to stop that comes just before it waits for a job.
        worker.kill()
    office.environment = right
    office.worker()
    for job in jobs:
        job.requeue()
    office.wait_for(lambda: all(map(finished, jobs)), "done")
    assert office.effects() == Counter("012")


def test_missing_tables_put_the_job_off_until_they_are_there(office: Any) -> None:
    """If a table disappears under a worker, the job is deferred, and the log names the command.
    After the table is back, the job is done."""
    office.worker()
    with office.engine.begin() as db:
        db.execute(sa.text("alter table taskguard_work rename to hidden"))
    job = office.queue.enqueue(charge, 8)
    office.wait_for(lambda: "taskguard ledger create" in office.logs(), "the command")
    assert not failed(job)
    with office.engine.begin() as db:
        db.execute(sa.text("alter table hidden rename to taskguard_work"))
    office.wait_for(lambda: finished(job), "done")
    assert office.effects() == Counter({"8": 1})
