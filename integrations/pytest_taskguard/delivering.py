"""Deliver one message of a task as often as a test wants, in the test's process.

A Celery task runs by `.apply()`, with its id, retries, `bind` and `autoretry_for`. An RQ job is a
real `Job` in a Redis in memory, performed here. A function under `@tg.guarded` is called.

Guarantees: all deliveries of a `Message` have one identity, as in a queue. A plain function has no
message, so with `once_per="message"` each call is work of its own. Time limits, acknowledgements
and delays of brokers and workers do not apply.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["Message"]

_numbers = itertools.count(1)


class Message:
    """A message of `task` with its arguments. Call `deliver()` as often as you like."""

    def __init__(
        self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.id = f"test-{os.getpid()}-{next(_numbers)}"
        self._deliver = _way_of(task, self.id, tuple(args), dict(kwargs or {}))

    def deliver(self) -> Any:
        """Deliver the message. Return what its caller gets, or raise the task's error."""
        return self._deliver()


def _way_of(
    task: Any, message: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any]:
    # A test with a Celery task or an RQ job has imported its package.
    if "taskguard_celery" in sys.modules:
        from celery import Task

        if isinstance(task, Task):
            return _celery_message(task, message, args, kwargs)
    if "taskguard_rq" in sys.modules:
        from taskguard_rq import guarded_function_of

        if guarded_function_of(task) is not None:
            return _job(task, message, args, kwargs)
    if not callable(task):
        raise TypeError(f"{task!r} is neither a Celery task, an RQ job nor a function.")
    return lambda: task(*args, **kwargs)


def _celery_message(
    task: Any, message: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any]:
    from celery.signals import task_prerun

    # `.apply()` runs retries at once, so a later delivery is one of the last retry's message.
    begun = 0

    def note(task_id: str | None = None, task: Any = None, **_: Any) -> None:
        nonlocal begun
        if task_id == message:
            begun = task.request.retries

    def apply() -> Any:
        task_prerun.connect(note)
        try:
            return task.apply(args, kwargs, task_id=message, retries=begun).get()
        finally:
            task_prerun.disconnect(note)

    return apply


def _job(
    function: Callable[..., Any], message: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any]:
    import fakeredis  # RQ's jobs need a Redis
    from rq.job import Job

    redis = fakeredis.FakeRedis()
    Job.create(function, args, kwargs, id=message, origin="tests", connection=redis).save()

    def perform() -> Any:
        return Job.fetch(message, connection=redis).perform()

    return perform
