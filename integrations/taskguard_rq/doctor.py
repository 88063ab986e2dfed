"""Read the queues of a Redis server for `taskguard doctor`: waiting jobs and workers.

Guarantees: changes nothing. Reads the first hundred jobs of each queue and imports their functions,
like a worker. Skips a job that it cannot read. It does not know the class of a worker, because RQ
does not store it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from redis import Redis, exceptions
from rq import Queue, Worker
from rq.job import Job
from rq.scheduler import RQScheduler
from rq.utils import import_attribute

from taskguard.integration import Configuration, Finding, GuardedFunction, GuardedTask
from taskguard_rq.health import (
    JobFacts,
    QueueFacts,
    judge_cron_job,
    judge_job,
    judge_key,
    judge_queue,
)
from taskguard_rq.outbox import connection_at
from taskguard_rq.recognition import guarded_function_of
from taskguard_rq.runtime import runtime

__all__ = ["configuration_at"]

_LOOKED_AT = 100


def configuration_at(target: str) -> Configuration:
    """Return the configuration that `--rq redis://…` checks.

    Raises:
        CommandTargetError: the target is not the URL of a Redis server.
    """
    tasks: dict[str, GuardedTask] = {}
    found: list[Finding] = []
    once: dict[str, list[Finding]] = {}  # by function: of its entries, or else of its key
    with (
        contextlib.closing(connection_at(target)) as connection,
        # `examine()` reports a server that gives no answer.
        contextlib.suppress(exceptions.RedisError, OSError),
    ):
        queues = Queue.all(connection=connection)
        for queue in queues:
            found += judge_queue(_facts_of(queue, connection))
        for cron_job, compiled in _cron_jobs(connection):
            for finding in judge_cron_job(cron_job, compiled):
                once.setdefault(compiled.name, []).append(finding)
        for job, compiled in _waiting(queues):
            facts = _facts_of_job(job, compiled)
            if facts.name not in tasks:
                found += judge_job(facts)
                once.setdefault(facts.name, list(judge_key(compiled)))
                tasks[facts.name] = GuardedTask(
                    facts.name, compiled.policy, compiled.row, facts.limit_s
                )
    return Configuration(
        runtime,
        name="RQ",
        tasks=list(tasks.values()),
        findings=found,
        serves="rq",
        # Several schedulers have the same entries.
        recorded=lambda: list(dict.fromkeys(itertools.chain(*once.values()))),
        queue_server=target,
    )


def _facts_of(queue: Queue, connection: Redis) -> QueueFacts:
    key: Any = RQScheduler.get_locking_key(queue.name)
    return QueueFacts(
        name=queue.name,
        workers=Worker.count(queue=queue),
        has_scheduler=bool(connection.exists(key)),
    )


def _waiting(queues: list[Queue]) -> Iterator[tuple[Job, GuardedFunction]]:
    for queue in queues:
        for job in queue.get_jobs(0, _LOOKED_AT):
            try:
                compiled = guarded_function_of(job.func)
            except Exception:  # noqa: BLE001,S112  # the job's module and its data can raise anything
                continue
            if compiled is not None:
                yield job, compiled


def _cron_jobs(connection: Redis) -> Iterator[tuple[Any, GuardedFunction]]:
    """Return the guarded entries of each running `rq cron`."""
    from rq.cron import CronScheduler  # croniter is slow to import

    for scheduler in CronScheduler.all(connection, cleanup=False):
        for cron_job in scheduler.get_jobs():
            try:
                compiled = guarded_function_of(import_attribute(cron_job.func_name))
            except Exception:  # noqa: BLE001,S112  # the module can raise anything
                continue
            if compiled is not None:
                yield cron_job, compiled


def _facts_of_job(job: Job, compiled: GuardedFunction) -> JobFacts:
    limit_s = float(job.timeout) if job.timeout is not None else 0.0
    return JobFacts(
        name=compiled.name,
        retries=job.retries_left,
        limit_s=limit_s if limit_s > 0 else None,
        lease_s=compiled.policy.ttl_s,
        # In a line it expires, and its caller is notified.
        kept_s=None if compiled.policy.parks else job.ttl or None,
        recoverable=compiled.policy.recoverable,
    )
