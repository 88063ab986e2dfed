"""A Django shop whose orders are shipped once, by its own ORM's transaction: `python shop.py`.

The first part is the shop. In a project it is in settings.py, models.py, tasks.py and celery.py.
"""

from __future__ import annotations

import os
import time

import django
from celery import Celery
from django.conf import settings
from django.db import models, transaction

from taskguard_celery import enqueue, guarded_task, safe_defaults
from taskguard_django import atomic, connection

postgresql = {"ENGINE": "django.db.backends.postgresql", "USER": "postgres", "HOST": "127.0.0.1"}
settings.configure(
    INSTALLED_APPS=["taskguard_django"],  # and `manage.py migrate`
    TASKGUARD={"LOCKS": os.environ.get("SHOP_LOCKS")},  # its ledger is in the database "default"
    DATABASES={"default": {**postgresql, "NAME": "shop", "PORT": os.environ.get("SHOP_PORT")}},
)
django.setup()
app = Celery("shop")  # knows lock server and ledger by Django's settings
safe_defaults(app)


class Order(models.Model):
    parcels = models.IntegerField(default=0)
    fence = models.BigIntegerField(null=True)

    class Meta:
        app_label = "shop"


@app.task
@guarded_task(key="order:<order_id>", ttl_s=5)
def ship(order_id: int) -> str:
    """Pack the parcel, then write down that it left."""
    pack(order_id)
    with atomic() as guard:  # what the ORM writes here and "order:7 is DONE" are committed together
        order = Order.objects.select_for_update().get(id=order_id)
        order.parcels, order.fence = order.parcels + 1, guard.fence
        order.save()
    return f"order {order_id} shipped by process {os.getpid()}"


def check_out(order_id: int):
    """The order and its message: both, or none."""
    with transaction.atomic():
        Order.objects.create(id=order_id)
        return enqueue(ship, (order_id,), session=connection()).result


def pack(order_id: int) -> None:
    """Takes its time."""
    print(f"order:{order_id} is packed by process {os.getpid()}")
    time.sleep(float(os.environ.get("SHOP_SECONDS", "0.3")))


# -- From here on: private servers, a worker, and messages that come more than once. ---------------

app.conf.worker_log_format = app.conf.worker_task_log_format = "%(message)s"
ORDERS = (7, 8, 9)


def main() -> int:
    """Send every order three times; 0 if each has one parcel and every caller was answered."""
    import argparse
    from pathlib import Path

    from django.core.management import call_command
    from django.db import connection as database

    from taskguard_sandbox.examples import celery_answers
    from taskguard_sandbox.servers import Postgres, Valkey
    from taskguard_sandbox.workers import CeleryWorker

    parser = argparse.ArgumentParser(description="Every order comes three times and ships once.")
    parser.add_argument("--seconds", default="0.3", help="how long packing takes")
    os.environ["SHOP_SECONDS"] = parser.parse_args().seconds

    with Valkey() as valkey, Postgres() as postgres:
        os.environ.update(
            CELERY_BROKER_URL=valkey.url_of(0),
            CELERY_RESULT_BACKEND=valkey.url_of(1),
            SHOP_LOCKS=valkey.url_of(2),
            SHOP_PORT=str(postgres.port),
        )
        settings.TASKGUARD["LOCKS"] = valkey.url_of(2)
        database.settings_dict["PORT"] = str(postgres.port)
        postgres.create_database("shop")
        call_command("migrate", verbosity=0)
        with database.schema_editor() as schema:  # in a project a migration does
            schema.create_model(Order)

        with CeleryWorker("shop", children=4, python_path=Path(__file__).parent) as worker:
            answered = celery_answers(deliver(), worker, about="order:")
        parcels = dict(Order.objects.order_by("id").values_list("id", "parcels"))
        database.close()

    print("\nanswers:", *sorted(set(answered), key=str), sep="\n  ")
    print("parcels:", parcels)
    return 0 if parcels == dict.fromkeys(ORDERS, 1) and len(set(answered)) == len(ORDERS) else 1


def deliver() -> list:
    """Two messages about each order, one of which the broker delivers twice."""
    answers = []
    for order_id in ORDERS:
        answers += [check_out(order_id), ship.delay(order_id)]
        ship.apply_async((order_id,), task_id=answers[-1].id)
    return answers


if __name__ == "__main__":
    raise SystemExit(main())
