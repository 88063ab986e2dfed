"""The Celery app of `idle.py`: one task, which parks or does not."""

from __future__ import annotations

import os

from celery import Celery

from taskguard_celery import guarded_task

app = Celery("idle", broker=os.environ["IDLE_BROKER"])
app.conf.update(
    task_default_queue="idle",
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=1,
)

if os.environ["IDLE_TASK"] != "none":
    BUSY = os.environ["IDLE_TASK"]

    @app.task
    @guarded_task(key="account:<account>", once_per="message", busy=BUSY)  # type: ignore[call-overload]
    def book(account: int) -> None:
        """Does nothing."""
