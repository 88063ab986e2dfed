"""A job's `ttl`: how long it may wait in its queue, and then in the line of its key.

At the end of a job's `ttl`, RQ lets Redis delete the job's record without notice. For a job in a
line, that would look like a record that Redis has lost. So the ledger stores when a waiting job
expires: `ttl` seconds after it was enqueued, by the clock of the process that enqueued it. If it
was enqueued several times, the first time counts. Redis keeps the record while the job waits or
after it was promoted.

Guarantees: a job that has expired in its line, by the ledger's clock, does not run. It ends as
CANCELED, even if its record is lost. Once the body has begun, or if an expired job is enqueued
again, RQ alone applies the `ttl`.

Read next: `parking.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from redis.client import Pipeline
from rq.job import Job

__all__ = ["expires_at_s", "kept_by_redis", "may_have_expired", "sent_before"]

# 30 years. A longer ttl counts as none, because a ledger's columns store µs in 64 bits.
_LONGEST_S = 1e9


def expires_at_s(job: Job) -> float | None:
    """Return when the job expires if it waits, in seconds since 1970, or None if it never does."""
    if job.ttl is None or job.ttl > _LONGEST_S or job.enqueued_at is None:
        return None
    return job.enqueued_at.timestamp() + job.ttl


def may_have_expired(job: Job) -> bool:
    """Return True if the `ttl` since the job's creation is over, so the ledger has to decide."""
    return job.ttl is not None and job.created_at.timestamp() + job.ttl <= time.time()


def sent_before(job: Job, at_s: float | None) -> bool:
    """Return True if the job was last enqueued before `at_s`, in seconds since 1970."""
    if at_s is None or job.enqueued_at is None:
        return False
    return job.enqueued_at.timestamp() <= at_s


@contextmanager
def kept_by_redis(job: Job, pipeline: Pipeline) -> Iterator[None]:
    """Enqueue the job in this block so that Redis keeps its record after its `ttl`."""
    ttl, job.ttl = job.ttl, None
    try:
        yield
    finally:
        job.ttl = ttl
    if ttl is not None:
        pipeline.hset(job.key, "ttl", ttl)
        for key in (job.key, job.dependents_key, job.dependencies_key):
            pipeline.persist(key)
