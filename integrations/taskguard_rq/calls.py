"""Store an RQ job as JSON in the record of its work, and enqueue it from there.

Guarantees: a job keeps its id, time of creation, queue, arguments, timeouts, callbacks, `meta` and
marks (`marks.py`). It inherits nothing from a job that is running when it is enqueued. taskguard
does not read the arguments: they stay as the job's serializer wrote them.

If Redis still has the job's record, taskguard enqueues that, unless the job was cancelled or
stopped. If the record is gone, taskguard restores it, unless the job was deleted while it waited
for its key. To tell the two apart, the set PARKED_KEY in Redis has the ids of all waiting jobs: if
Redis loses its data, it loses the set as well.
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
from taskguard.integration import NOT_BEFORE, Existing, MessageRef
from taskguard_rq.expiry import kept_by_redis
from taskguard_rq.marks import LINE, PROMOTED, WAITS, Marks, StoredJob, outside, set_mark
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
    """A job of a queue with `is_async=False` failed in the process that enqueued it."""


LINE_META = "taskguard_line"
"""Key in `job.meta`: why the job never runs, for operators."""
EXPIRED = "expired"
PARKED_KEY = "taskguard:parked"
"""Set of the ids of jobs that wait for their key, in the queues' Redis."""

# Registries that can list a job that waits for its key, was deferred, or failed before its turn.
_REGISTRIES = (DeferredJobRegistry, ScheduledJobRegistry, FailedJobRegistry)
_WAITING = JobStatus.DEFERRED
_Calls = list[tuple[dict[str, Any], MessageRef]]
# Not stored: fields about one execution, and dependencies, because they were met before.
_PASSING = frozenset(
    {"started_at", "ended_at", "last_heartbeat", "worker_name", "status"}
    | {"dependency_id", "dependency_ids"}
)


def call_of(job: Job, message: MessageRef | None = None) -> dict[str, Any]:
    """Return a job as a JSON value, with the marks of its message."""
    record = job.to_dict(include_meta=True, include_result=False)
    fields = {name: value for name, value in record.items() if name not in _PASSING}
    if message is not None:
        fields |= Marks(deferrals=message.deferrals, tick=message.tick).fields()
    encoded = {name: _text(value) for name, value in fields.items()}
    return {"queue": NAME, "id": job.id, "fields": encoded, "serializer": _path(job.serializer)}


def _path(serializer: Any) -> str | None:
    """Return the serializer's import path for `Queue(serializer=…)`, or None without one."""
    name = getattr(serializer, "__qualname__", None)
    return None if name is None or "<" in name else f"{serializer.__module__}.{name}"


def _text(value: Any) -> str:
    raw = value if isinstance(value, bytes) else str(value).encode()
    return base64.b64encode(raw).decode()


def job_in(existing: Existing, sender: RQSender) -> Job:
    """Return the job of this work. Redis may not have its record yet."""
    if existing.call is not None:
        return sender.job_of(json.loads(existing.call))
    # `message_of()` joins the job's id and its time of creation.
    name, _, created = existing.message.rpartition("@")
    return Job(name if created else existing.message, connection=sender.connection)


class RQSender:
    """Enqueue stored jobs.

    Args:
        connection: the Redis of the queues.
        serializer: the queues' serializer. Default: the serializer that the job was stored with.
        is_async: False runs a job in the process that enqueues it, like `Queue(is_async=False)`.
            Default: True.
    """

    def __init__(self, connection: Redis, *, serializer: Any = None, is_async: bool = True) -> None:
        self.connection = connection
        self._serializer = serializer
        self._is_async = is_async

    def __call__(self, call: dict[str, Any], message: MessageRef) -> None:
        """Enqueue a job.

        Raises:
            CallWithdrawnError: the job was cancelled or stopped, or deleted while it waited.
            StoredCallError: the stored job cannot be read.
            JobFailedError: with `is_async=False`, the job ran in this process and failed.
            RedisError: Redis did not confirm that it stored the job.
        """
        outside(lambda: self._send(call, message))

    def send_first(self, call: dict[str, Any], message: MessageRef) -> None:
        """Enqueue a job for the first time, with the context of the running job."""
        self._send(call, message, is_first=True)

    def _send(self, call: dict[str, Any], message: MessageRef, *, is_first: bool = False) -> None:
        job = self._job_to_send(call)
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
            raise JobFailedError(
                f"its job {job.id} ran in this process and failed: see job.latest_result()"
            )

    def hand_off(self, call: dict[str, Any], message: MessageRef) -> None:
        """Enqueue a promoted job at the front of its queue, unless the queue has it already.

        Its dependencies were met before. Raises the errors that calling the sender raises.
        """
        del message  # its numbers are not needed: all executions of a job share one record
        self._put_at_front(call, lambda: self._job_to_send(call))

    def send_waiting(self, call: dict[str, Any]) -> None:
        """Enqueue a job at the front if it still waits for its key. Otherwise do nothing."""

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
            set_mark(job, LINE, PROMOTED, pipeline)

        outside(lambda: self.connection.transaction(put, Job.key_for(call["id"])))

    def _queue_of(self, job: Job) -> Queue:
        return Queue(job.origin, connection=self.connection, serializer=job.serializer)

    def _job_to_send(self, call: dict[str, Any]) -> StoredJob:
        """Read or restore the job. Raises CallWithdrawnError, StoredCallError."""
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
        """Collect jobs, and enqueue them together when the block ends.

        The end of the block raises RedisError unless Redis stored all of them, or if one of them
        was changed meanwhile.
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
        """Enqueue in one transaction the jobs that need no further reads. Return the others."""
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
        """Return the job of a stored call, without reading Redis. Raises StoredCallError."""
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
        """Return the current rate of a function, or None. Raises LookupError if it is unknown."""
        try:
            compiled = guarded_function_of(import_attribute(task))
        except Exception as error:
            raise LookupError(task) from error
        return None if compiled is None else compiled.policy.starts

    def is_away(self, error: Exception) -> bool:
        """Return True if the error is about the connection to Redis, not about one job."""
        return isinstance(error, (redis_errors.ConnectionError, redis_errors.TimeoutError, OSError))


def _is_requeued(job: Job) -> bool:
    """Requeue a failed job. Return False if RQ's registry of failed jobs no longer has it."""
    try:
        job.requeue()  # also removes it from the registry
    except InvalidJobOperation:
        return False
    return True


@contextmanager
def _withdrawn_ones_logged() -> Iterator[None]:
    """Log a withdrawn job. An error would make the caller send the whole batch again."""
    try:
        yield
    except errors.CallWithdrawnError as error:
        logger.warning("not enqueued again: %s", error)


def _is_early(call: dict[str, Any]) -> bool:
    """Return True if the job has a time, by the database's clock, before which it must not run."""
    return NOT_BEFORE in call


def _is_plain(job: StoredJob) -> bool:
    """Return True if the job has not ended, waits for nothing and needs no read of Redis."""
    ended = {JobStatus.CANCELED, JobStatus.STOPPED, JobStatus.FAILED}
    depends = job._dependency_ids  # noqa: SLF001  # `dependency_ids` reads Redis for each job
    waits = getattr(job, "has_rate_limit", False) or job.marks.line
    return not (job.get_status(refresh=False) in ended or depends or waits)
