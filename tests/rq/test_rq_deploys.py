"""A deploy changes a guard: RQ workers before it and after it, killed and side by side."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from rq import Retry

from support.invoices import deployed, deployed_in_line, queue_up
from support.office import SHORT_LEASES
from support.waiting import wait_until

pytestmark = pytest.mark.once

DONE_ELSEWHERE = (
    "has done support.invoices.deployed invoice:1 before, "
    "and now does support.invoices.deployed shop:invoice:1"
)


def redeliver(office: Any, *, before: str, after: str) -> Any:
    """Kill a job's worker after DONE, before RQ knows, and let RQ's cleaning enqueue the job again.

    A worker of the next deploy runs it. Return the job and the result of that worker.
    """
    job = office.queue.enqueue(deployed, 1, lingers=before, retry=Retry(max=1))
    worker = office.worker(SHOP_GUARD=before, **SHORT_LEASES)
    office.wait_for(lambda: office.steps("done"), "done")
    worker.kill()
    # As after 90 s without a sign of life from it.
    office.queue.started_job_registry.cleanup(timestamp=time.time() + 3600)
    office.worker(SHOP_GUARD=after)
    office.wait_for(lambda: job.get_status(refresh=True) == "finished", "finished")
    return job.return_value()


@pytest.mark.parametrize(("before", "after"), [("former", "new"), ("new", "former")])
def test_a_job_again_after_a_deploy_is_answered(office: Any, before: str, after: str) -> None:
    """One effect, and the first one's result; also where a deploy is taken back."""
    assert redeliver(office, before=before, after=after) == before
    assert office.effects() == Counter({"1": 1})
    assert len(office.steps("began")) == 1
    assert "has done" not in office.logs()


def test_a_job_again_after_a_deploy_that_does_not_say_what_was_is_told_of(office: Any) -> None:
    """Its effect is there twice; the log names both ids of the work, and what to do."""
    assert redeliver(office, before="former", after="forgotten") == "forgotten"
    assert office.effects() == Counter({"1": 2})
    assert DONE_ELSEWHERE in office.logs()
    assert "formerly=" in office.logs()


def test_workers_before_and_after_a_deploy_exclude_each_other(office: Any) -> None:
    """On one queue: of each invoice three jobs, each of them twice, and one effect."""
    invoices = range(5)
    office.worker(SHOP_GUARD="former")
    office.worker(SHOP_GUARD="new")
    jobs = {
        invoice: [office.queue.enqueue(deployed, invoice, 0.5) for _ in range(3)]
        for invoice in invoices
    }
    for job in (job for each in jobs.values() for job in each):
        office.connection.rpush(office.queue.key, job.id)

    def answered() -> bool:
        every = [job for each in jobs.values() for job in each]
        return office.queue.count == 0 and all(
            job.get_status(refresh=True) == "finished" for job in every
        )

    office.wait_for(answered, "all finished")
    assert office.effects() == Counter(map(str, invoices))
    assert len(office.steps("began")) == len(invoices)
    for each in jobs.values():
        assert len({job.return_value() for job in each}) == 1


def test_a_line_goes_on_over_a_deploy(office: Any) -> None:
    """In the order in which they were enqueued, whichever worker parks and runs them."""

    def put(*numbers: int) -> None:
        for number in numbers:
            office.queue.enqueue(deployed_in_line, "a", number)

    for _ in range(2):
        office.worker(SHOP_GUARD="former")
    put(0)
    office.wait_for(lambda: office.steps("began"), "the first")
    put(1, 2)
    wait_until(lambda: len(office.ledger.waiting("queue:a")) == 2)
    for _ in range(2):
        office.worker(SHOP_GUARD="new")
    put(3, 4)
    wait_until(lambda: len(office.ledger.waiting()) >= 4)
    office.let_go()
    office.wait_for(lambda: len(office.effects()) == 5, "five of them")
    assert [item for item, _ in office.steps("began")] == [f"a {number}" for number in range(5)]
    assert set(office.effects().values()) == {1}


def test_jobs_that_wait_in_a_former_namespace(office: Any) -> None:
    """A worker of the next deploy sends them into its own namespace, and each runs once."""
    workers = [office.worker(**SHORT_LEASES) for _ in range(2)]
    office.queue.enqueue(queue_up, "a", 0, True)
    office.wait_for(lambda: office.steps("began"), "begun")
    later = [office.queue.enqueue(queue_up, "a", number) for number in (1, 2, 3)]
    office.wait_for(
        lambda: {job.get_status(refresh=True) for job in later} == {"deferred"}, "they wait"
    )
    for worker in workers:
        worker.kill()
    office.worker(TASKGUARD_NAMESPACE="new", TASKGUARD_FORMERLY_NAMESPACES=",")
    office.wait_for(
        lambda: {job.get_status(refresh=True) for job in later} == {"finished"}, "all finished"
    )
    assert [job.return_value() for job in later] == [1, 2, 3]
    assert office.effects() == Counter({f"a {number}": 1 for number in (1, 2, 3)})
    assert office.ledger.waiting() == []
