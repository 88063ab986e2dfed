"""The marks of an RQ job: facts that taskguard stores in fields of the job's record.

`job.meta` belongs to the user: a body, a callback or a job class may replace it. So each mark is a
separate field of the job's hash in Redis. RQ keeps such fields, and deletes them with the hash.

Guarantees: a job keeps its marks over retries, deferrals and requeues, and while it waits for its
key.

Read next: `calls.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import Context
from dataclasses import dataclass
from typing import Any, cast

import rq.job
from redis import Redis
from redis.client import Pipeline
from rq.job import Job

__all__ = [
    "DEFERRALS",
    "LINE",
    "PROMOTED",
    "TICK",
    "WAITS",
    "Marks",
    "StoredJob",
    "marks_of",
    "outside",
    "set_mark",
]

DEFERRALS = "taskguard_deferrals"
LINE = "taskguard_line"
TICK = "taskguard_tick"
WAITS, PROMOTED = "waits", "promoted"


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of one job.

    Attributes:
        deferrals: how often it was deferred.
        tick: the tick of a schedule that it was enqueued for, or "".
        line: WAITS or PROMOTED for a job in the line of its key, "" for any other.
    """

    deferrals: int = 0
    tick: str = ""
    line: str = ""

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Marks:
        """Return the marks among the fields of a record."""
        return cls(
            deferrals=int(fields.get(DEFERRALS) or 0),
            tick=_text(fields.get(TICK)),
            line=_text(fields.get(LINE)),
        )

    def fields(self) -> dict[str, Any]:
        """Return the fields for a new record. They have no `line`: a new record is in none."""
        given = {DEFERRALS: self.deferrals, TICK: self.tick}
        return {name: value for name, value in given.items() if value}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")


def marks_of(job: Job) -> Marks:
    """Read the marks of a job from its record."""
    names = (DEFERRALS, TICK, LINE)
    found = job.connection.hmget(job.key, names)
    return Marks.read(dict(zip(names, found, strict=True)))


def set_mark(job: Job, name: str, value: Any, pipeline: Pipeline | None = None) -> None:
    """Write one mark, or remove it if `value` is None."""
    to = job.connection if pipeline is None else pipeline
    if value is None:
        to.hdel(job.key, name)
    else:
        to.hset(job.key, name, value)


class StoredJob(Job):
    """A job as read from its record, for enqueueing it again.

    Guarantees: the record keeps its own `meta`. Extensions of RQ can add to the `meta` of each job
    that is enqueued. Such additions are not written.

    Attributes:
        marks: its marks.
        is_lost: Redis has no record of it, so its marks are written with it.
        is_first: it is enqueued for the first time, so additions to `meta` are written.
    """

    marks = Marks()
    is_lost = is_first = False
    _meta: Any = None

    @classmethod
    def found(cls, job_id: str, connection: Redis, serializer: Any) -> StoredJob:
        """Read a job from its record. Raises NoSuchJobError."""
        return cast("StoredJob", cls.fetch(job_id, connection, serializer=serializer))

    @classmethod
    def all_found(
        cls, job_ids: list[str], connection: Redis, serializer: Any
    ) -> list[StoredJob | None]:
        """Read jobs from their records. Return None for each job without one."""
        found = cls.fetch_many(job_ids, connection=connection, serializer=serializer)
        return cast("list[StoredJob | None]", found)

    def restore(self, raw_data: Any) -> Any:
        """Restore the job and its marks."""
        fields = {_text(name): value for name, value in raw_data.items()}
        self._meta, self.marks = fields.get("meta"), Marks.read(fields)
        return super().restore(raw_data)

    def to_dict(self, include_meta: bool = True, include_result: bool = True) -> dict[str, Any]:
        """Return the job's fields with the record's `meta`, and its marks if the record is lost."""
        record = super().to_dict(include_meta=include_meta, include_result=include_result)
        if include_meta and not self.is_first:
            record.pop("meta", None)
            record |= {"meta": self._meta} if self._meta else {}
        return {**record, **self.marks.fields()} if self.is_lost else record


def outside(function: Any) -> Any:
    """Call a function outside the running job, in an empty `contextvars` context."""
    stack = getattr(rq.job, "_job_stack", None)  # RQ 3 uses a context variable instead
    if stack is not None:
        stack.push(None)
    try:
        return Context().run(function)
    finally:
        if stack is not None:
            stack.pop()
