"""Whether RQ has begun a job before, which it overwrites when it begins the job again; and when a
message was sent, of jobs that are used for several.

Guarantees: the workers of this package know that a job was begun before if its work horse or worker
was killed, or if it was requeued. Other workers know it only of a job that returned a `Retry`.

Jobs that were put off do not count, nor do those that are used for several messages (`Repeat`,
rq-scheduler).
"""

from __future__ import annotations

from datetime import datetime

from rq.job import Job

from taskguard_rq.queue import DEFERRALS

__all__ = ["RQ_SCHEDULER_META", "is_redelivered", "note_start", "sent_at"]

# What rq-scheduler leaves in `job.meta` of what it enqueues again and again.
RQ_SCHEDULER_META = frozenset({"interval", "repeat", "cron_string"})
_BEGUN = "_taskguard_begun"


def note_start(job: Job) -> None:
    """Note whether the job was begun before; call it before RQ notes that the job begins."""
    setattr(job, _BEGUN, job.started_at is not None)


def is_redelivered(job: Job) -> bool:
    """Whether this message has been delivered before, as far as that is known."""
    if job.number_of_retries:
        return True
    return not _is_used_again(job) and DEFERRALS not in job.meta and getattr(job, _BEGUN, False)


def sent_at(job: Job) -> datetime:
    """When the message at hand was sent: of a job that is used again, when it was enqueued last."""
    return (_is_used_again(job) and job.enqueued_at) or job.created_at


def _is_used_again(job: Job) -> bool:
    """Whether the job is one of several messages: `Repeat`, rq-scheduler."""
    return job.repeats_left is not None or bool(RQ_SCHEDULER_META.intersection(job.meta))
