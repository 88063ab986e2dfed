"""The RQ jobs of `contention.py`; their journal is that of its Celery tasks."""

from __future__ import annotations

import os

import redis
import rq

from benchmarks.journal import work_until_commit
from taskguard import Guard
from taskguard_rq import guarded_job

QUEUE = "contention"


@guarded_job(key="committed:<key>", once_per="message", busy="park")
def park_committed(key: str, number: int, body_s: float, guard: Guard) -> None:
    """Waits in the ledger; its end is that of its transaction's COMMIT."""
    work_until_commit(key, number, body_s, guard)


def publish(task: str, keys: list[str], count: int, body_s: float) -> None:
    """Put jobs of these keys in turns into the queue."""
    queue = rq.Queue(QUEUE, connection=redis.Redis.from_url(os.environ["CONTENTION_BROKER"]))
    for number in range(count):
        words = (keys[number % len(keys)], number, body_s)
        queue.enqueue(f"{__name__}.{task}", *words, result_ttl=0)
