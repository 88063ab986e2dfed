"""Judge RQ's queues, and the guarded jobs that wait in them. Nothing here queries Redis.

RQ has no list of job functions, so only jobs that wait in a queue now are judged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from taskguard.integration import Finding, GuardedFunction
from taskguard_rq import findings

__all__ = [
    "JobFacts",
    "QueueFacts",
    "judge_cron_job",
    "judge_job",
    "judge_key",
    "judge_queue",
]

_DAY_S = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """A guarded job that waits in a queue.

    Attributes:
        name: the name of its function.
        retries: how often RQ tries again. None: never.
        limit_s: its timeout. None: it has none.
        lease_s: how long a dead holder keeps a key.
        kept_s: after how long in the queue RQ drops it (ttl). None: never.
        recoverable: whether a sweep can enqueue it again.
    """

    name: str
    retries: int | None
    limit_s: float | None
    lease_s: float = 0.0
    kept_s: float | None = None
    recoverable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFacts:
    """One queue.

    Attributes:
        name: its name.
        workers: how many workers listen to it.
        has_scheduler: whether a scheduler enqueues its deferred jobs.
    """

    name: str
    workers: int
    has_scheduler: bool


def judge_queue(queue: QueueFacts) -> Iterator[Finding]:
    """Judge what is missing around a queue."""
    if queue.workers and not queue.has_scheduler:
        yield findings.NO_SCHEDULER.at(f"the queue {queue.name}")


def judge_job(job: JobFacts) -> Iterator[Finding]:
    """Judge which of a job's options can lose or repeat its work."""
    where = f"the job {job.name}"
    if not job.retries and not job.recoverable:
        yield findings.NO_RETRY.at(where)
    if job.limit_s is None:
        yield findings.NO_TIME_LIMIT.at(where)
    if job.kept_s is not None and job.kept_s <= job.lease_s:
        yield findings.JOB_TTL.at(where, kept_s=job.kept_s, lease_s=job.lease_s)


def judge_cron_job(cron_job: Any, compiled: GuardedFunction) -> Iterator[Finding]:
    """Judge whether an entry of `rq cron` runs once only because all its jobs are the same work."""
    if isinstance(cron_job.args, str) or isinstance(cron_job.kwargs, str):
        return  # RQ replaced what it could not write as JSON by a text
    if compiled.deciding(cron_job.args, cron_job.kwargs) is None:
        return
    where = f"the cron job {getattr(cron_job, 'name', cron_job.func_name)}"
    yield findings.PERIODIC_ONCE.at(where, task=compiled.name, days=_days(compiled))


def judge_key(compiled: GuardedFunction) -> Iterator[Finding]:
    """Judge whether a function runs once only because its key has no arguments."""
    if compiled.is_one_work:
        yield findings.CONSTANT_KEY.at(f"the job {compiled.name}", days=_days(compiled))


def _days(compiled: GuardedFunction) -> float:
    return compiled.policy.retention_s / _DAY_S
