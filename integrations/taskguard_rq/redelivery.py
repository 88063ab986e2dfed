"""What RQ overwrites when it begins a job again, or uses it for another message.

Guarantees: the workers of this package know that a job was begun before if its work horse or worker
was killed, or if it was requeued. Other workers know it only of a job that returned a `Retry`.

Jobs that were put off do not count, nor do those that are used for several messages (`Repeat`,
rq-scheduler). When such a message was sent is known only roughly: when it was enqueued last.
"""

from __future__ import annotations

from datetime import datetime

from rq.job import Job

__all__ = [
    "is_of_rq_scheduler",
    "is_redelivered",
    "is_used_again",
    "note_start",
    "sent_at",
]

# What rq-scheduler leaves in `job.meta` of what it enqueues again and again.
_RQ_SCHEDULER_META = frozenset({"interval", "repeat", "cron_string"})
_BEGUN = "_taskguard_begun"


def note_start(job: Job) -> None:
    """Note whether the job was begun before; call it before RQ notes that the job begins."""
    setattr(job, _BEGUN, job.started_at is not None)


def is_redelivered(job: Job, *, deferrals: int) -> bool:
    """Whether this message has been delivered before, as far as that is known."""
    if job.number_of_retries:
        return True
    return not is_used_again(job) and not deferrals and getattr(job, _BEGUN, False)


def sent_at(job: Job) -> datetime:
    """When the message at hand was sent: of a job that is used again, when it was enqueued last."""
    if is_used_again(job) and job.enqueued_at is not None:
        return job.enqueued_at
    return job.created_at


def is_used_again(job: Job) -> bool:
    """Whether the job is used for several messages."""
    return job.repeats_left is not None or is_of_rq_scheduler(job)


def is_of_rq_scheduler(job: Job) -> bool:
    """Whether rq-scheduler enqueues it again and again."""
    return bool(_RQ_SCHEDULER_META.intersection(job.meta))
