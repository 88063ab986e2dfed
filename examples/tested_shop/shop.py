"""Three ways to ship an order. One of them is right, and `test_shop.py` finds the other two out."""

from __future__ import annotations

import sqlalchemy as sa
from celery import Celery

from taskguard import Guard
from taskguard_celery import guarded_task

app = Celery("shop")
metadata = sa.MetaData()
shipments = sa.Table("shipments", metadata, sa.Column("order_id", sa.Integer))
parcels: list[int] = []


def call_the_carrier(order_id: int) -> None:
    """Stands for a HTTP request: once it is out, no rollback brings it back."""
    parcels.append(order_id)


@app.task
@guarded_task(key="order:<order_id>")
def ship(order_id: int, guard: Guard) -> None:
    """Right: the effect is in the transaction that commits DONE."""
    with guard.transaction() as db:
        db.execute(sa.insert(shipments).values(order_id=order_id))


@app.task
@guarded_task(key="order:<order_id>")
def ship_early(order_id: int, guard: Guard) -> None:
    """Wrong: a worker that dies between the two has the carrier called again."""
    call_the_carrier(order_id)
    with guard.transaction() as db:
        db.execute(sa.insert(shipments).values(order_id=order_id))


@app.task
@guarded_task(key="order:<order_id>")
def ship_late(order_id: int, guard: Guard) -> None:
    """Wrong: a worker that dies after DONE is committed never calls the carrier."""
    with guard.transaction() as db:
        db.execute(sa.insert(shipments).values(order_id=order_id))
    call_the_carrier(order_id)
