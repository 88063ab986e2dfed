"""A Celery app for tests with real workers; configured by environment variables alone.

Every body writes its effect into `effects`, which has no unique index, and its steps into
`steps`, outside any transaction, so that a test can see who is where.
"""

from __future__ import annotations

import os
import time
from typing import Any

import sqlalchemy as sa
from celery import Celery

from taskguard import Guard
from taskguard_celery import guarded_task

URL = os.environ["SHOP_DATABASE"]
TTL_S = float(os.environ.get("SHOP_TTL_S", "2"))

app = Celery("shop", broker=os.environ["SHOP_BROKER"], backend=os.environ["SHOP_BACKEND"])
app.conf.update(
    taskguard_locks_url=os.environ["SHOP_LOCKS"],
    taskguard_ledger_url=URL,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
    task_default_queue=os.environ.get("SHOP_QUEUE", "shop"),
)
if not os.environ["SHOP_BROKER"].startswith("amqp"):
    app.conf.broker_transport_options = {
        "visibility_timeout": float(os.environ.get("SHOP_VISIBILITY_S", "60")),
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }
else:
    app.conf.broker_transport_options = {"confirm_publish": True}

_engines: dict[int, sa.Engine] = {}


def engine() -> sa.Engine:
    """One engine a process."""
    if os.getpid() not in _engines:
        _engines[os.getpid()] = sa.create_engine(URL)
    return _engines[os.getpid()]


def step(item: object, name: str) -> None:
    """Say where the body is, at once and for everybody to see."""
    with engine().begin() as db:
        db.execute(
            sa.text("insert into steps values (:item, :name, :pid)"),
            {"item": str(item), "name": name, "pid": os.getpid()},
        )


def effect(db: Any, item: object, guard: Guard) -> None:
    """What must happen once."""
    db.execute(
        sa.text("insert into effects values (:item, :fence)"),
        {"item": str(item), "fence": guard.fence},
    )


@app.task(name="shop.ship")
@guarded_task(key="order:<order>", ttl_s=TTL_S)
def ship(order: int, seconds: float = 0.0, *, guard: Guard) -> dict[str, int]:
    """Takes `seconds`, then ships."""
    step(order, "began")
    time.sleep(seconds)
    with guard.transaction() as db:
        effect(db, order, guard)
        guard.result = {"order": order}
    return {"order": order}


@app.task(name="shop.hold")
@guarded_task(key="order:<order>", ttl_s=TTL_S)
def hold(order: int, seconds: float, *, guard: Guard) -> None:
    """Takes `seconds` inside the transaction, after its write; the second attempt does not."""
    with guard.transaction() as db:
        effect(db, order, guard)
        step(order, "wrote")
        if guard.attempt == 1:
            time.sleep(seconds)


@app.task(name="shop.die")
@guarded_task(key="order:<order>", ttl_s=TTL_S, max_crashes=2)
def die(order: int, guard: Guard) -> None:
    """Kills the process that runs it, each time."""
    step(order, "began")
    os.kill(os.getpid(), 9)


@app.task(name="shop.add")
@guarded_task(key="add:<x>", once_per="message", ttl_s=TTL_S)
def add(x: int, y: int) -> int:
    """For chains and chords."""
    step(x, "added")
    return x + y


@app.task(name="shop.total")
def total(values: list[int]) -> int:
    """A chord's body, not guarded."""
    return sum(values)


@app.task(name="shop.flaky", bind=True, max_retries=3)
@guarded_task(key="order:<order>", ttl_s=TTL_S)
def flaky(self: Any, order: int, guard: Guard) -> int:
    """Fails twice by self.retry."""
    step(order, "began")
    if self.request.retries < 2:
        raise self.retry(countdown=0.1)
    with guard.transaction() as db:
        effect(db, order, guard)
    return int(self.request.retries)


@app.task(name="shop.auto", autoretry_for=(ValueError,), max_retries=3, default_retry_delay=0.1)
@guarded_task(key="order:<order>", ttl_s=TTL_S)
def auto(order: int, guard: Guard) -> int:
    """Fails once; autoretry_for does the rest."""
    step(order, "began")
    if guard.attempt == 1:
        raise ValueError("once")
    with guard.transaction() as db:
        effect(db, order, guard)
    return guard.attempt
