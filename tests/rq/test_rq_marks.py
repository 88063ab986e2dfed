"""A job keeps its marks, and a job that is sent again stays the same job."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from rq import Callback, Queue, Repeat, Retry
from rq.cron import CronJob
from rq.job import Job

from support.invoices import each, for_request, tick_again
from taskguard.integration import MessageRef
from taskguard_rq.calls import RQSender, call_of
from taskguard_rq.marks import marks_of

OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "callbacks": {
        "on_success": Callback(each, timeout=7),
        "on_failure": Callback(each, timeout=8),
        "on_stopped": Callback(each, timeout=9),
    },
    "description": {"description": "of people"},
    "failure ttl": {"failure_ttl": 70},
    "front": {"retry": Retry(max=1, enqueue_at_front=True)},
    "group": {"group_id": "g"},
    "meta": {"meta": {"request": "its own", "interval": 60}},
    "repeat": {"repeat": Repeat(times=3, interval=[1, 2, 3])},
    "result ttl": {"result_ttl": 80},
    "retry": {"retry": Retry(max=3, interval=[1, 2])},
    "timeout": {"timeout": -1},
    "ttl": {"ttl": 90},
}
# Fields of the last enqueueing and execution.
PASSING = {b"enqueued_at", b"status", b"started_at", b"worker_name", b"last_heartbeat"}


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `enqueue` write the current request into each job, as extensions of RQ do."""
    enqueue = Queue._enqueue_job

    def enqueue_for_holder(self: Queue, job: Job, *args: Any, **options: Any) -> Job:
        job.meta = {**job.meta, "request": "the holder's"}
        return enqueue(self, job, *args, **options)

    monkeypatch.setattr(Queue, "_enqueue_job", enqueue_for_holder)


def record(office: Any, job: Job) -> dict[bytes, bytes]:
    """Return all fields of a job in Redis, except those of its last execution."""
    found = office.connection.hgetall(job.key)
    found[b"data"] = job.data  # which is compressed
    return {name: value for name, value in found.items() if name not in PASSING}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("lost", [False, True], ids=["known", "lost"])
@pytest.mark.parametrize("way", ["promoted", "sent again", "swept"])
def test_a_job_that_is_sent_again_keeps_its_options(
    office: Any, request: pytest.FixtureRequest, way: str, lost: bool, options: dict[str, Any]
) -> None:
    """A job that is sent again keeps its options, even if its record is lost. It gets none of the
    job that sends it."""
    job = office.queue.create_job(each, **options)
    office.queue.enqueue_job(job)
    office.connection.hset(job.key, mapping={"taskguard_tick": "t", "taskguard_deferrals": 2})
    before = record(office, job)
    message = MessageRef(job.id, deferrals=2, tick="t")
    call = call_of(Job.fetch(job.id, office.connection), message)
    office.queue.empty() if lost else office.queue.remove(job)
    request.getfixturevalue("extension")
    sender = RQSender(office.connection)
    if way == "swept":
        with sender.batch() as send:
            send(call, message)
    else:
        (sender if way == "sent again" else sender.hand_off)(call, message)
    after = record(office, Job.fetch(job.id, office.connection))
    assert after.pop(b"taskguard_line", None) == (b"promoted" if way == "promoted" else None)
    assert after == before
    assert office.queue.job_ids == [job.id]


def test_a_tick_that_two_crons_enqueued_runs_once_over_a_retry(office: Any) -> None:
    """The tick runs once even if its first attempt clears the job's meta, which is the user's."""
    office.worker()
    jobs = [
        CronJob("invoices", tick_again, cron="0 0 1 1 *", meta={"mine": 1}).enqueue(
            office.connection
        )
        for _ in range(2)
    ]
    assert {marks_of(job).tick for job in jobs} == {marks_of(jobs[0]).tick} != {""}
    assert jobs[0].get_meta() in ({"mine": 1}, {})
    ended = ("finished", "failed")
    office.wait_for(lambda: all(job.get_status(refresh=True) in ended for job in jobs), "ended")
    assert office.effects() == Counter({"ticked": 1})


def test_jobs_of_a_line_run_each_for_its_own_request(office: Any) -> None:
    """Each job runs with its own meta, although the holder of the key sends it, and bodies and
    senders replace the meta."""
    office.worker(INVOICES_EXTENSION="1")
    office.worker(INVOICES_EXTENSION="1")
    jobs = []
    for number in range(4):
        meta = {"request": f"request-{number}"}
        jobs.append(office.queue.enqueue(for_request, "a", number, meta=meta))
        if not number:
            office.wait_for(lambda: office.steps("began"), "the first")
    deferred = office.queue.deferred_job_registry
    office.wait_for(lambda: deferred.get_job_ids() == [job.id for job in jobs[1:]], "a line")
    for number, job in enumerate(jobs[1:], 1):
        job.meta = {"request": f"request-{number}"}
        job.save_meta()
    office.let_go()
    office.wait_for(lambda: sum(office.effects().values()) == 4, "four effects")
    assert office.effects() == Counter({f"a {number} request-{number}": 1 for number in range(4)})
