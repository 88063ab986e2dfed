"""An RQ job as JSON, to be stored with its work and put into its queue again later.

Guarantees: id, time of creation, queue, arguments, time-outs, callbacks and meta stay. The
arguments are as the job's serializer wrote them, and are not read here. A job whose record is still
in Redis is put into its queue by that record, unless that says that it was cancelled or stopped.
"""

from __future__ import annotations

import base64
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from redis import Redis
from redis.client import Pipeline
from rq import Queue
from rq.exceptions import InvalidJobOperation
from rq.job import Job, JobStatus

from taskguard import MessageRef

__all__ = ["NAME", "RQSender", "call_of"]

logger = logging.getLogger("taskguard")

NAME = "rq"
# What a record says of executions is not the call's; what it depended on was met once.
_PASSING = frozenset(
    {"started_at", "ended_at", "last_heartbeat", "worker_name", "status"}
    | {"dependency_id", "dependency_ids"}
)


def call_of(job: Job) -> dict[str, Any]:
    """A job, as JSON."""
    record = job.to_dict(include_meta=True, include_result=False)
    fields = {name: value for name, value in record.items() if name not in _PASSING}
    encoded = {name: _text(value) for name, value in fields.items()}
    return {"queue": NAME, "id": job.id, "fields": encoded, "serializer": _path(job.serializer)}


def _path(serializer: Any) -> str | None:
    """As `Queue(serializer=…)` takes it; None where it has no name of its own."""
    name = getattr(serializer, "__qualname__", None)
    return None if name is None or "<" in name else f"{serializer.__module__}.{name}"


def _text(value: Any) -> str:
    raw = value if isinstance(value, bytes) else str(value).encode()
    return base64.b64encode(raw).decode()


class RQSender:
    """Puts stored jobs into their queues again.

    Args:
        connection: the Redis of the queues.
        serializer: as the queues have it; by default what the job was written by.
    """

    def __init__(self, connection: Redis, *, serializer: Any = None) -> None:
        self._connection = connection
        self._serializer = serializer

    def __call__(self, call: dict[str, Any], message: MessageRef) -> None:
        """Put a job into its queue; raises unless Redis took it."""
        del message  # RQ numbers nothing: executions of a job share one record
        self._put_all([call], self._serializer_of(call))

    @contextmanager
    def batch(self) -> Iterator[Callable[[dict[str, Any], MessageRef], None]]:
        """A sender of many: they are put into their queues together, where the block ends.

        Raises there unless Redis took them all.
        """
        calls: dict[Any, list[dict[str, Any]]] = {}

        def send(call: dict[str, Any], message: MessageRef) -> None:
            del message
            calls.setdefault(self._serializer_of(call), []).append(call)

        yield send
        for serializer, those in calls.items():
            self._put_all(those, serializer)

    def _serializer_of(self, call: dict[str, Any]) -> Any:
        return self._serializer or call.get("serializer")

    def _put_all(self, calls: Sequence[dict[str, Any]], serializer: Any) -> None:
        ids = [call["id"] for call in calls]
        records = Job.fetch_many(ids, connection=self._connection, serializer=serializer)
        with self._connection.pipeline(transaction=len(calls) == 1) as pipeline:
            queue_of = _queues(self._connection, serializer)
            for call, record in zip(calls, records, strict=True):
                job = record or self._restored(call, serializer)
                _put(job, queue_of(job.origin), pipeline)
            pipeline.execute()

    def _restored(self, call: dict[str, Any], serializer: Any) -> Job:
        job = Job(call["id"], connection=self._connection, serializer=serializer)
        job.restore({name: base64.b64decode(text) for name, text in call["fields"].items()})
        return job


def _queues(connection: Redis, serializer: Any) -> Callable[[str], Queue]:
    """Each once: a queue asks Redis for its version before its first job."""
    return cache(partial(Queue, connection=connection, serializer=serializer))


def _put(job: Job, queue: Queue, pipeline: Pipeline) -> None:
    status = job.get_status(refresh=False)
    if status in (JobStatus.CANCELED, JobStatus.STOPPED):
        logger.warning("job %s is %s, so it is not enqueued again", job.id, status.value)
        return
    if status is JobStatus.FAILED:
        with contextlib.suppress(InvalidJobOperation):  # the registry has forgotten it
            job.requeue()  # takes it out of the registry of failed ones, too
            return
    # What waits for others, or for its turn, asks Redis before it is put anywhere.
    depends = job._dependency_ids  # noqa: SLF001  # `dependency_ids` asks Redis for each job
    asks = bool(depends) or getattr(job, "has_rate_limit", False)
    queue.enqueue_job(job, pipeline=None if asks else pipeline)
