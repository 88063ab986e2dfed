"""`busy="park"` for RQ: a job leaves its queue for the ledger, and comes back before all others.

Guarantees: what is sent again is the same job, by its record, which does not expire meanwhile.
While it waits RQ says DEFERRED, and lists it in that registry of its queue. It is put off instead
where the worker is none of this package's: such a one can be told that a job has ended, has failed
or is to be tried again, and no more. There it overtakes nobody who waits. With `order="strict"`
that is refused, and so is a job with a `ttl`. A strict job that has failed keeps its place until RQ
has said whether it comes again.

A job that never runs ends as CANCELED: a newer job took its place (`busy="latest"`, `"supersede"`),
its work was revoked, it was skipped, or its `ttl` was over while it waited (`expiry.py`). Its
record says why for as long as that of a finished job. RQ's registry of cancelled jobs, which
it never cleans, does not list it. A worker of another package says FAILED, or FINISHED where the
user chose to skip the job.

Who is called comes to the front of its queue: at the end it would stand behind all that have to be
parked before.

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
from taskguard.integration import Claim, Delivery, Dropped, GuardedFunction, MessageRef
from taskguard_rq.calls import (
    EXPIRED,
    LINE_META,
    NAME,
    PARKED_KEY,
    RQSender,
    call_of,
)
from taskguard_rq.expiry import sent_before
from taskguard_rq.marks import CALLED, LINE, WAITS, marks_of, set_mark
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
# An attribute of a job whose work has failed, and keeps its place in its key's line.
_FAILED = "_taskguard_failed"
# Errors for workers of other packages, for jobs that the user did not choose to skip.
_UNRUN_ERRORS = {"outdated": errors.SupersededError, "revoked": errors.WorkRevokedError}
# An attribute of a job whose guard was called.
_REACHED = "_taskguard_reached"
# RQ has put the job into its queue, or into its schedule, once more.
_COMES_AGAIN = (JobStatus.QUEUED, JobStatus.SCHEDULED)

# Of a job whose execution by this worker ends. Its record is the first key, the worker comes first.
_UNLESS_ANOTHERS = """
if redis.call('hget', KEYS[1], 'status') ~= 'started'
    or redis.call('hget', KEYS[1], 'worker_name') ~= ARGV[1] then
  return 0
end
"""
# It is DEFERRED, in the registry, and noted as parked, in the set; then come the time, its id, and
# a mark with its value.
_DEFER = (
    _UNLESS_ANOTHERS
    + """
redis.call('hset', KEYS[1], 'status', 'deferred', ARGV[4], ARGV[5])
redis.call('zadd', KEYS[2], ARGV[2], ARGV[3])
redis.call('sadd', KEYS[3], ARGV[3])
return 1
"""
)
# It is CANCELED, noted as parked no more, and forgotten later. Keys are that set, after all that RQ
# keeps of it; then come its meta, for how many seconds, -1 for ever, its id, and the mark.
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
    """What a job that was not run returns: RQ takes it for no result."""

    def __init__(self) -> None:
        super().__init__(max=sys.maxsize)


class ParkedJob(_NotRun):
    """What a job that waits for its key returns to a worker of this package."""


class CanceledJob(_NotRun):
    """What a job that never runs returns to a worker of this package.

    Attributes:
        why: "superseded", "revoked", "skipped", "missing", "ineligible" or "expired", for
            `job.meta["taskguard_line"]`.
    """

    def __init__(self, why: str) -> None:
        super().__init__()
        self.why = why


class RQParking:
    """How the job in hand is parked."""

    queue = NAME

    def __init__(self, job: Job, message: MessageRef, function: GuardedFunction) -> None:
        self._job = job
        self._message = message
        self._function = function
        self._given = _arguments(job)

    def next_delivery(self, message: MessageRef, call: Mapping[str, Any]) -> Delivery | None:
        """The next delivery of the job; None if its body left its arguments as they were."""
        args, kwargs = _arguments(self._job)
        if (args, kwargs) == self._given:
            return None
        bound = getattr(self._job.func, "__self__", None)
        args = args if bound is None else (bound, *args)
        values: dict[str, Any] = {"namespace": runtime().namespace, "message": message}
        return self._function.delivery(args, kwargs, call=call, **values)

    def call(self) -> dict[str, Any] | None:
        """The job in hand as a stored call; None where it is to be put off."""
        if not getattr(self._job, _ALLOWED, False):
            return None
        return call_of(self._job, self._message)

    def send(self, call: Mapping[str, Any], message: MessageRef) -> None:
        """Put a stored job into its queue; raises unless Redis took it."""
        RQSender(self._job.connection).hand_off(dict(call), message)

    def failed(self, claim: Claim) -> None:
        """Wait for the worker to say whether RQ tries the job again."""
        setattr(self._job, _FAILED, (claim, self))


def _arguments(job: Job) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(job.args or ()), dict(job.kwargs or {})


def allow_parking(job: Job, *, rank: int = 0) -> None:
    """Note that the worker which begins a job knows what a ParkedJob is.

    `rank`: how many of the worker's queues it looks into before this job's.
    """
    setattr(job, _ALLOWED, True)
    setattr(job, _RANK, rank)


def rank_of(job: Job) -> int:
    """Its place by priority, which in RQ is that of its queue; lower ones go first."""
    return int(getattr(job, _RANK, 0))


def never_runs(job: Job, dropped: Dropped, key: str) -> CanceledJob | None:
    """Return what a job returns that its delivery has dropped: the job becomes CANCELED.

    Return None, which is a result, if a live copy answers. Do the same if RQ uses the job for
    further messages: RQ schedules them only after a result. In a worker of another package, raise
    SupersededError or WorkRevokedError, and return None for a job that the user chose to skip.
    """
    told = dropped.told(key)
    if told is None or is_used_again(job):
        return None
    if getattr(job, _ALLOWED, False):
        return CanceledJob(told.partition(":")[0])
    error = _UNRUN_ERRORS.get(dropped.reason)
    if error is not None:
        raise error(f"{job.func_name}: job {job.id} never runs: {told}.", key=key)
    return None


def expired(job: Job, delivery: Delivery) -> CanceledJob | None:
    """What a job returns whose `ttl` was over while it waited for its key; None: it was not.

    The next in line is called. Raises MessageTooOldError to workers of others, and what the ledger
    raises.
    """
    if not _has_expired(job, delivery):
        return None
    runtime().runner.never_runs(delivery)
    said = f"{job.func_name}: job {job.id} waited for {delivery.key} until its ttl was over"
    if not getattr(job, _ALLOWED, False):
        take_out(job, WAITS)
        job.retries_left = 0  # or RQ would take what is raised for a failed attempt
        raise errors.MessageTooOldError(f"{said}. It never runs.", key=delivery.key)
    logger.warning("%s; it is CANCELED, and never runs", said)
    return CanceledJob(EXPIRED)


def _has_expired(job: Job, delivery: Delivery) -> bool:
    ledger, message = runtime().ledger, delivery.message
    if ledger is None or delivery.work is None:
        return False
    # By its number as it is: a job that is enqueued again after this is run.
    expire = functools.partial(ledger.expire, message=message, retries=message.retries, due=True)
    ended = [expire(work) for work in (delivery.work, *delivery.formerly)]
    if any(ended):
        return True
    found = ledger.view(delivery.work)
    if found is None or found.error != WORK_EXPIRED or found.message != message.name:
        return False
    # Whoever said so first may have died before RQ heard of it. And the job may stand in its queue
    # more than once, if its Redis was emptied, and it was sent again: what was enqueued later runs.
    return delivery.called or sent_before(job, found.finished_s)


def cancel(job: Job, why: str, worker_name: str, pipeline: Pipeline, *, ttl_s: int) -> None:
    """Let RQ show for so long that a job never runs, unless it was deleted or cancelled meanwhile.

    `ttl_s`: as RQ has it: 0 for no time, and -1 for ever. Jobs that depend on it go on waiting.
    """
    meta = job.serializer.dumps({**job.meta, LINE_META: why})
    keys = (job.key, job.dependents_key, job.dependencies_key, PARKED_KEY)
    pipeline.eval(_CANCEL, len(keys), *keys, worker_name, meta, ttl_s, job.id, LINE)


def refuse_used_again(job: Job, function: GuardedFunction, *, named: bool) -> None:
    """Raise ConfigurationError for a job whose messages would not be told apart in a line.

    `named`: they are by `message_id=`.
    """
    policy = function.policy
    if policy.newest is not None and is_used_again(job):
        reason = "nobody knows when each of them was sent, nor what becomes of the others"
    elif policy.parks and is_of_rq_scheduler(job) and not named:
        reason = "one that waits for its key looks like another one when it is called"
    else:
        return
    raise errors.ConfigurationError(
        f'{function.name} has busy="{policy.busy}", and job {job.id} is used for several messages '
        f"(Repeat, rq-scheduler): {reason}. Nothing was run. Let each be a job of its own, as "
        '`rq cron` does, or say busy="retry".'
    )


def refuse_rate_limit(job: Job, function: GuardedFunction) -> None:
    """Raise ConfigurationError for a job that RQ itself lets wait."""
    if getattr(job, "has_rate_limit", False):
        raise errors.ConfigurationError(
            f'{function.name} has busy="{function.policy.busy}", and job {job.id} a rate_limit of '
            "RQ: while it waits for its key it would have to give up its slot, and would stand in "
            "RQ's line again when its turn has come, which holds up its key. Nothing was run. "
            'Enqueue it without rate_limit=, or say busy="retry".'
        )


def refuse_unkept(job: Job, name: str) -> None:
    """Raise ConfigurationError for a job whose place in a strict line could not be kept."""
    if not getattr(job, _ALLOWED, False):
        raise errors.ConfigurationError(
            f'{name} has order="strict", and job {job.id} was delivered by no worker of this '
            "package: nobody would say whether RQ tries it again once it has failed, and its line "
            "would wait for it. Nothing was run. Let taskguard_rq.GuardedWorker, or a class with "
            'GuardedWorkerMixin, consume from this queue, or say order="best_effort".'
        )
    if job.ttl is not None:
        raise errors.ConfigurationError(
            f'{name} has order="strict", and job {job.id} a ttl: RQ would delete it without a word '
            "while others wait behind it. Nothing was run. Enqueue it without ttl=, or say "
            'order="best_effort".'
        )


def tell_line(job: Job, *, in_s: float) -> None:
    """Say what RQ has made of a job whose work has failed, and keeps its place. Never raises.

    By the job as RQ has left it in this process: another one may have begun it by now. `in_s`: so
    long after now it comes, if it does. All its deliveries have one number, as there are no copies
    of a job: so a retry is run, and so is what somebody requeues by hand.
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
        logger.exception("%s: what RQ has made of its job %s is not noted", claim.work, job.id)


def note_reached(job: Job) -> None:
    """Note that the job's guard was called: from now on that says what becomes of its work."""
    setattr(job, _REACHED, True)


def _end_unreached(job: Job) -> None:
    """End the work of a job that failed before its guard, in a decorator over it. Never raises.

    It would be sent, and fail, many times more, and others would wait for it. Of a job whose
    function cannot be imported the work is not known.
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
        delivery = function.delivery(args, kwargs, called=marks.line == CALLED, **again)
        if delivery.work is None:
            return
        error = "it failed before its guard"
        end = functools.partial(ledger.expire, message=message, retries=message.retries)
        ended = [end(work, error=error) for work in (delivery.work, *delivery.formerly)]
        take_out(job, marks.line)
        if delivery.parking is not None and (any(ended) or delivery.called):
            runtime().runner.never_runs(delivery)
    except Exception as failed:  # noqa: BLE001  # anybody's function, or its arguments
        logger.warning("job %s: its failure was not recorded: %s", job.id, failed)


def take_out(job: Job, line: str) -> None:
    """Let it be one of its own queue again, if it stood in line (`line`), or never was to run."""
    if not line and LINE_META not in job.meta:
        return
    with job.connection.pipeline() as pipeline:
        pipeline.srem(PARKED_KEY, job.id)
        set_mark(job, LINE, None, pipeline)
        if job.meta.pop(LINE_META, None):
            pipeline.hset(job.key, "meta", job.serializer.dumps(job.meta))
        pipeline.execute()


def defer_in_registry(job: Job, worker_name: str, pipeline: Pipeline) -> None:
    """Let RQ show that a job waits, unless it was called, or cancelled, meanwhile.

    Its record says so: another execution has begun, or its status is no longer that of this one.
    """
    registry = DeferredJobRegistry(job.origin, connection=job.connection)
    keys = (job.key, registry.key, PARKED_KEY)
    pipeline.eval(_DEFER, len(keys), *keys, worker_name, time.time(), job.id, LINE, WAITS)
