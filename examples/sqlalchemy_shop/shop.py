"""Ship each order once, controlled by the order's own status: `python shop.py`.

The first part is the shop, as in a project of your own. The second part runs it here.
"""

from __future__ import annotations

import os
import time

import sqlalchemy as sa
from celery import Celery
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from taskguard import Guard, GuardedRow
from taskguard_celery import guarded_task, safe_defaults


class Base(DeclarativeBase):
    """The shop's tables."""


class Order(Base):
    """PAID -> SHIPPING -> SHIPPED -> BILLING -> BILLED, or CANCELLED."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(sa.String(10))
    fence: Mapped[int | None] = mapped_column(sa.BigInteger)
    parcels: Mapped[int] = mapped_column(default=0)
    invoices: Mapped[int] = mapped_column(default=0)


app = Celery("shop")
safe_defaults(app)
order = {"table": Order, "id": "<order_id>", "state": Order.status, "fence": Order.fence}


@app.task
@guarded_task(
    key="order:<order_id>",
    row=GuardedRow(**order, new="PAID", processing="SHIPPING", done="SHIPPED"),
    ttl_s=5,
)
def ship(order_id: int, guard: Guard) -> str:
    """Pack the parcel, then write down that it left."""
    pack(order_id)
    with guard.transaction() as db:  # this and SHIPPING -> SHIPPED are committed together
        db.execute(sa.update(Order).where(Order.id == order_id).values(parcels=Order.parcels + 1))
    return f"order {order_id} shipped by process {os.getpid()}"


@app.task
@guarded_task(
    key="order:<order_id>",
    # Its message may come before the parcel has left: then it comes again later.
    row=GuardedRow(
        **order, new="SHIPPED", processing="BILLING", done="BILLED", on_ineligible="defer"
    ),
)
def bill(order_id: int, guard: Guard) -> str:
    """Write the invoice, by an ORM session."""
    with guard.transaction() as db, Session(bind=db) as session:
        session.get_one(Order, order_id).invoices += 1
        session.commit()  # flushes; the block commits, and BILLING -> BILLED with it
    return f"order {order_id} billed"


def pack(order_id: int) -> None:
    """Takes its time."""
    print(f"order:{order_id} is packed by process {os.getpid()}")
    time.sleep(SECONDS)


app.conf.worker_log_format = app.conf.worker_task_log_format = "%(message)s"
SECONDS = float(os.environ.get("SHOP_SECONDS", "0.3"))


# -- From here on: private servers, a worker, and messages that come more than once. ---------------

ORDERS, CANCELLED = (7, 8), 9


def main() -> int:
    """Send every message twice; 0 if each order has one parcel and one invoice."""
    import argparse
    from pathlib import Path

    from taskguard_sandbox.examples import celery_answers, example_servers
    from taskguard_sandbox.workers import CeleryWorker

    parser = argparse.ArgumentParser(description="Every order is shipped once, then billed once.")
    parser.add_argument("--seconds", default="0.3", help="how long packing takes")
    os.environ["SHOP_SECONDS"] = parser.parse_args().seconds

    with example_servers("shop") as (_, database):
        Base.metadata.create_all(database)
        with Session(database) as session:
            session.add_all(Order(id=number, status="PAID") for number in ORDERS)
            session.add(Order(id=CANCELLED, status="CANCELLED"))
            session.commit()

        with CeleryWorker("shop", children=4, python_path=Path(__file__).parent) as worker:
            answered = celery_answers(deliver(), worker, about="^(?!Task).*order:")

        with Session(database) as session:
            orders = {
                each.id: (each.status, each.parcels, each.invoices)
                for each in session.scalars(sa.select(Order).order_by(Order.id))
            }

    print("\nanswers:", *sorted(set(map(str, answered))), sep="\n  ")
    print("orders:", orders)
    expected = dict.fromkeys(ORDERS, ("BILLED", 1, 1))
    return 0 if orders == {**expected, CANCELLED: ("CANCELLED", 0, 0)} else 1


def deliver() -> list:
    """Two messages to ship and two to bill each order, all at once; one about the cancelled one."""
    answers = []
    for order_id in ORDERS:
        answers += [task.delay(order_id) for task in (bill, ship, ship, bill)]
    return [*answers, ship.delay(CANCELLED)]


if __name__ == "__main__":
    raise SystemExit(main())
