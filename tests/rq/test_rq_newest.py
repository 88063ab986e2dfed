"""`busy="latest"` and `"supersede"` for RQ, on real workers: the newest job of a key wins."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import rq
import sqlalchemy as sa
from rq import Repeat, Retry
from rq.job import Job

from support.invoices import latest, supersede, supersede_at_once
from support.waiting import wait_until
from taskguard.ledger.tables import WORK
from taskguard.model.states import OUTDATED

HOLDS_S = 600.0  # or until it may go, or until its lease is lost


def put(office: Any, function: Any, number: int, seconds: float = 0.0, **options: Any) -> Job:
    job = office.queue.enqueue(function, "a", number, seconds, **options)
    assert isinstance(job, Job)
    return job


def put_older(office: Any, function: Any, number: int, than: Job) -> Job:
    """A job that was sent before another one, and comes after it."""
    job = office.queue.create_job(function, ("a", number))
    job.created_at = than.created_at - timedelta(seconds=1)
    return office.queue.enqueue_job(job)  # type: ignore[no-any-return]


def began(office: Any, number: int) -> None:
    wait_until(lambda: f"a {number}" in dict(office.steps("began")))


def states_of(office: Any) -> dict[str, tuple[str, bool]]:
    """The state of each work, by its job's id, and whether it was superseded."""
    with office.engine.connect() as db:
        return {
            row.message.partition("@")[0]: (row.state, (row.error or "").startswith(OUTDATED))
            for row in db.execute(sa.select(WORK))
        }


def waits(office: Any, job: Job) -> None:
    wait_until(lambda: job.get_status(refresh=True) == "deferred")


def superseded(office: Any, job: Job) -> bool:
    """Return True if RQ shows that the job never runs, and the record has the reason."""
    office.wait_for(lambda: job.get_status(refresh=True) == "canceled", "cancelled")
    return states_of(office)[job.id] == ("FAILED", True)


def expect(office: Any, *jobs: Job) -> None:
    """Each of these has its effect once and a result, and no others have any; nothing is left."""
    office.wait_for(
        lambda: {job.get_status(refresh=True) for job in jobs} == {"finished"}, "finished"
    )
    assert office.effects() == {f"a {job.return_value()}": 1 for job in jobs}
    assert office.queue.count == 0
    assert office.queue.deferred_job_registry.get_job_ids() == []
    assert office.connection.scard("taskguard:parked") == 0
    wait_until(lambda: len(office.queue.started_job_registry) == 0)


def test_the_newest_waits(office: Any) -> None:
    """The first and the last of three jobs run. The middle one is CANCELED, for a while."""
    office.worker()
    office.worker()
    first = put(office, latest, 1, HOLDS_S)
    began(office, 1)
    second = put(office, latest, 2, retry=Retry(max=3), result_ttl=600)
    waits(office, second)
    after = office.queue.enqueue(latest, "b", 0, depends_on=second)
    third = put(office, latest, 3)
    assert superseded(office, second)
    assert second.get_meta()["taskguard_line"] == "superseded"
    assert 0 < office.connection.ttl(second.key) <= 600
    waits(office, third)
    # RQ never cleans that registry.
    assert len(office.queue.canceled_job_registry) == 0
    assert len(office.queue.failed_job_registry) == 0
    assert first.get_status() == "started"
    assert second.id not in office.queue.deferred_job_registry
    office.let_go()
    wait_until(lambda: third.get_status(refresh=True) == "finished")
    assert after.get_status() == "deferred"  # what depends on it does not run, as after a cancel()
    after.delete()
    expect(office, first, third)


def test_an_older_one_that_comes_late(office: Any) -> None:
    """An older job is superseded if a newer one has run, or is running."""
    office.worker()
    office.worker()
    newer = put(office, latest, 2)
    expect(office, newer)
    assert superseded(office, put_older(office, latest, 1, than=newer))
    newest = put(office, supersede, 4, HOLDS_S)
    began(office, 4)
    assert superseded(office, put_older(office, supersede, 3, than=newest))
    assert newest.get_status(refresh=True) == "started"
    office.let_go()
    expect(office, newer, newest)


def test_a_job_that_is_taken_back_while_it_waits(office: Any) -> None:
    """A newer job takes the place of a cancelled or deleted one, and no work is overdue."""
    office.worker()
    office.worker()
    first = put(office, latest, 1, HOLDS_S)
    began(office, 1)
    cancelled = put(office, latest, 2)
    waits(office, cancelled)
    cancelled.cancel()
    deleted = put(office, latest, 3)
    waits(office, deleted)
    deleted.delete()
    last = put(office, latest, 4)
    waits(office, last)
    with office.engine.connect() as db:
        due = sa.select(WORK.c.id).where(WORK.c.due.is_not(None))
        assert db.execute(due).first() is None
    office.let_go()
    expect(office, first, last)
    assert Job.exists(cancelled.id, office.connection)
    assert not Job.exists(deleted.id, office.connection)


def test_a_living_holder_is_superseded(office: Any) -> None:
    """The holder's commit is refused, its body learns of it, and RQ does not retry it. The newest
    job commits."""
    for _ in range(3):
        office.worker()
    first = put(office, supersede, 1, HOLDS_S, retry=Retry(max=3))
    began(office, 1)
    second = put(office, supersede, 2, HOLDS_S)
    began(office, 2)
    third = put(office, supersede, 3)
    assert superseded(office, first)
    assert superseded(office, second)
    expect(office, third)
    assert {item for item, _ in office.steps("lost")} == {"a 1", "a 2"}
    assert len(office.steps("began")) == 3


def test_a_body_is_interrupted(office: Any) -> None:
    """With `on_lost="interrupt"`, the older body ends at its next renewal."""
    office.worker()
    office.worker()
    first = put(office, supersede_at_once, 1, HOLDS_S)
    began(office, 1)
    second = put(office, supersede_at_once, 2)
    assert superseded(office, first)
    expect(office, second)


@pytest.mark.once
@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_holder_that_does_not_hear(office: Any, how: str) -> None:
    """No job waits for a killed or frozen holder. Its redelivery is answered, and its late commit
    is refused."""
    office.worker()
    office.worker()
    first = put(office, supersede, 1, HOLDS_S, retry=Retry(max=3))
    began(office, 1)
    [(_, horse)] = office.steps("began")
    os.kill(horse, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    second = put(office, supersede, 2)
    office.wait_for(lambda: second.get_status(refresh=True) == "finished", "the newer one")
    if how == "frozen":
        os.kill(horse, signal.SIGCONT)
    assert superseded(office, first)
    expect(office, second)


def test_a_stock_worker(office: Any) -> None:
    """A stock worker defers a job that would wait, and sets one that never runs to FAILED, with the
    reason."""
    for _ in range(2):
        office.worker("rq.Worker", "--with-scheduler")
    first = put(office, latest, 1, HOLDS_S)
    began(office, 1)
    newer = put(office, latest, 2)
    office.wait_for(lambda: newer.get_status(refresh=True) == "scheduled", "put off")
    office.let_go()
    office.wait_for(lambda: newer.get_status(refresh=True) == "finished", "the newer one")
    older = put_older(office, latest, 0, than=newer)
    office.wait_for(lambda: older.get_status(refresh=True) == "failed", "the older one")
    said = older.latest_result().exc_string
    assert "SupersededError" in said
    assert "a newer message of queue:a took its place" in said
    expect(office, first, newer)


def test_a_job_whose_messages_cannot_be_put_in_order_is_refused(office: Any) -> None:
    """A job that is used again does not say when each of its messages was sent. A superseded
    message would lose those after it, or hold its slot of a rate limit. No body begins."""
    why = dict.fromkeys(
        [
            put(office, latest, 1, repeat=Repeat(times=3)),
            put(office, latest, 2, meta={"interval": 60}),  # as rq-scheduler marks its jobs
        ],
        "cannot tell when each of them was sent",
    )
    if hasattr(rq, "RateLimit"):
        limit = rq.RateLimit(key="accounts", concurrency=1)
        why[put(office, latest, 3, rate_limit=limit)] = 'busy="latest", but job'
    office.worker()
    office.wait_for(lambda: {job.get_status(refresh=True) for job in why} == {"failed"}, "failed")
    for job, reason in why.items():
        assert reason in job.latest_result().exc_string
    assert office.steps("began") == []


@pytest.mark.once
@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_what_is_taken_back_at_work_stays_so(office: Any, how: str) -> None:
    """If a running job is cancelled or deleted, and then superseded, its RQ record does not
    change."""
    office.worker()
    office.worker()
    first = put(office, supersede, 1, HOLDS_S)
    began(office, 1)
    getattr(first, how)()
    second = put(office, supersede, 2)
    wait_until(lambda: dict(office.steps("lost")))
    expect(office, second)
    wait_until(lambda: len(office.queue.started_job_registry) == 0)
    assert office.connection.hget(first.key, "meta") in (None, b"", first.serializer.dumps({}))
    assert (how == "cancel") is (first.id in office.queue.canceled_job_registry)
