"""The Celery app of one deploy: a task `shop.queue_up`, guarded as SHOP_DECLARED says, no other."""

from __future__ import annotations

import json
import os
from typing import Any

import sqlalchemy as sa
from celery import Celery

from taskguard import Guard
from taskguard_celery import guarded_task

app = Celery("shop", broker=os.environ["SHOP_BROKER"], backend=os.environ["SHOP_BACKEND"])
app.conf.update(
    taskguard_locks_url=os.environ["SHOP_LOCKS"],
    taskguard_ledger_url=os.environ["SHOP_DATABASE"],
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    task_default_queue=os.environ.get("SHOP_QUEUE", "shop"),
)
app.conf.update(json.loads(os.environ.get("SHOP_SETTINGS", "{}")))
DECLARED: dict[str, Any] = json.loads(os.environ["SHOP_DECLARED"])


@app.task(name="shop.queue_up")
@guarded_task(key="queue:<name>", once_per="message", ttl_s=2.0, **DECLARED)
def queue_up(name: str, number: int, seconds: float = 0.0, *, guard: Guard) -> int:
    """Has its effect once."""
    with guard.transaction() as db:
        row = {"item": f"{name} {number}", "fence": guard.fence}
        db.execute(sa.text("insert into effects values (:item, :fence)"), row)
        guard.result = number
    return number
