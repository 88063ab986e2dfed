"""RQ workers are named in the ledger, once for a worker and all its work horses."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from support.invoices import charge
from taskguard.ledger.tables import WORK, WORKERS
from taskguard.model.lease import Owner


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("taskguard_rq.GuardedWorker", ()),
        ("taskguard_rq.GuardedSimpleWorker", ()),
        ("rq.Worker", ("--with-scheduler", "-c", "support.invoices")),
        pytest.param("taskguard_rq.GuardedSpawnWorker", (), marks=pytest.mark.once),
    ],
)
def test_a_worker_is_stored_once_and_its_horses_name_it(
    office: Any, kind: str, options: tuple[str, ...]
) -> None:
    """Each work horse is a process of its own, and writes nothing about workers."""
    worker = office.worker(kind, *options, fresh=True)
    jobs = [office.queue.enqueue(charge, number) for number in range(3)]
    office.wait_for(
        lambda: all(job.get_status(refresh=True) == "finished" for job in jobs), "all finished"
    )
    with office.engine.connect() as db:
        [row] = db.execute(sa.select(WORKERS)).all()
        owners = [Owner.parse(each) for each in db.execute(sa.select(WORK.c.owner)).scalars()]
    assert (row.kind, row.queues, row.pid) == ("rq", "invoices", worker.process.pid)
    horses = {pid for _, pid in office.steps("began")}
    named = [owner.named for owner in owners if owner.message]
    assert {number for number, _ in named} == {row.number}
    assert {pid for _, pid in named} == horses
    assert (horses == {worker.process.pid}) == ("Simple" in kind)


def test_horses_of_a_worker_that_knows_nothing_store_no_worker(office: Any) -> None:
    """A stock worker that has not imported the jobs is unknown to its work horses. A row for each
    job would cost a statement each."""
    office.worker("rq.Worker", "--with-scheduler", fresh=True)
    jobs = [office.queue.enqueue(charge, number) for number in range(2)]
    office.wait_for(
        lambda: all(job.get_status(refresh=True) == "finished" for job in jobs), "all finished"
    )
    with office.engine.connect() as db:
        assert db.execute(sa.select(WORKERS)).all() == []
