"""Options that go together, for RQ, on real workers: `latest` and a strict line with a rate."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
import sqlalchemy as sa
from rq import Retry

from support.invoices import latest_at_times, strictly_at_times, supersede_at_times
from taskguard.ledger.tables import WORK
from taskguard_rq import enqueue

pytestmark = pytest.mark.once


def starts_us(office: Any) -> list[int]:
    """When work was claimed last, by the ledger's clock."""
    with office.engine.connect() as db:
        began = sa.select(WORK.c.started).where(WORK.c.key == "queue:a", WORK.c.attempts > 0)
        return sorted(db.execute(began).scalars())


@pytest.mark.parametrize("function", [latest_at_times, supersede_at_times])
def test_the_latest_at_a_rate(office: Any, function: Any) -> None:
    """Some run, two in a second, and the last of them; RQ says of the others that they never do."""
    office.worker()
    office.worker("taskguard_rq.GuardedSimpleWorker")
    jobs = []
    for number in range(15):
        jobs.append(office.queue.enqueue(function, "a", number))
        time.sleep(0.2)
    ended = {"finished", "canceled"}
    office.wait_for(lambda: {job.get_status(refresh=True) for job in jobs} <= ended, "all ended")
    ran = [number for number, job in enumerate(jobs) if job.get_status() == "finished"]
    assert ran[-1] == 14
    assert office.effects() == {f"a {number}": 1 for number in ran}
    assert min(later - one for one, later in pairwise(starts_us(office))) >= 500_000


@pytest.mark.usefixtures("producer")
def test_a_strict_line_at_a_rate(office: Any) -> None:
    """In the order in which they were enqueued, five in a second; a retry keeps its position."""
    office.worker()
    office.worker()
    retry = Retry(max=2)
    jobs = [
        enqueue(office.queue, strictly_at_times, ("a", number, number == 3), retry=retry).job
        for number in range(8)
    ]
    done = {"finished"}
    office.wait_for(lambda: {job.get_status(refresh=True) for job in jobs} == done, "all done")
    began = [int(item.split()[1]) for item, _ in office.steps("began")]
    assert began == [0, 1, 2, 3, *range(3, 8)]
    assert min(later - one for one, later in pairwise(starts_us(office))) >= 200_000
    assert set(office.effects().values()) == {1}
