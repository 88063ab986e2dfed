"""The demo's Celery app: ships orders. Its URLs come from the environment.

CELERY_BROKER_URL, CELERY_RESULT_BACKEND, TASKGUARD_LOCKS_URL, TASKGUARD_LEDGER_URL
"""

from __future__ import annotations

import time

from celery import Celery

from taskguard import Guard
from taskguard_celery import guarded_task, safe_defaults
from taskguard_sandbox.demo import journal
from taskguard_sandbox.demo.effects import LINE, duration_s, write_effect

__all__ = ["CHILDREN", "LEASE_S", "QUEUE", "app", "book", "ship"]

QUEUE = "Celery"
LEASE_S = 2.0
CHILDREN = 4

app = Celery("demo")
app.conf.update(
    task_default_queue="orders",
    taskguard_listeners=[journal.listener(QUEUE)],
    broker_connection_retry_on_startup=True,
)
safe_defaults(app)


@app.task  # type: ignore[untyped-decorator]  # Celery ships no types
@guarded_task(key="order:<order_id>", ttl_s=LEASE_S)
def ship(order_id: str, guard: Guard) -> str:
    """Takes some time, then ships: one row."""
    journal.write(journal.Line(QUEUE, journal.BEGAN, guard.key, attempt=guard.attempt))
    time.sleep(duration_s(guard.attempt))
    journal.write(journal.Line(QUEUE, journal.WRITES, guard.key))
    with guard.transaction() as db:
        write_effect(db, QUEUE, order_id, guard)
        guard.result = f"{order_id} shipped"
    return f"{order_id} shipped"


@app.task  # type: ignore[untyped-decorator]  # Celery ships no types
@guarded_task(
    key="account:<account>", once_per="message", busy="park", order="strict", ttl_s=LEASE_S
)
def book(account: str, number: int, guard: Guard) -> None:
    """One after the other, in order."""
    del account
    time.sleep(0.02)
    with guard.transaction() as db:
        write_effect(db, LINE, str(number), guard)
