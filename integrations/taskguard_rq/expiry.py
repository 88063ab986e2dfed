"""A job's `ttl`: for how long it may wait in its queue, and then in the line of its key.

RQ lets Redis delete the record of a job whose `ttl` is over, and tells nobody. In a line that could
not be told from a record that an emptied Redis has lost. So the ledger says when a job expires that
waits: `ttl` seconds after it was put into its queue, by the clock of whoever did so, and of several
such moments the first. A record that waits, or was called, is not deleted meanwhile.

Guarantees: what has expired in its line, by the ledger's clock, is not run, whatever became of its
record: it ends as CANCELED. That holds until its body begins: from then on the `ttl` is RQ's alone.
So it is for a job that somebody enqueues again after it has expired.

Read next: `parking.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from redis.client import Pipeline
from rq.job import Job

__all__ = ["expires_at_s", "kept_by_redis", "may_have_expired", "sent_before"]

# 30 years, which are as good as none: a ledger's columns have room for a moment in µs.
_LONGEST_S = 1e9


def expires_at_s(job: Job) -> float | None:
    """When the job in hand expires if it waits, in seconds since 1970; None: never."""
    if job.ttl is None or job.ttl > _LONGEST_S or job.enqueued_at is None:
        return None
    return job.enqueued_at.timestamp() + job.ttl


def may_have_expired(job: Job) -> bool:
    """Whether the ledger has to be asked: no earlier than so long after the job was made."""
    return job.ttl is not None and job.created_at.timestamp() + job.ttl <= time.time()


def sent_before(job: Job, at_s: float | None) -> bool:
    """Whether the job was put into its queue before that moment, the last time that it was."""
    if at_s is None or job.enqueued_at is None:
        return False
    return job.enqueued_at.timestamp() <= at_s


@contextmanager
def kept_by_redis(job: Job, pipeline: Pipeline) -> Iterator[None]:
    """Around its enqueueing: its record is not deleted when its `ttl` is over, and still has it."""
    ttl, job.ttl = job.ttl, None
    try:
        yield
    finally:
        job.ttl = ttl
    if ttl is not None:
        pipeline.hset(job.key, "ttl", ttl)
        for key in (job.key, job.dependents_key, job.dependencies_key):
            pipeline.persist(key)
