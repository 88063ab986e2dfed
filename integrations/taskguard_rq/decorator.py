"""`@guarded_job`: turns an RQ job into a delivery, and its outcome into a return value for RQ.

Guarantees: the function keeps its module, name and signature (without `guard`), so
`queue.enqueue(charge, 42)` finds it. RQ runs an `async def` as usual; other callers await it
(`coroutines.py`). A deferred job is in the schedule before its execution ends. A body that returns
`Retry` requests another execution. `Retry` is no result, so the work is not DONE.

In workers of this package, a job that never runs is CANCELED. Its work was revoked, it was skipped,
a newer job superseded it, or its `ttl` ended while it waited for its key.

Not guaranteed: RQ runs a job again after its work horse was killed only if the job was enqueued
with `retry=Retry(max=…)`. Otherwise the job is FAILED and listed in the failed registry.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack, cast

from rq import get_current_job
from rq.job import Job
from rq.timeouts import BaseTimeoutException

from taskguard.errors import LedgerUnavailableError, WorkFailedError
from taskguard.integration import (
    Answered,
    Completed,
    Deferred,
    Delivery,
    Dropped,
    Ended,
    GuardedFunction,
    MessageRef,
    Parked,
)
from taskguard_rq.calls import call_of
from taskguard_rq.coroutines import in_thread, loop_runs_here, mark
from taskguard_rq.expiry import expires_at_s, may_have_expired
from taskguard_rq.horses import flush_stock_horse
from taskguard_rq.marks import PROMOTED, marks_of
from taskguard_rq.parking import (
    ParkedJob,
    RQParking,
    expired,
    never_runs,
    note_reached,
    rank_of,
    refuse_rate_limit,
    refuse_unkept,
    refuse_used_again,
    take_out,
)
from taskguard_rq.preloading import note_loaded
from taskguard_rq.queue import RQQueue
from taskguard_rq.recognition import layers_of, message_of, note_guard, plain
from taskguard_rq.redelivery import has_failed, is_redelivered, sent_at
from taskguard_rq.relay import note_parking
from taskguard_rq.retries import GuardedJobFunction, RetryReturnedError
from taskguard_rq.runtime import runtime
from taskguard_rq.ticks import name_ticks

if TYPE_CHECKING:
    from taskguard import TaskOptions
    from taskguard.integration import Decorator, KeySpec

__all__ = ["guarded_job"]

logger = logging.getLogger("taskguard")

_NO_ANSWER_S = 1.0
# RQ's name for the worker of a job of a queue with `is_async=False`.
_NO_WORKER = "sync"


def guarded_job(
    *,
    key: KeySpec,
    message_id: Callable[[Job], str] | None = None,
    **options: Unpack[TaskOptions],
) -> Decorator:
    """Make a job function safe to deliver twice.

    Args:
        key: the key template, for example "invoice:<invoice_id>", a list of templates, or a
            callable.
        message_id: a function that returns the id of the message for a `Job`. Default: the job's
            id, its time of creation and its remaining repeats.
        options: the options of the guard. docs/reference/options.md describes each of them.

    Raises:
        ConfigurationError: an option is wrong.
        KeyTemplateError: a template does not fit the function's parameters.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = GuardedJobFunction(function, key=key, **options)
        if compiled.by_tick:
            name_ticks()
        if compiled.policy.parks:
            note_parking()

        is_async = inspect.iscoroutinefunction(function)

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            job = get_current_job()

            def run() -> Any:
                try:
                    if job is None or not _is_of(job, wrapper):
                        return runtime().run(compiled, args, kwargs)
                    note_reached(job)
                    refuse_used_again(job, compiled, named=message_id is not None)
                    marks = marks_of(job)
                    message = message_of(job, message_id=message_id, marks=marks)
                    return _deliver(job, compiled, message, marks.line, args, kwargs)
                except RetryReturnedError as asked:
                    return asked.retry
                finally:
                    note_loaded()
                    flush_stock_horse()

            if is_async and not _is_called_by_rq(job, wrapper):
                return in_thread(run)
            return run()

        wrapper.__signature__ = compiled.signature  # type: ignore[attr-defined]
        if is_async:
            mark(wrapper)
        note_guard(wrapper, compiled, message_id=message_id)
        return wrapper

    return cast("Decorator", decorate)


def _is_of(job: Job, wrapper: Callable[..., Any]) -> bool:
    """Return True if the job's function is `wrapper`, perhaps inside other decorators."""
    return any(layer is wrapper for layer in layers_of(job.func))


def _is_called_by_rq(job: Job | None, wrapper: Callable[..., Any]) -> bool:
    """Return True if RQ itself calls the function: it accepts a value instead of a coroutine.

    Every other caller awaits what a coroutine function returns.
    """
    return job is not None and plain(job.func) is wrapper and not loop_runs_here()


def _deliver(
    job: Job,
    compiled: GuardedFunction,
    message: MessageRef,
    line: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if job.worker_name == _NO_WORKER:
        return _run_here(job, compiled, message, args, kwargs)
    queue, parking, policy = RQQueue(job), None, compiled.policy
    promoted, here = line == PROMOTED, runtime()
    if policy.parks:
        refuse_rate_limit(job, compiled)
        if policy.strict:
            refuse_unkept(job, compiled.name)
        parking = RQParking(job, message, compiled)
    delivery_of = functools.partial(
        compiled.delivery,
        args,
        kwargs,
        namespace=here.namespace,
        message=message,
        parking=parking,
        promoted=promoted,
    )
    if parking is not None and may_have_expired(job):
        try:
            canceled = expired(job, delivery_of())
        except LedgerUnavailableError as error:
            logger.warning(
                "%s: the ledger did not answer whether the job has expired: %s", job.id, error
            )
            queue.publish_again(message.deferrals, _NO_ANSWER_S)
            return queue.deferred()
        if canceled is not None:
            return canceled
    take_out(job, line)
    delivery = _made(
        job,
        delivery_of,
        published_at_s=sent_at(job).timestamp(),
        redelivered=not promoted and is_redelivered(job, deferrals=message.deferrals),
        queue=queue,
        rank=rank_of(job) if policy.ranked else 0,
        expires_at_s=None if parking is None else expires_at_s(job),
        orders=(BaseTimeoutException,),
        call=call_of(job, message) if policy.stores_calls else None,
        resumes=compiled.by_run and has_failed(job),
    )
    try:
        outcome = here.runner.deliver(delivery, lambda guard: compiled.call(args, kwargs, guard))
    except WorkFailedError:
        job.retries_left = 0  # otherwise RQ would retry in vain
        raise
    if isinstance(outcome, Dropped):
        return never_runs(job, outcome, delivery.key)
    return _told(queue, outcome)


def _made(job: Job, delivery_of: Callable[..., Delivery], **values: Any) -> Delivery:
    """Return the delivery. Its arguments may not fit, and a callable of its key may fail."""
    try:
        return delivery_of(**values)
    except Exception:
        runtime().runner.counting.unread(job.func_name or "", job.id, Ended.FAILED)
        raise


def _run_here(
    job: Job,
    compiled: GuardedFunction,
    message: MessageRef,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a job of a queue with `is_async=False`. It cannot be deferred: a held key is an error."""
    here = runtime()
    delivery = compiled.delivery(args, kwargs, namespace=here.namespace, message=message)
    outcome = here.runner.deliver(delivery, lambda guard: compiled.call(args, kwargs, guard))
    if isinstance(outcome, Completed | Answered):
        return outcome.value
    return never_runs(job, outcome, delivery.key) if isinstance(outcome, Dropped) else None


def _told(queue: RQQueue, outcome: Completed | Answered | Deferred | Parked) -> Any:
    if isinstance(outcome, Completed | Answered):
        return outcome.value
    return ParkedJob() if isinstance(outcome, Parked) else queue.deferred()
