"""The app of the storm's workers, and the effect that every body has.

URLs come from the environment.
"""

from __future__ import annotations

import os
from typing import Any

import sqlalchemy as sa
from celery import Celery

from storm.settings import QUEUE, VISIBILITY_S

LOCKS_URL = os.environ["STORM_LOCKS"]
DATABASE_URL = os.environ["STORM_DATABASE"]

app = Celery("storm", broker=os.environ["STORM_BROKER"])
app.conf.update(
    task_default_queue=QUEUE,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
    broker_transport_options={
        "visibility_timeout": VISIBILITY_S,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    },
)


def write(db: Any, item: str, fence: int = 0) -> None:
    """The effect: one more row, whatever there is."""
    db.execute(
        sa.text("insert into effects (item, fence, pid) values (:item, :fence, :pid)"),
        {"item": item, "fence": fence, "pid": os.getpid()},
    )
