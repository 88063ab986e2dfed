"""A job's `ttl` while it waits for its key: for how long it may stand in a queue, and then in line.

RQ lets Redis delete the record of a job whose `ttl` is over, and tells nobody. In a line that could
not be told from a record that an emptied Redis has lost, so here the record stays, and carries when
it expires: `ttl` seconds after RQ put the job into its queue. That holds until its body begins; if
it is retried then, RQ counts anew, as it does whenever it puts a job into a queue.

Guarantees: while a job waits, and after it was called, its record is not deleted by Redis. What
was called and has expired by the clock of the worker that gets it is not run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from redis.client import Pipeline
from rq.job import Job

__all__ = ["expires_at_s", "expiry_of", "has_expired", "kept_by_redis", "take_expiry"]

# In `job.meta` of a job in line, and an attribute of one that has left it: when it expires, in
# seconds since 1970.
_EXPIRES_META = "taskguard_expires"
_EXPIRES = "_taskguard_expires"


def expires_at_s(job: Job) -> float | None:
    """When the job in hand expires, in seconds since 1970; None: never."""
    noted = job.meta.get(_EXPIRES_META, getattr(job, _EXPIRES, None))
    if noted is not None:
        return float(noted)
    if job.ttl is None or job.enqueued_at is None:
        return None
    return job.enqueued_at.timestamp() + job.ttl


def expiry_of(job: Job) -> dict[str, float]:
    """What the meta of a job that is parked says of that, beside what stands there."""
    at_s = expires_at_s(job)
    return {} if at_s is None else {_EXPIRES_META: at_s}


def take_expiry(job: Job) -> None:
    """Take that out of its meta: it has left its line, but may stand there again."""
    setattr(job, _EXPIRES, job.meta.pop(_EXPIRES_META, None))


def has_expired(job: Job) -> bool:
    """Whether a job that was called from its line came too late."""
    noted = job.meta.get(_EXPIRES_META)
    return noted is not None and float(noted) <= time.time()


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
