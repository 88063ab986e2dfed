"""What in RQ's queues loses or repeats work: rules over the jobs and workers that are there.

Guarantees: nothing here asks Redis. RQ knows no list of job functions, so what a rule says of a
guarded job it says of those that wait in a queue now.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from taskguard import Finding, GuardedFunction, Level

__all__ = [
    "JobFacts",
    "QueueFacts",
    "findings_of_cron_job",
    "findings_of_job",
    "findings_of_queue",
]

_DAY_S = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What a guarded job that waits says for itself.

    Attributes:
        name: its function's.
        retries: how often RQ tries again; None: never.
        limit_s: its time-out; None: it has none.
        wait_s: how long its guard waits for a key.
        lease_s: how long a holder that died keeps a key.
        kept_s: after what time in the queue RQ drops it (ttl); None: never.
        recoverable: a sweep can enqueue it again.
    """

    name: str
    retries: int | None
    limit_s: float | None
    wait_s: float = 0.0
    lease_s: float = 0.0
    kept_s: float | None = None
    recoverable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFacts:
    """One queue.

    Attributes:
        name: its name.
        workers: how many workers listen to it.
        has_scheduler: whether one of them brings back what was put off.
    """

    name: str
    workers: int
    has_scheduler: bool


def findings_of_queue(queue: QueueFacts) -> Iterator[Finding]:
    """What is missing around a queue."""
    if queue.workers and not queue.has_scheduler:
        yield Finding(
            "no_scheduler",
            Level.WARNING,
            where=f"the queue {queue.name}",
            what="No scheduler runs for it.",
            why="A job whose key is taken goes straight back into the queue, over and over.",
            mend="rq worker --with-scheduler, or --worker-class taskguard_rq.GuardedWorker.",
        )


def findings_of_job(job: JobFacts) -> Iterator[Finding]:
    """What in a job's options can lose or repeat its work."""
    where = f"the job {job.name}"
    if not job.retries and not job.recoverable:
        yield Finding(
            "no_retry",
            Level.WARNING,
            where=where,
            what="It is enqueued without retry=.",
            why="A work horse that is killed leaves it FAILED, and nobody runs it again.",
            mend="retry=Retry(max=3) where it is enqueued, or recoverable=True and a sweep.",
        )
    if job.limit_s is None:
        yield Finding(
            "no_time_limit",
            Level.NOTE,
            where=where,
            what="It has no time-out (job_timeout=-1).",
            why="A body that hangs keeps its key and its worker for ever.",
            mend="job_timeout=, or max_hold_s= in its guard.",
        )
    elif job.limit_s < 2 * job.wait_s:
        yield Finding(
            "wait_beyond_time_limit",
            Level.NOTE,
            where=where,
            what=f"Its guard may wait for {job.wait_s:g} s, and its time-out is {job.limit_s:g} s.",
            why="It waits for half of its time-out at most, and is then put off.",
            mend="A job_timeout of at least twice wait_s.",
        )
    if job.kept_s is not None and job.kept_s <= job.lease_s:
        yield Finding(
            "job_ttl",
            Level.WARNING,
            where=where,
            what=f"RQ drops it after {job.kept_s:g} s in the queue (ttl), and a lease is "
            f"{job.lease_s:g} s.",
            why="One that is put off while its key is taken, or its holder is dead, is lost.",
            mend="No ttl=, or one well above ttl_s of its guard.",
        )


def findings_of_cron_job(cron_job: Any, compiled: GuardedFunction) -> Iterator[Finding]:
    """Whether it runs once only, because all its jobs are the same work."""
    if isinstance(cron_job.args, str) or isinstance(cron_job.kwargs, str):
        return  # RQ's words for what it could not write as JSON
    if compiled.deciding(cron_job.args, cron_job.kwargs) is None:
        return
    yield Finding(
        "periodic_once",
        Level.WARNING,
        where=f"the cron job {getattr(cron_job, 'name', cron_job.func_name)}",
        what=f"All its jobs are the same work of {compiled.name}.",
        why="It runs once. Later jobs are answered from the record, which is kept for "
        f"{compiled.policy.retention_s / _DAY_S:g} days or longer.",
        mend='Add once_per="tick" to its guard.',
    )
