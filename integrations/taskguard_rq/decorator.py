"""`@guarded_job`: from an RQ job to a delivery, and from its outcome to what RQ is told.

Guarantees: module, name and signature (less `guard`) stay, so that `queue.enqueue(charge, 42)`
finds the function. A job that is put off is in the schedule before its execution ends.

Does not guarantee that RQ tries again: a work horse that is killed is retried by RQ only with
`retry=Retry(max=…)`; without it the job is FAILED, and seen in the failed registry.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from rq import get_current_job
from rq.job import Job

from taskguard import Answered, Completed, Dropped, GuardedFunction, MessageRef, Outcome
from taskguard_rq.house import house
from taskguard_rq.queue import COPY, RQQueue

__all__ = ["guarded_job", "message_of"]

Function = TypeVar("Function", bound=Callable[..., Any])


def guarded_job(
    *, key: Any, once_per: str = "key", work: str | None = None, **options: Any
) -> Callable[[Function], Function]:
    """Make a job function safe to deliver twice.

    Args:
        key: the key template, for example "invoice:<invoice_id>"; a list or a callable does too.
        once_per: "key": the work is done once for the key. "message": jobs of one key never
            overlap, each job's effects happen once. Or a template that names the work.
        work: the first part of the work's id; by default the function's name.
        options: see `taskguard.Policy`.

    Raises:
        ConfigurationError: an option is wrong.
        KeyTemplateError: a template does not fit the function's parameters.
    """

    def decorate(function: Function) -> Function:
        compiled = GuardedFunction(
            function, key=key, once_per=once_per, work=work, options=options, busy="retry"
        )

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            job = get_current_job()
            if job is None or job.func is not wrapper:
                return house().run(compiled, args, kwargs)
            return _deliver(job, compiled, args, kwargs)

        wrapper.__signature__ = compiled.signature  # type: ignore[attr-defined]
        return wrapper  # type: ignore[return-value]

    return decorate


def message_of(job: Job) -> MessageRef:
    """The identity of a job's message: `Repeat` uses the job again, a requeue does not."""
    repeats = "" if job.repeats_left is None else f"~{job.repeats_left}"
    created = f"@{job.created_at.timestamp():.6f}"
    return MessageRef(id=f"{job.id}{created}{repeats}", copy=int(job.meta.get(COPY, 0)))


def _deliver(
    job: Job, compiled: GuardedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    queue = RQQueue(job)
    delivery = compiled.delivery(
        args,
        kwargs,
        message=message_of(job),
        published_at_s=job.created_at.timestamp(),
        queue=queue,
    )
    outcome = house().runner.deliver(delivery, lambda guard: compiled.call(args, kwargs, guard))
    return _told(queue, outcome)


def _told(queue: RQQueue, outcome: Outcome) -> Any:
    if isinstance(outcome, Completed | Answered):
        return outcome.value
    if isinstance(outcome, Dropped) and outcome.reason != "superseded":
        return None
    if queue.deferral is None:
        # Superseded: the copy that is alive shares this job's record, so this execution must not
        # finish it. Putting it off again moves the one entry in the schedule.
        queue.defer(1.0)
    return queue.deferral
