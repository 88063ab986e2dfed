"""Tell guarded functions from others, and one message of a job from another."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from rq.job import Job

from taskguard.integration import GuardedFunction, MessageRef
from taskguard_rq.marks import Marks
from taskguard_rq.redelivery import is_of_rq_scheduler

__all__ = [
    "guarded_function_of",
    "layers_of",
    "message_id_of",
    "message_of",
    "note_guard",
    "plain",
]

logger = logging.getLogger("taskguard")

_MARK = "__taskguard_job__"
_MESSAGE_ID = "__taskguard_message_id__"


def note_guard(
    function: Any, compiled: GuardedFunction, *, message_id: Callable[[Job], str] | None
) -> None:
    """Note on a function what `@guarded_job` made of it."""
    setattr(function, _MARK, compiled)
    setattr(function, _MESSAGE_ID, message_id)


def guarded_function_of(function: Callable[..., Any]) -> GuardedFunction | None:
    """Return what `@guarded_job` made of a function, or None if it is not guarded."""
    return _marked(function, _MARK)  # type: ignore[no-any-return]


def message_id_of(function: Callable[..., Any]) -> Callable[[Job], str] | None:
    """Return the `message_id=` of a guarded function."""
    return _marked(function, _MESSAGE_ID)  # type: ignore[no-any-return]


def _marked(function: Any, name: str) -> Any:
    for layer in layers_of(function):
        found = vars(layer).get(name) if hasattr(layer, "__dict__") else None
        if found is not None:
            return found
    return None


def plain(function: Any) -> Any:
    """Return the function of a bound method: that is what was decorated."""
    return getattr(function, "__func__", function)


def layers_of(function: Any) -> Iterator[Any]:
    """Yield a function and those that it wraps, outermost first."""
    function = plain(function)
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def message_of(
    job: Job, *, message_id: Callable[[Job], str] | None = None, marks: Marks | None = None
) -> MessageRef:
    """Return the identity of a job's message: `Repeat` uses the job again, a requeue does not."""
    marks = marks or Marks()
    return MessageRef(
        id=_default_id(job) if message_id is None else message_id(job),
        deferrals=marks.deferrals,
        tick=marks.tick,
    )


def _default_id(job: Job) -> str:
    if is_of_rq_scheduler(job):
        # rq-scheduler enqueues one job each time. Only the time of enqueueing changes.
        _warn_of_rq_scheduler(job.func_name)
        return f"{job.id}@{_seconds(job.enqueued_at or job.created_at)}"
    repeats = "" if job.repeats_left is None else f"~{job.repeats_left}"
    return f"{job.id}@{_seconds(job.created_at)}{repeats}"


def _seconds(when: datetime) -> str:
    return f"{when.timestamp():.6f}"


@functools.cache
def _warn_of_rq_scheduler(name: str) -> None:
    logger.warning(
        "%s comes from rq-scheduler, which uses one job for all its messages. taskguard tells them "
        "apart by when they were enqueued. A message that is enqueued twice counts as two. Set "
        "message_id= in @guarded_job if the job has a better id.",
        name,
    )
