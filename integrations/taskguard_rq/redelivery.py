"""Tell a redelivery from a first delivery, before RQ overwrites the times in the job's record.

Guarantees: the workers of this package detect that a job was begun before if its work horse or
worker was killed, or if it was requeued. Other workers detect it only if the job returned `Retry`.

A deferred job does not count as redelivered. Neither does a job that RQ uses for several messages
(`Repeat`, rq-scheduler). The time at which such a message was sent is approximate: the time when it
was last enqueued.
"""

from __future__ import annotations

from datetime import datetime

from rq.job import Job
from rq.results import Result

__all__ = [
    "has_failed",
    "is_of_rq_scheduler",
    "is_redelivered",
    "is_used_again",
    "note_start",
    "sent_at",
]

# Keys that rq-scheduler writes into the `meta` of a job that it enqueues repeatedly.
_RQ_SCHEDULER_META = frozenset({"interval", "repeat", "cron_string"})
_BEGUN = "_taskguard_begun"


def note_start(job: Job) -> None:
    """Note whether the job was begun before. Call this before RQ overwrites `started_at`."""
    setattr(job, _BEGUN, job.started_at is not None)


def is_redelivered(job: Job, *, deferrals: int) -> bool:
    """Return True if this message is known to have been delivered before."""
    if job.number_of_retries:
        return True
    return not is_used_again(job) and not deferrals and getattr(job, _BEGUN, False)


def has_failed(job: Job) -> bool:
    """Return True if RQ has recorded a failure of the job. So a person has requeued it."""
    result = job.latest_result()
    return result is not None and result.type == Result.Type.FAILED


def sent_at(job: Job) -> datetime:
    """Return when the message was sent. If RQ reuses the job: when it was last enqueued."""
    if is_used_again(job) and job.enqueued_at is not None:
        return job.enqueued_at
    return job.created_at


def is_used_again(job: Job) -> bool:
    """Return True if RQ uses the job for several messages."""
    return job.repeats_left is not None or is_of_rq_scheduler(job)


def is_of_rq_scheduler(job: Job) -> bool:
    """Return True if rq-scheduler enqueues the job repeatedly."""
    return bool(_RQ_SCHEDULER_META.intersection(job.meta))
