"""Whether RQ has begun a job before, which it overwrites when it begins the job again.

Guarantees: the workers of this package know that a job was begun before if its work horse or worker
was killed, or if it was requeued. Other workers know it only of a job that returned a `Retry`.

Jobs that were put off do not count, nor do those that are used for several messages (`Repeat`,
rq-scheduler).
"""

from __future__ import annotations

from rq.job import Job

from taskguard_rq.queue import DEFERRALS

__all__ = ["RQ_SCHEDULER_META", "is_redelivered", "note_start"]

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
    used_again = job.repeats_left is not None or RQ_SCHEDULER_META.intersection(job.meta)
    return not used_again and DEFERRALS not in job.meta and getattr(job, _BEGUN, False)
