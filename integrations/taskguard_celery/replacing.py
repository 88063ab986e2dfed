"""Note which calls replace a running task, as with `self.replace()`.

Guarantees: calls that Celery publishes in place of the running task are noted on its request,
nested calls included. So taskguard can tell whether a call is the same work, which will claim that
work again. For a call whose key depends on another call's result, it compares the task's name.

Read next: `decorator.py` for the state of work whose body ended by an Ignore.
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
    """Return True if one of the calls that replace the task is the same work."""
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
    # With once_per="message", another message is other work.
    if compiled is None or compiled.by_message:
        return False
    try:
        args, kwargs = body_arguments(task, args, kwargs)
        there = compiled.delivery(
            args, kwargs, namespace=runtime.namespace, task=name, message=MessageRef("")
        )
    except (errors.TaskguardError, TypeError):
        # A step of a chain gets its first argument later, so its work is unknown. Assume the same
        # work, because running it twice is better than never.
        return bool(name == replaced.name)
    return there.work == delivery.work


def _note(headers: Any = None, body: Any = None, **_: Any) -> None:
    """Note a call that replaces the running task: Celery publishes it one nesting level deeper."""
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
    """Yield all calls in signatures, at any depth."""
    if isinstance(canvas, Mapping):
        if isinstance(canvas.get("task"), str):
            yield canvas["task"], tuple(canvas.get("args") or ()), dict(canvas.get("kwargs") or {})
        for part in canvas.values():
            yield from _calls_in(part)
    elif isinstance(canvas, list | tuple):
        for part in canvas:
            yield from _calls_in(part)


before_task_publish.connect(_note, weak=False)
