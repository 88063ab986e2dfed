"""The RQ jobs of `drain.py`: one short job, guarded in several ways."""

from __future__ import annotations

import os

import redis
import rq

from benchmarks.databases import by_hand as connect_by_hand
from taskguard_rq import guarded_job

LOCKS, DATABASE = os.environ["TASKGUARD_LOCKS_URL"], os.environ["TASKGUARD_LEDGER_URL"]


def bare(order: int) -> None:
    """No guard."""


def by_hand(order: int) -> None:
    """The hand-written optimum; each job is a process, with connections of its own."""
    hand = connect_by_hand(LOCKS, DATABASE, create=False)
    hand.run(f"order:{order}")
    hand.close()


@guarded_job(key="order:<order>")
def guarded(order: int) -> None:
    """taskguard with its ledger."""


def publish(task: str, first: str, count: str) -> None:
    """Put `count` jobs into the queue, numbered from `first`."""
    queue = rq.Queue("drain", connection=redis.Redis.from_url(os.environ["DRAIN_BROKER"]))
    name = "bare" if task == "unique" else task
    for order in range(int(first), int(first) + int(count)):
        options = {"job_id": f"order-{order}", "unique": True} if task == "unique" else {}
        queue.enqueue(f"benchmarks.drain_rq.{name}", order, result_ttl=0, **options)
