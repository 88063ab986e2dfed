"""What a body puts in its own place, as `self.replace()` does before it raises Ignore.

Guarantees: what Celery publishes in the place of the task at work is noted with its request, with
all that is nested in it; whether that is the very same work, which it then claims again, is known
wherever its ids can be made without running it.

Read next: `decorator.py` for what becomes of work whose body ended by an Ignore.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from celery import Task
from celery.signals import before_task_publish

from taskguard import TaskGuard, errors
from taskguard.integration import Delivery, MessageRef
from taskguard_celery.arguments import body_arguments
from taskguard_celery.recognition import (
    Call,
    guarded_function_of,
    in_hand,
    task_at_work,
)

__all__ = ["replaces_itself"]


def replaces_itself(runtime: TaskGuard, task: Task, delivery: Delivery) -> bool:
    """Whether what the body put in its own place is this very work."""
    calls = in_hand(task.request) or ()
    return any(_is_same_work(runtime, task, delivery, *call) for call in calls)


def _is_same_work(
    runtime: TaskGuard,
    replaced: Task,
    delivery: Delivery,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> bool:
    task = replaced.app.tasks.get(name)
    compiled = None if task is None else guarded_function_of(task)
    # With once_per="message" what takes its place is other work.
    if compiled is None or compiled.by_message:
        return False
    try:
        args, kwargs = body_arguments(task, args, kwargs)
        there = compiled.delivery(
            args, kwargs, namespace=runtime.namespace, task=name, message=MessageRef("")
        )
    except (errors.TaskguardError, TypeError):
        # A step of a chain gets its first argument later, so its work is unknown: run twice,
        # not never.
        return bool(name == replaced.name)
    return there.work == delivery.work


def _note(headers: Any = None, body: Any = None, **_: Any) -> None:
    """Celery publishes what takes a task's place within its body, one level deeper."""
    task = task_at_work()
    calls = None if task is None else in_hand(task.request)
    if calls is None or task is None or not isinstance(body, tuple | list):
        return
    nesting = (headers or {}).get("replaced_task_nesting") or 0
    if nesting > (task.request.replaced_task_nesting or 0):
        args, kwargs, embedded = body
        calls.append((headers["task"], tuple(args), dict(kwargs)))
        calls.extend(_calls_in(embedded))


def _calls_in(canvas: Any) -> Iterator[Call]:
    """All calls in signatures, as deep as they are nested."""
    if isinstance(canvas, Mapping):
        if isinstance(canvas.get("task"), str):
            yield canvas["task"], tuple(canvas.get("args") or ()), dict(canvas.get("kwargs") or {})
        for part in canvas.values():
            yield from _calls_in(part)
    elif isinstance(canvas, list | tuple):
        for part in canvas:
            yield from _calls_in(part)


before_task_publish.connect(_note, weak=False)
