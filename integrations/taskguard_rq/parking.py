"""`busy="park"` for RQ: a job waits in the ledger, and returns at the front of its queue.

Guarantees: taskguard enqueues the same job again, from its record, which does not expire meanwhile.
While a job waits, its status is DEFERRED, and RQ's registry of deferred jobs lists it.

Stock workers understand only that a job has ended, has failed or is to be retried. So they defer a
job instead of parking it, and it overtakes no job that waits. With `order="strict"`, taskguard
raises an error for a job in a stock worker, and for a job with a `ttl`. If a strict job fails, it
keeps its position until RQ has decided whether to retry it.

A job that never runs ends as CANCELED: a newer job superseded it (`busy="latest"`, `"supersede"`),
its work was revoked, it was skipped, or its `ttl` ended while it waited (`expiry.py`). Its record
gives the reason, and is kept as long as the record of a finished job. RQ's registry of cancelled
jobs does not list it, because RQ never cleans that registry. A stock worker shows FAILED, or
FINISHED if the user chose to skip the job.

A promoted job goes to the front of its queue. At the end, it would wait behind all the jobs that
have to be parked first.

Read next: `calls.py`, `worker.py`; in taskguard `run/parking.py`.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

from redis.client import Pipeline
from rq import Retry
from rq.job import Job, JobStatus
from rq.registry import DeferredJobRegistry

from taskguard import errors
from taskguard.integration import EXPIRED as WORK_EXPIRED
from taskguard.integration import (
    Claim,
    Delivery,
    Dropped,
    Ended,
    GuardedFunction,
    MessageRef,
)
from taskguard_rq.calls import (
    EXPIRED,
    LINE_META,
    NAME,
    PARKED_KEY,
    RQSender,
    call_of,
)
from taskguard_rq.expiry import sent_before
from taskguard_rq.marks import LINE, PROMOTED, WAITS, marks_of, set_mark
from taskguard_rq.recognition import guarded_function_of, message_id_of, message_of
from taskguard_rq.redelivery import is_of_rq_scheduler, is_used_again
from taskguard_rq.runtime import runtime

__all__ = [
    "CanceledJob",
    "ParkedJob",
    "RQParking",
    "allow_parking",
    "cancel",
    "defer_in_registry",
    "expired",
    "never_runs",
    "note_reached",
    "rank_of",
    "refuse_rate_limit",
    "refuse_unkept",
    "refuse_used_again",
    "take_out",
    "tell_line",
]

logger = logging.getLogger("taskguard")

_ALLOWED = "_taskguard_may_park"
_RANK = "_taskguard_rank"
# Attribute of a job whose work has failed and keeps its position in the line.
_FAILED = "_taskguard_failed"
# Errors in stock workers, for jobs that the user did not choose to skip.
_UNRUN_ERRORS = {"outdated": errors.SupersededError, "revoked": errors.WorkRevokedError}
# Attribute of a job whose guard was called.
_REACHED = "_taskguard_reached"
# RQ has enqueued or scheduled the job again.
_COMES_AGAIN = (JobStatus.QUEUED, JobStatus.SCHEDULED)

# Do nothing unless the job's record (KEYS[1]) still belongs to this worker's execution (ARGV[1]).
_UNLESS_ANOTHERS = """
if redis.call('hget', KEYS[1], 'status') ~= 'started'
    or redis.call('hget', KEYS[1], 'worker_name') ~= ARGV[1] then
  return 0
end
"""
# Set the job to DEFERRED, list it in the registry (KEYS[2]) and in the set of parked jobs
# (KEYS[3]). ARGV: worker, time, job id, name and value of the mark.
_DEFER = (
    _UNLESS_ANOTHERS
    + """
redis.call('hset', KEYS[1], 'status', 'deferred', ARGV[4], ARGV[5])
redis.call('zadd', KEYS[2], ARGV[2], ARGV[3])
redis.call('sadd', KEYS[3], ARGV[3])
return 1
"""
)
# Set the job to CANCELED, remove it from the set of parked jobs (KEYS[4]), and let RQ's keys of the
# job (KEYS[1] to KEYS[3]) expire. ARGV: worker, meta, seconds to keep (-1: for ever), job id, mark.
_CANCEL = (
    _UNLESS_ANOTHERS
    + """
redis.call('hset', KEYS[1], 'status', 'canceled', 'meta', ARGV[2])
redis.call('hdel', KEYS[1], ARGV[5])
redis.call('srem', KEYS[4], ARGV[4])
for each = 1, 3 do
  if tonumber(ARGV[3]) >= 0 then redis.call('expire', KEYS[each], ARGV[3]) end
end
return 1
"""
)


class _NotRun(Retry):
    """Return value of a job that was not run. RQ does not store it as a result."""

    def __init__(self) -> None:
        super().__init__(max=sys.maxsize)


class ParkedJob(_NotRun):
    """Return value of a job that waits for its key, for a worker of this package."""


class CanceledJob(_NotRun):
    """Return value of a job that never runs, for a worker of this package.

    Attributes:
        why: "superseded", "revoked", "skipped", "missing", "ineligible" or "expired", for
            `job.meta["taskguard_line"]`.
    """

    def __init__(self, why: str) -> None:
        super().__init__()
        self.why = why


class RQParking:
    """Parks the delivered job."""

    queue = NAME

    def __init__(self, job: Job, message: MessageRef, function: GuardedFunction) -> None:
        self._job = job
        self._message = message
        self._function = function
        self._given = _arguments(job)

    def next_delivery(self, message: MessageRef, call: Mapping[str, Any]) -> Delivery | None:
        """Return the next delivery of the job, or None if its body did not change its arguments."""
        args, kwargs = _arguments(self._job)
        if (args, kwargs) == self._given:
            return None
        bound = getattr(self._job.func, "__self__", None)
        args = args if bound is None else (bound, *args)
        values: dict[str, Any] = {"namespace": runtime().namespace, "message": message}
        return self._function.delivery(args, kwargs, call=call, **values)

    def call(self) -> dict[str, Any] | None:
        """Return the job as a stored call, or None if this worker has to defer it."""
        if not getattr(self._job, _ALLOWED, False):
            return None
        return call_of(self._job, self._message)

    def send(self, call: Mapping[str, Any], message: MessageRef) -> None:
        """Enqueue a promoted job. Raises unless Redis stored it."""
        RQSender(self._job.connection).hand_off(dict(call), message)

    def failed(self, claim: Claim) -> None:
        """Note a failure. The worker reports later whether RQ retries the job."""
        setattr(self._job, _FAILED, (claim, self))


def _arguments(job: Job) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(job.args or ()), dict(job.kwargs or {})


def allow_parking(job: Job, *, rank: int = 0) -> None:
    """Note that the worker of this job understands a ParkedJob.

    `rank` is the number of queues that the worker reads before the queue of this job.
    """
    setattr(job, _ALLOWED, True)
    setattr(job, _RANK, rank)


def rank_of(job: Job) -> int:
    """Return the job's rank, which in RQ is the position of its queue. Lower ranks go first."""
    return int(getattr(job, _RANK, 0))


def never_runs(job: Job, dropped: Dropped, key: str) -> CanceledJob | None:
    """Return the value with which a dropped job becomes CANCELED.

    Return None, which is a result, if a live copy answers. Also return None if RQ uses the job for
    further messages: RQ schedules them only after a result. In a stock worker, raise
    SupersededError or WorkRevokedError, and return None for a job that the user chose to skip.
    """
    reason = dropped.reason_for_caller(key)
    if reason is None or is_used_again(job):
        return None
    if getattr(job, _ALLOWED, False):
        return CanceledJob(reason.partition(":")[0])
    error = _UNRUN_ERRORS.get(dropped.reason)
    if error is not None:
        raise error(f"{job.func_name}: job {job.id} never runs: {reason}.", key=key)
    return None


def expired(job: Job, delivery: Delivery) -> CanceledJob | None:
    """Cancel a job whose `ttl` ended while it waited for its key. Return None if it did not.

    If it did, promote the next message of the line. In a stock worker, raise MessageTooOldError.
    Also raises the ledger's errors.
    """
    if not _has_expired(job, delivery):
        return None
    runtime().runner.counting.unrun(delivery, Ended.EXPIRED)
    runtime().runner.never_runs(delivery)
    said = f"{job.func_name}: job {job.id} waited for {delivery.key} until its ttl was over"
    if not getattr(job, _ALLOWED, False):
        take_out(job, WAITS)
        job.retries_left = 0  # otherwise RQ would retry after the error
        raise errors.MessageTooOldError(f"{said}. It never runs.", key=delivery.key)
    logger.warning("%s; it is CANCELED, and never runs", said)
    return CanceledJob(EXPIRED)


def _has_expired(job: Job, delivery: Delivery) -> bool:
    ledger, message = runtime().ledger, delivery.message
    if ledger is None or delivery.work is None:
        return False
    # With the message's current number, so that the job runs if it is enqueued again later.
    expire = functools.partial(ledger.expire, message=message, retries=message.retries, due=True)
    request = ledger.of_run(runtime().runner.request(delivery))
    ended = [expire(work) for work in (str(request.work), *delivery.formerly)]
    if any(ended):
        return True
    found = ledger.view(str(request.work))
    if found is None or found.error != WORK_EXPIRED or found.message != message.name:
        return False
    # The process that expired the work may have died before it recorded that in RQ. If Redis was
    # emptied, the job can be in its queue twice. A job that was enqueued after the expiry runs.
    return delivery.promoted or sent_before(job, found.finished_s)


def cancel(job: Job, why: str, worker_name: str, pipeline: Pipeline, *, ttl_s: int) -> None:
    """Set a job to CANCELED, unless it was deleted, cancelled or started again meanwhile.

    `ttl_s` is how long RQ keeps the record, in seconds: 0 deletes it now, -1 keeps it for ever.
    Jobs that depend on this one go on waiting.
    """
    meta = job.serializer.dumps({**job.meta, LINE_META: why})
    keys = (job.key, job.dependents_key, job.dependencies_key, PARKED_KEY)
    pipeline.eval(_CANCEL, len(keys), *keys, worker_name, meta, ttl_s, job.id, LINE)


def refuse_used_again(job: Job, function: GuardedFunction, *, named: bool) -> None:
    """Raise ConfigurationError for a job whose messages cannot be told apart in a line.

    `named` is True if `message_id=` tells them apart.
    """
    policy = function.policy
    if policy.newest is not None and is_used_again(job):
        reason = "taskguard cannot tell when each of them was sent, or which of them was superseded"
    elif policy.parks and is_of_rq_scheduler(job) and not named:
        reason = "taskguard would take a promoted message for another one of the job"
    else:
        return
    raise errors.ConfigurationError(
        f'{function.name} has busy="{policy.busy}", but RQ uses job {job.id} for several messages '
        f"(Repeat, rq-scheduler): {reason}. The body did not run. Enqueue a new job for each "
        'message, as `rq cron` does, or set busy="retry".'
    )


def refuse_rate_limit(job: Job, function: GuardedFunction) -> None:
    """Raise ConfigurationError for a job with RQ's own `rate_limit`."""
    if getattr(job, "has_rate_limit", False):
        raise errors.ConfigurationError(
            f'{function.name} has busy="{function.policy.busy}", but job {job.id} has a rate_limit '
            "of RQ: once promoted, it would wait for RQ's slot and block its key. The body did not "
            'run. Enqueue the job without rate_limit=, or set busy="retry".'
        )


def refuse_unkept(job: Job, name: str) -> None:
    """Raise ConfigurationError for a job that could lose its position in a strict line."""
    if not getattr(job, _ALLOWED, False):
        raise errors.ConfigurationError(
            f'{name} has order="strict", but job {job.id} was delivered by a stock worker, which '
            "does not report whether RQ retries a failed job: the line would wait for it. The body "
            "did not run. Use taskguard_rq.GuardedWorker, or a class with GuardedWorkerMixin, for "
            'this queue, or set order="best_effort".'
        )
    if job.ttl is not None:
        raise errors.ConfigurationError(
            f'{name} has order="strict", but job {job.id} has a ttl: RQ would delete it without '
            "notice while other messages wait behind it. The body did not run. Enqueue the job "
            'without ttl=, or set order="best_effort".'
        )


def tell_line(job: Job, *, in_s: float) -> None:
    """Tell the line whether RQ retries a job whose work failed in it. Never raises.

    Read the job object of this process, because another worker may have begun the job by now.
    `in_s` is the delay of the retry in seconds. All deliveries of a job have one number, because a
    job has no copies. So a retry runs, and so does a job that a person requeues.
    """
    failed = vars(job).pop(_FAILED, None)
    if failed is None:
        if not vars(job).pop(_REACHED, False) and job.get_status(refresh=False) == JobStatus.FAILED:
            _end_unreached(job)
        return
    claim, parking = failed
    try:
        here, message = runtime(), claim.message
        runner, app, retries = here.runner, here.namespace, message.retries
        if job.get_status(refresh=False) in _COMES_AGAIN:
            call = call_of(job, message)
            again = parking.next_delivery(message, call)
            runner.retried(
                claim, parking, retries=retries, call=call, again=again, app=app, in_s=in_s
            )
        else:
            runner.gave_up(claim, parking, retries=retries, app=app)
    except Exception:
        logger.exception(
            "%s: the ledger did not record whether RQ retries job %s", claim.work, job.id
        )


def note_reached(job: Job) -> None:
    """Note that the job's guard was called: from here on, the guard decides about its work."""
    setattr(job, _REACHED, True)


def _end_unreached(job: Job) -> None:
    """End the work of a job that failed in a decorator outside its guard. Never raises.

    Otherwise a sweep or the relay would send it many times more, and other messages would wait for
    it. If the job's function cannot be imported, its work is unknown and nothing happens.
    """
    try:
        function = guarded_function_of(job.func)
        ledger = runtime().ledger
        if function is None or ledger is None:
            return
        marks = marks_of(job)
        message = message_of(job, message_id=message_id_of(job.func), marks=marks)
        parking = RQParking(job, message, function)
        again: dict[str, Any] = {
            "namespace": runtime().namespace,
            "message": message,
            "parking": parking,
        }
        bound = getattr(job.func, "__self__", None)
        args, kwargs = _arguments(job)
        args = args if bound is None else (bound, *args)
        delivery = function.delivery(args, kwargs, promoted=marks.line == PROMOTED, **again)
        if delivery.work is None:
            return
        error = "it failed before its guard"
        end = functools.partial(ledger.expire, message=message, retries=message.retries)
        request = ledger.of_run(runtime().runner.request(delivery))
        ended = [end(work, error=error) for work in (str(request.work), *delivery.formerly)]
        take_out(job, marks.line)
        if delivery.parking is not None and (any(ended) or delivery.promoted):
            runtime().runner.never_runs(delivery)
    except Exception as failed:  # noqa: BLE001  # the function and its arguments can raise anything
        logger.warning("job %s: its failure was not recorded: %s", job.id, failed)


def take_out(job: Job, line: str) -> None:
    """Remove the notes on a job that it waits in a line (`line`) or that it never runs."""
    if not line and LINE_META not in job.meta:
        return
    with job.connection.pipeline() as pipeline:
        pipeline.srem(PARKED_KEY, job.id)
        set_mark(job, LINE, None, pipeline)
        if job.meta.pop(LINE_META, None):
            pipeline.hset(job.key, "meta", job.serializer.dumps(job.meta))
        pipeline.execute()


def defer_in_registry(job: Job, worker_name: str, pipeline: Pipeline) -> None:
    """Set a job to DEFERRED, unless it was promoted or cancelled meanwhile.

    In that case another execution has begun, or the record's status has changed.
    """
    registry = DeferredJobRegistry(job.origin, connection=job.connection)
    keys = (job.key, registry.key, PARKED_KEY)
    pipeline.eval(_DEFER, len(keys), *keys, worker_name, time.time(), job.id, LINE, WAITS)
