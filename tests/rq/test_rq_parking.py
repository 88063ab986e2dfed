"""`busy="park"` for RQ, on real workers: jobs wait in the ledger, and come in their order."""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil
import pytest
import sqlalchemy as sa
from rq import Retry
from rq.job import Job

from support.invoices import queue_up
from support.waiting import wait_until
from taskguard.ledger.tables import WORK


def records(office: Any, state: str = "NEW") -> list[Any]:
    """What stands in line, in its order; or what stood there, and is in another state."""
    with office.engine.connect() as db:
        select = sa.select(WORK).where(WORK.c.parked.is_not(None), WORK.c.state == state)
        return list(db.execute(select.order_by(WORK.c.parked)))


def put(office: Any, account: str, numbers: Any, **options: Any) -> list[Job]:
    return [office.queue.enqueue(queue_up, account, number, **options) for number in numbers]


def line_up(office: Any, count: int, **options: Any) -> tuple[Job, list[Job]]:
    """One that holds the account until it may go, and others that wait."""
    first = office.queue.enqueue(queue_up, "a", 0, True)
    office.wait_for(lambda: office.steps("began"), "the first")
    later = put(office, "a", range(1, count + 1), **options)
    wait_for_line(office, later)
    return first, later


def wait_for_line(office: Any, jobs: list[Job]) -> None:
    deferred = office.queue.deferred_job_registry
    office.wait_for(lambda: deferred.get_job_ids() == [job.id for job in jobs], "a line")


def let_go(office: Any) -> None:
    with office.engine.begin() as db:
        db.execute(sa.text("insert into steps values ('', 'go', 0)"))


def numbers_of(office: Any, account: str) -> list[int]:
    """In which order bodies of an account began."""
    items = [item.split() for item, _ in office.steps("began")]
    return [int(number) for name, number in items if name == account]


def wait_for_all(office: Any, jobs: list[Job]) -> None:
    office.wait_for(
        lambda: {job.get_status(refresh=True) for job in jobs} == {"finished"}, "all finished"
    )


def test_jobs_run_in_order_and_nobody_is_held(office: Any) -> None:
    """Those that wait are DEFERRED, in no queue and in no worker; a cold job runs beside them."""
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
    let_go(office)
    wait_for_all(office, [first, *later])
    assert numbers_of(office, "a") == list(range(9))
    assert [job.return_value() for job in later] == list(range(1, 9))
    assert set(office.effects().values()) == {1}
    assert records(office) == []
    assert office.queue.deferred_job_registry.get_job_ids() == []
    assert office.connection.scard("taskguard:parked") == 0
    assert "taskguard_line" not in later[0].get_meta()
