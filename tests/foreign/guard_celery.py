"""A plugin for the pytest of Celery's suite: every task is guarded, with a key for each message.

Celery's own tasks (`celery.chord_unlock`, …) are not guarded, because users cannot decorate them.
"""

from __future__ import annotations

import functools
import inspect
import uuid
from collections.abc import Callable
from typing import Any

from celery import Celery, Task, current_task

from taskguard_celery import guarded_task
from taskguard_celery.recognition import guarded_function_of


def _key(*args: Any, **kwargs: Any) -> str:
    """Return the message's key, or a new key if there is no message."""
    del args, kwargs
    message = current_task.request.id if current_task else None
    return message or str(uuid.uuid4())


_guarded = functools.cache(guarded_task(key=_key, once_per="message"))


def _guard(function: Callable[..., Any]) -> Callable[..., Any]:
    return _guarded(function) if inspect.isfunction(function) else function


def _of_function(original: Callable[..., Task]) -> Callable[..., Task]:
    @functools.wraps(original)
    def task_from_fun(app: Celery, fun: Any, name: str | None = None, **options: Any) -> Task:
        own = (name or fun.__module__).startswith("celery.")
        return original(app, fun if own else _guard(fun), name=name, **options)

    return task_from_fun


def _of_class(original: Callable[..., Task]) -> Callable[..., Task]:
    @functools.wraps(original)
    def register_task(app: Celery, task: Any, **options: Any) -> Task:
        kind = task if inspect.isclass(task) else type(task)
        if "run" in vars(kind) and guarded_function_of(task) is None:
            kind.run = _guard(kind.run)
        return original(app, task, **options)

    return register_task


Celery._task_from_fun = _of_function(Celery._task_from_fun)
Celery.register_task = _of_class(Celery.register_task)
