"""An RQ job as JSON, to be stored with its work and put into its queue again later.

Guarantees: id, time of creation, queue, arguments, time-outs, callbacks, meta and marks stay
(`marks.py`); nothing of the job at work, in which this one is sent, gets into it. The
arguments are as the job's serializer wrote them, and are not read here. A job whose record is
still in Redis is put into its queue by that record, unless that says that it was cancelled or
stopped. One whose record is gone is restored, unless it was deleted while it waited for its key: of
each that waits Redis has a note beside its record, which it loses only together with that.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any

from redis import Redis
from redis import exceptions as redis_errors
from redis.client import Pipeline
from rq import Queue
from rq.exceptions import InvalidJobOperation, NoSuchJobError
from rq.job import Job, JobStatus
from rq.registry import DeferredJobRegistry, FailedJobRegistry, ScheduledJobRegistry
from rq.utils import import_attribute

from taskguard import errors
from taskguard.integration import NOT_BEFORE, MessageRef, Standing
from taskguard_rq.expiry import kept_by_redis
from taskguard_rq.marks import CALLED, LINE, WAITS, Marks, StoredJob, outside, set_mark
from taskguard_rq.recognition import guarded_function_of

__all__ = [
    "EXPIRED",
    "LINE_META",
    "NAME",
    "PARKED_KEY",
    "RQSender",
    "call_of",
    "job_in",
]

logger = logging.getLogger("taskguard")

NAME = "rq"


class JobFailedError(Exception):
    """A job of a queue with `is_async=False` ran where it was sent, and failed."""


LINE_META = "taskguard_line"
"""In `job.meta`, for people: why the job never runs."""
EXPIRED = "expired"
PARKED_KEY = "taskguard:parked"
"""The set of the ids of jobs that wait for their key, in the queues' Redis."""

# Where a job may stand that waits for its key, or was put off or given up before its turn.
_REGISTRIES = (DeferredJobRegistry, ScheduledJobRegistry, FailedJobRegistry)
_WAITING = JobStatus.DEFERRED
_Calls = list[tuple[dict[str, Any], MessageRef]]
# Fields about executions are not the call's; its dependencies have been met before.
_PASSING = frozenset(
    {"started_at", "ended_at", "last_heartbeat", "worker_name", "status"}
    | {"dependency_id", "dependency_ids"}
)


def call_of(job: Job, message: MessageRef | None = None) -> dict[str, Any]:
    """A job, as JSON, with the marks of its message."""
    record = job.to_dict(include_meta=True, include_result=False)
    fields = {name: value for name, value in record.items() if name not in _PASSING}
    if message is not None:
        fields |= Marks(deferrals=message.deferrals, tick=message.tick).fields()
    encoded = {name: _text(value) for name, value in fields.items()}
    return {"queue": NAME, "id": job.id, "fields": encoded, "serializer": _path(job.serializer)}


def _path(serializer: Any) -> str | None:
    """The serializer's name, as `Queue(serializer=…)` takes it; None if it has none."""
    name = getattr(serializer, "__qualname__", None)
    return None if name is None or "<" in name else f"{serializer.__module__}.{name}"


def _text(value: Any) -> str:
    raw = value if isinstance(value, bytes) else str(value).encode()
    return base64.b64encode(raw).decode()


def job_in(standing: Standing, sender: RQSender) -> Job:
    """The job that is to do this work; its record may not be in Redis yet."""
    if standing.call is not None:
        return sender.job_of(json.loads(standing.call))
    # `message_of()` made it: the id, and when the job was created.
    name, _, created = standing.message.rpartition("@")
    return Job(name if created else standing.message, connection=sender.connection)


class RQSender:
    """Puts stored jobs into their queues again.

    Args:
        connection: the Redis of the queues.
        serializer: the queues' serializer; by default the one by which the job was written.
        is_async: False: a job runs where it is sent, as in a queue with `is_async=False`.
    """

    def __init__(self, connection: Redis, *, serializer: Any = None, is_async: bool = True) -> None:
        self.connection = connection
        self._serializer = serializer
        self._is_async = is_async

    def __call__(self, call: dict[str, Any], message: MessageRef) -> None:
        """Put a job into its queue; raises unless Redis took it.

        Raises CallWithdrawnError for one that was cancelled or stopped, or deleted in its line, and
        JobFailedError for one that ran here, and failed.
        """
        outside(lambda: self._send(call, message))

    def send_first(self, call: dict[str, Any], message: MessageRef) -> None:
        """Put a job into its queue for the first time, as the job at work would."""
        self._send(call, message, is_first=True)

    def _send(self, call: dict[str, Any], message: MessageRef, *, is_first: bool = False) -> None:
        job = self._standing(call)
        if job.marks.line:
            self.hand_off(call, message)
            return
        job.is_first = is_first
        if job.get_status(refresh=False) is JobStatus.FAILED and _is_requeued(job):
            return
        queue = self._queue_of(job)
        if _is_early(call):
            queue.schedule_job(job, datetime.fromtimestamp(call[NOT_BEFORE], UTC))
            return
        if self._is_async:
            queue.enqueue_job(job)
            return
        here = Queue(
            job.origin, connection=self.connection, serializer=job.serializer, is_async=False
        )
        if here.enqueue_job(job).get_status() is JobStatus.FAILED:
            raise JobFailedError(f"its job {job.id} ran here, and failed: see its latest result")

    def hand_off(self, call: dict[str, Any], message: MessageRef) -> None:
        """Put a job whose turn has come before all others of its queue; raises as a call does.

        Not twice, if it is there. What it depends on has been met before.
        """
        del message  # without numbers: all executions of a job share one record
        self._put_at_front(call, lambda: self._standing(call))

    def send_waiting(self, call: dict[str, Any]) -> None:
        """The same for a job that waits for its key, before its turn; nothing for any other."""

        def waiting() -> StoredJob | None:
            with contextlib.suppress(NoSuchJobError):
                job = StoredJob.found(call["id"], self.connection, call.get("serializer"))
                if job.marks.line == WAITS and job.get_status(refresh=False) is _WAITING:
                    return job
            return None

        self._put_at_front(call, waiting)

    def _put_at_front(self, call: dict[str, Any], find: Callable[[], StoredJob | None]) -> None:
        def put(pipeline: Pipeline) -> None:
            job = find()
            if job is None:
                return
            queue = self._queue_of(job)
            status = job.get_status(refresh=False)
            if status is JobStatus.QUEUED and queue.get_job_position(job) is not None:
                return
            pipeline.multi()
            for registry in _REGISTRIES:
                registry(queue=queue).remove(job, pipeline=pipeline)
            pipeline.sadd(Queue.redis_queues_keys, queue.key)
            with kept_by_redis(job, pipeline):
                queue._enqueue_job(job, pipeline=pipeline, at_front=True)  # noqa: SLF001  # as its retry
            set_mark(job, LINE, CALLED, pipeline)

        outside(lambda: self.connection.transaction(put, Job.key_for(call["id"])))

    def _queue_of(self, job: Job) -> Queue:
        return Queue(job.origin, connection=self.connection, serializer=job.serializer)

    def _standing(self, call: dict[str, Any]) -> StoredJob:
        """The job by its record, or restored. Raises CallWithdrawnError, StoredCallError."""
        serializer = self._serializer or call.get("serializer")
        try:
            job = StoredJob.found(call["id"], self.connection, serializer)
        except NoSuchJobError:
            if self.connection.sismember(PARKED_KEY, call["id"]):
                self.connection.srem(PARKED_KEY, call["id"])
                raise errors.CallWithdrawnError(f"its job {call['id']} was deleted") from None
            return self._restored(call, serializer)
        status = job.get_status(refresh=False)
        if status in (JobStatus.CANCELED, JobStatus.STOPPED):
            self.connection.srem(PARKED_KEY, job.id)
            raise errors.CallWithdrawnError(f"its job {job.id} is {status.value}")
        return job

    @contextmanager
    def batch(self) -> Iterator[Callable[[dict[str, Any], MessageRef], None]]:
        """A sender of many jobs, which are put into their queues together when the block ends.

        Raises there unless Redis took them all, or if one of them was cancelled meanwhile.
        """
        calls: dict[str | None, _Calls] = {}
        yield lambda call, message: calls.setdefault(call.get("serializer"), []).append(
            (call, message)
        )
        for serializer, those in calls.items():
            together = partial(self._put_together, those, self._serializer or serializer)
            for call, message in outside(together):
                with _withdrawn_ones_logged():
                    self(call, message)

    def _put_together(self, calls: _Calls, serializer: Any) -> _Calls:
        """Enqueue the jobs that need nothing else in one transaction; returns the others."""
        others: _Calls = []
        queue_of = cache(partial(Queue, connection=self.connection, serializer=serializer))
        ids = [call["id"] for call, _ in calls]
        with self.connection.pipeline() as pipeline:
            pipeline.watch(*map(Job.key_for, ids))  # type: ignore[no-untyped-call]
            records = StoredJob.all_found(ids, self.connection, serializer)
            pipeline.multi()
            for (call, message), record in zip(calls, records, strict=True):
                job = record or self._restored(call, serializer)
                if _is_plain(job) and not _is_early(call):
                    queue_of(job.origin).enqueue_job(job, pipeline=pipeline)
                else:
                    others.append((call, message))
            pipeline.execute()
        return others

    def job_of(self, call: dict[str, Any]) -> Job:
        """The job of a stored call, whose record may be in Redis. Raises StoredCallError."""
        return self._restored(call, self._serializer or call.get("serializer"))

    def _restored(self, call: dict[str, Any], serializer: Any) -> StoredJob:
        try:
            job = StoredJob(call["id"], connection=self.connection, serializer=serializer)
            job.restore({name: base64.b64decode(text) for name, text in call["fields"].items()})
        except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
            raise errors.StoredCallError(f"its stored job cannot be read: {error!r}") from error
        job.is_lost = True
        return job

    def rate_of(self, task: str) -> Any:
        """Return the rate that a function has now; None: none. Raises LookupError if unknown."""
        try:
            compiled = guarded_function_of(import_attribute(task))
        except Exception as error:
            raise LookupError(task) from error
        return None if compiled is None else compiled.policy.starts

    def is_away(self, error: Exception) -> bool:
        """Whether the connection to Redis failed, not one queue or one job."""
        return isinstance(error, (redis_errors.ConnectionError, redis_errors.TimeoutError, OSError))


def _is_requeued(job: Job) -> bool:
    """Put a job that RQ gave up back; False if the registry of failed ones has forgotten it."""
    try:
        job.requeue()  # takes it out of that registry, too
    except InvalidJobOperation:
        return False
    return True


@contextmanager
def _withdrawn_ones_logged() -> Iterator[None]:
    """An error in a batch would send all of it once more."""
    try:
        yield
    except errors.CallWithdrawnError as error:
        logger.warning("not enqueued again: %s", error)


def _is_early(call: dict[str, Any]) -> bool:
    """Whether the job is to wait in the schedule: its time, by the database's clock, is to come."""
    return NOT_BEFORE in call


def _is_plain(job: StoredJob) -> bool:
    """Whether the job is enqueued without reading Redis: not ended, and waiting for no other."""
    ended = {JobStatus.CANCELED, JobStatus.STOPPED, JobStatus.FAILED}
    depends = job._dependency_ids  # noqa: SLF001  # `dependency_ids` asks Redis for each job
    waits = getattr(job, "has_rate_limit", False) or job.marks.line
    return not (job.get_status(refresh=False) in ended or depends or waits)
