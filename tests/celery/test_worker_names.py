"""Prefork workers are named in the ledger, once for a worker and all its children."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

import taskguard
from support.waiting import wait_until
from taskguard.ledger.tables import WORKERS
from taskguard.model.lease import Owner


def test_a_worker_is_stored_once_and_its_children_name_it(shop: Any) -> None:
    """The row is there before the first task. The holder of a key is named by the worker's name
    and the child's pid. Tasks write nothing about workers."""
    with shop.engine.connect() as db:
        assert not db.execute(sa.select(WORKERS)).all()
    with shop.worker(concurrency=2) as worker:
        with shop.engine.connect() as db:
            [row] = db.execute(sa.select(WORKERS)).all()
        assert (row.kind, row.pid, row.queues) == ("celery", worker.pid, "shop")
        assert row.name.startswith("celery@")
        result = shop.tasks.nap.delay(1, 60)
        [step] = shop.wait_for_steps("began")
        assert step.pid != worker.pid
        owner = Owner.parse(shop.work(shop.tasks.nap.name, 1).owner)
        assert owner.named == (row.number, step.pid)
        tg = taskguard.connect(locks=None, ledger=shop.ledger)
        label = row.name if row.host in row.name else f"{row.name} on {row.host}"
        assert tg.runner.names.process(owner) == f"{label}, pid {step.pid}"
        for number in range(2, 6):
            shop.tasks.ship.delay(number)
        wait_until(lambda: sum(shop.effects().values()) >= 1, message="others run meanwhile")
        shop.revoke(result)
        with shop.engine.connect() as db:
            assert db.execute(sa.select(WORKERS)).all() == [row]


def test_two_workers_have_two_rows(shop: Any) -> None:
    """Each worker has a number of its own."""
    with shop.worker() as one, shop.worker() as two, shop.engine.connect() as db:
        rows = db.execute(sa.select(WORKERS)).all()
        assert {row.pid for row in rows} == {one.pid, two.pid}
        assert len({row.number for row in rows}) == 2
