"""A deploy changes a guard: RQ workers before it and after it, killed and side by side."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from rq import Retry

from support.invoices import deployed, queue_up
from support.office import SHORT_LEASES

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


def test_a_job_again_after_a_deploy_is_answered(office: Any) -> None:
    """The work has one effect, and the job gets the first result."""
    assert redeliver(office, before="former", after="new") == "former"
    assert office.effects() == Counter({"1": 1})
    assert len(office.steps("began")) == 1
    assert "has done" not in office.logs()


def test_a_job_again_after_a_deploy_without_formerly_is_logged(office: Any) -> None:
    """Its effect is there twice; the log names both ids of the work, and what to do."""
    assert redeliver(office, before="former", after="forgotten") == "forgotten"
    assert office.effects() == Counter({"1": 2})
    assert DONE_ELSEWHERE in office.logs()
    assert "formerly=" in office.logs()


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
