"""One task on an order's own row, for each kind of integration, without settings."""

from __future__ import annotations

import sqlalchemy as sa
from celery import Celery

import taskguard
from support.own_rows import EFFECTS, own_row
from taskguard import Guard
from taskguard_celery import guarded_task
from taskguard_rq import guarded_job

__all__ = ["TASKS"]

app = Celery("own_rows")


def _write(order_id: int, guard: Guard) -> str:
    with guard.transaction() as db:
        db.execute(sa.insert(EFFECTS).values(item=str(order_id)))
    return f"shipped {order_id}"


@app.task(shared=False)
@guarded_task(key="order:<order_id>", row=own_row())
def by_celery(order_id: int, guard: Guard) -> str:
    return _write(order_id, guard)


@guarded_job(key="order:<order_id>", row=own_row())
def by_rq(order_id: int, guard: Guard) -> str:
    return _write(order_id, guard)


@taskguard.connect(locks="memory://", ledger="sqlite://").guarded(
    key="order:<order_id>", row=own_row()
)
def by_call(order_id: int, guard: Guard) -> str:
    return _write(order_id, guard)


TASKS = {"celery": by_celery, "rq": by_rq, "call": by_call}
