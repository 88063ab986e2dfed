"""An application that tells a task for which request it runs.

One handler puts the request's id into each published message. Another one takes it from a message
before it runs. Celery's workers of the shop have both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from celery.signals import before_task_publish, celeryd_init, task_prerun

__all__ = ["request_id", "requests"]

request_id: ContextVar[str] = ContextVar("request_id", default="")


def _put(headers: dict[str, Any], **_: Any) -> None:
    headers["request_id"] = request_id.get()


def _take(task: Any, **_: Any) -> None:
    request_id.set((task.request.headers or {}).get("request_id", ""))


@contextmanager
def requests() -> Iterator[None]:
    """In this process messages have the ids of their requests."""
    before_task_publish.connect(_put)
    try:
        yield
    finally:
        before_task_publish.disconnect(_put)


@celeryd_init.connect(weak=False)
def _watch(**_: Any) -> None:
    before_task_publish.connect(_put, weak=False)
    task_prerun.connect(_take, weak=False)
