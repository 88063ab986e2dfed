"""The Celery app of `drain.py`: one short task, guarded in several ways."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import redis
import sqlalchemy as sa
from celery import Celery
from celery.signals import worker_process_init

from benchmarks.databases import by_hand as connect_by_hand
from benchmarks.hand_written import EFFECT, ByHand
from taskguard import Guard
from taskguard_celery import guarded_task

LOCKS, DATABASE = os.environ["TASKGUARD_LOCKS_URL"], os.environ["TASKGUARD_LEDGER_URL"]

app = Celery("drain", broker=os.environ["DRAIN_BROKER"])
app.conf.update(
    task_default_queue="drain",
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=4,
    broker_transport_options={"visibility_timeout": 3600},
)
if "DRAIN_ENGINE" in os.environ:  # of `drivers.py`
    app.conf.taskguard_ledger = sa.create_engine(DATABASE, pool_use_lifo=True)
if "DRAIN_LOCKS_ONLY" in os.environ:
    app.conf.taskguard_ledger = None


@functools.cache
def by_hand_connections() -> ByHand:
    """One a child."""
    return connect_by_hand(LOCKS, DATABASE, create=False)


@functools.cache
def client() -> redis.Redis:
    """One a child."""
    return redis.Redis.from_url(LOCKS)


@worker_process_init.connect
def forget_parent(**_: object) -> None:
    """Connections are made after the fork."""
    by_hand_connections.cache_clear()
    client.cache_clear()


@app.task
def bare(order: int) -> None:
    """No guard."""


@app.task
def redis_lock(order: int) -> None:
    """redis-py's Lock around the body."""
    with client().lock(f"order:{order}", timeout=30):
        pass


@app.task
def by_hand(order: int) -> None:
    """The hand-written optimum."""
    by_hand_connections().run(f"order:{order}")


@app.task
@guarded_task(key="order:<order>")
def guarded(order: int) -> None:
    """taskguard with its ledger."""


@app.task
def by_hand_with_effect(order: int) -> None:
    """Do the work by hand, and write a row together with DONE."""
    by_hand_connections().run(f"order:{order}", effect=True)


@app.task
@guarded_task(key="order:<order>")
def guarded_with_effect(order: int, guard: Guard) -> None:
    """Do the work with taskguard, by the driver as by hand."""
    with guard.transaction() as db:
        db.exec_driver_sql(EFFECT)


def _fencekit() -> Callable[..., Any]:
    from fencekit import DistributedLock, IdempotencyGuard
    from fencekit.celery import idempotent_task

    connection = redis.Redis.from_url(LOCKS)

    @idempotent_task(
        guard=IdempotencyGuard(connection),
        lock=DistributedLock(connection),
        key=lambda order: f"order:{order}",
        lock_resource=lambda order: f"order:{order}",
        idempotency_ttl=timedelta(hours=1),
        lock_ttl=timedelta(seconds=30),
    )
    def body(order: int) -> None:
        """fencekit's lock and its record, both in Redis."""

    return body


fencekit = app.task(name="benchmarks.drain_celery.fencekit")(_fencekit())


def publish(task: str, first: str, count: str) -> None:
    """Put `count` messages into the queue, numbered from `first`."""
    with app.producer_pool.acquire() as producer:
        for order in range(int(first), int(first) + int(count)):
            app.tasks[f"benchmarks.drain_celery.{task}"].apply_async((order,), producer=producer)
