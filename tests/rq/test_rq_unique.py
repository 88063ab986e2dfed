"""`enqueue(duplicate=, delay_s=)`: one job of a work from its enqueueing on, on real workers."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import sqlalchemy as sa
from rq.job import Job
from rq.registry import ScheduledJobRegistry
from sqlalchemy import orm

from support import invoices
from support.due import make_due
from taskguard.errors import AlreadyEnqueuedError, ConfigurationError
from taskguard_rq import enqueue, sweep

pytestmark = pytest.mark.usefixtures("producer")


def put(office: Any, words: str, **options: Any) -> Any:
    waits = options.pop("waits", False)
    return enqueue(office.queue, invoices.index, (1, words, waits), **options)


def let_go(office: Any) -> None:
    """Let the waiting body go on."""
    with office.engine.begin() as db:
        db.execute(sa.text("insert into steps values ('', 'go', 0)"))


def wait_for_result(office: Any, job: Job, value: object) -> None:
    def found() -> object:
        result = Job.fetch(job.id, connection=office.connection).latest_result()
        return result and result.return_value

    office.wait_for(lambda: found() == value, f"the result {value!r}")


def record(office: Any) -> Any:
    return office.ledger.view("support.invoices.index invoice:1")


@pytest.mark.once
@pytest.mark.parametrize("hours", [3, -3])
def test_a_senders_clock_does_not_count(
    office: Any, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """A delayed job is scheduled by the database's clock, even if the sender's clock is wrong."""
    right = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: right() + hours * 3600)
        delayed = put(office, "late", delay_s=60.0)
    registry = ScheduledJobRegistry(queue=office.queue)
    at_s = registry.get_scheduled_time(delayed.job).timestamp()
    assert 0 < at_s - time.time() <= 60
    assert office.queue.count == 0


@pytest.mark.parametrize("transaction", ["the user's", "the ledger's"])
def test_who_attaches_gets_the_first_job(office: Any, transaction: str) -> None:
    """While the first job waits or runs, an enqueue that attaches sends nothing, and returns the
    first job."""

    def attach(words: str, **options: Any) -> Any:
        if transaction != "the user's":
            return put(office, words, duplicate="attach", **options)
        with orm.Session(office.engine) as session, session.begin():
            return put(office, words, session=session, duplicate="attach", **options)

    first, second = attach("first", waits=True), attach("second")
    assert (first.outcome, second.outcome) == ("sent", "attached")
    assert first.job.id == second.job.id
    second.send()
    assert office.queue.job_ids == [first.job.id]
    office.worker()
    office.wait_for(lambda: office.steps("began"), "a body")
    third = attach("third")
    assert (third.outcome, third.job.id) == ("attached", first.job.id)
    let_go(office)
    wait_for_result(office, second.job, "first")
    assert office.effects() == Counter({"1 first": 1})


def test_who_attaches_to_a_job_in_progress_gets_it(office: Any) -> None:
    """An enqueue can attach to a running job that RQ's own `enqueue()` sent."""
    running = office.queue.enqueue(invoices.index, 1, "running", True)
    office.worker()
    office.wait_for(lambda: office.steps("began"), "a body")
    attached = put(office, "late", duplicate="attach")
    assert (attached.outcome, attached.job.id) == ("attached", running.id)
    let_go(office)
    wait_for_result(office, attached.job, "running")
    assert office.queue.count == 0


def test_skipped_or_refused_nothing_is_enqueued(office: Any) -> None:
    """With `duplicate="skip"` or `"raise"`, the second enqueue sends nothing, and returns None or
    raises."""
    first = put(office, "first")
    assert put(office, "second", duplicate="skip") is None
    with pytest.raises(AlreadyEnqueuedError, match=f"is enqueued.*{first.job.id}"):
        put(office, "second", duplicate="raise")
    with orm.Session(office.engine) as session:
        assert put(office, "second", session=session, duplicate="skip") is None
        session.commit()
    assert office.queue.job_ids == [first.job.id]
    with pytest.raises(ConfigurationError, match="is work of its own"):
        enqueue(office.queue, invoices.index_each, (1,), duplicate="skip")
    with pytest.raises(ConfigurationError, match="delay_s="):
        put(office, "first", delay_s=-1)


def test_the_newest_arguments_run(office: Any) -> None:
    """The older jobs run nothing, and are CANCELED."""
    jobs = [put(office, words, duplicate="replace") for words in ("a", "b", "c")]
    assert [each.outcome for each in jobs] == ["sent", "replaced", "replaced"]
    assert office.queue.count == 3
    office.worker()
    wait_for_result(office, jobs[-1].job, "c")
    for older in jobs[:-1]:
        ended = Job.fetch(older.job.id, connection=office.connection)
        assert ended.get_status() == "canceled"
        assert ended.get_meta()["taskguard_line"] == "replaced"
    assert office.effects() == Counter({"1 c": 1})
    assert len(office.steps("began")) == 1


def test_debounced_it_runs_once_after_the_last_time(office: Any) -> None:
    """Each enqueue moves the start. RQ's scheduler enqueues the last job at its time."""
    office.worker()
    for words in ("a", "b", "c"):
        due_s = time.time() + 8
        last = put(office, words, duplicate="replace", delay_s=8)
    assert office.queue.count == 0
    wait_for_result(office, last.job, "c")
    assert time.time() > due_s - 1  # RQ's schedule has whole seconds
    assert office.effects() == Counter({"1 c": 1})
    assert len(office.steps("began")) == 1


def test_without_a_scheduler_a_sweep_enqueues_what_was_delayed(office: Any) -> None:
    """Without a scheduler, a sweep enqueues a delayed job after its time."""
    delayed = put(office, "late", delay_s=2.0)
    registry = ScheduledJobRegistry(queue=office.queue)
    assert registry.get_job_ids() == [delayed.job.id]
    office.wait_for(lambda: time.time() > delayed_until(office), "its time")
    assert sweep(office.connection).sent == 0
    make_due(office)
    assert sweep(office.connection).sent == 1
    assert office.queue.job_ids == [delayed.job.id]
    office.worker("rq.SimpleWorker")
    wait_for_result(office, delayed.job, "late")


def delayed_until(office: Any) -> float:
    [score] = [
        score
        for _, score in office.connection.zrange(
            ScheduledJobRegistry(queue=office.queue).key, 0, -1, withscores=True
        )
    ]
    return float(score) + 1


def test_a_sweep_before_its_time_keeps_a_delayed_job_in_the_schedule(office: Any) -> None:
    """If Redis lost a delayed job, a sweep puts it back into the schedule."""
    delayed = put(office, "late", delay_s=3600)
    office.connection.flushdb()
    make_due(office)
    assert sweep(office.connection).sent == 1
    assert office.queue.count == 0
    assert ScheduledJobRegistry(queue=office.queue).get_job_ids() == [delayed.job.id]
