"""Orders that are shipped once, however often their messages come: `python shop.py`.

The first part is the shop, as it would be in a project. The second part runs it here.
"""

from __future__ import annotations

import os
import time

from celery import Celery
from sqlalchemy import text

from taskguard import Guard
from taskguard_celery import guarded_task, safe_defaults

# Its URLs come from CELERY_BROKER_URL, TASKGUARD_LOCKS_URL and TASKGUARD_LEDGER_URL.
app = Celery("shop")
app.conf.worker_log_format = app.conf.worker_task_log_format = "%(message)s"
safe_defaults(app)  # acks_late and reject_on_worker_lost: no message is lost with its worker


@app.task
@guarded_task(key="order:<order_id>", ttl_s=5)
def ship(order_id: int, guard: Guard) -> str:
    """Pack the parcel, then write down that it left."""
    print(f"order:{order_id} is packed by process {os.getpid()}")
    time.sleep(SECONDS)

    with guard.transaction() as db:  # this row and "order:7 is DONE" are committed together
        db.execute(
            text("insert into shipments (order_id, fence) values (:order_id, :fence)"),
            {"order_id": order_id, "fence": guard.fence},
        )
    return f"order {order_id} shipped by process {os.getpid()}"


SECONDS = float(os.environ.get("SHOP_SECONDS", "0.3"))


# -- From here on: private servers, a worker, and messages that come more than once. ---------------

ORDERS = (7, 8, 9)


def main() -> int:
    """Send every order three times; 0 if each was shipped once and every caller was answered."""
    import argparse
    from pathlib import Path

    from taskguard_sandbox.examples import celery_answers, example_servers
    from taskguard_sandbox.workers import CeleryWorker

    parser = argparse.ArgumentParser(description="Every order comes three times and ships once.")
    parser.add_argument("--seconds", default="0.3", help="how long packing takes")
    os.environ["SHOP_SECONDS"] = parser.parse_args().seconds

    with example_servers("shop") as (valkey, database):
        with database.begin() as db:  # no unique index: a second shipment would be seen
            db.execute(text("create table shipments (order_id int, fence bigint)"))

        with CeleryWorker("shop", children=4, python_path=Path(__file__).parent) as worker:
            print(f"the lock server is redis://127.0.0.1:{valkey.port}/2\n")
            answered = celery_answers(deliver(), worker, about="order:")

        count = text("select order_id, count(*) from shipments group by 1 order by 1")
        with database.connect() as db:
            shipments = dict(db.execute(count).all())

    print("\nanswers:  ", *sorted(set(answered), key=str), sep="\n  ")
    print("shipments:", shipments)
    return 0 if shipments == dict.fromkeys(ORDERS, 1) and len(set(answered)) == len(ORDERS) else 1


def deliver() -> list:
    """Two messages about each order, one of which the broker delivers twice."""
    answers = []
    for order_id in ORDERS:
        answers += [ship.delay(order_id), ship.delay(order_id)]
        ship.apply_async((order_id,), task_id=answers[-1].id)
    return answers


if __name__ == "__main__":
    raise SystemExit(main())
