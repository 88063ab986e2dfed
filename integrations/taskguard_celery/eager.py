"""Eager mode (`task_always_eager`): a message for a key that the sending body holds runs later.

A worker would deliver such a message after that body. Eager mode delivers it inside the body, where
it would wait for a key that this body itself holds. So the message runs as soon as the outermost
guarded call of this thread has ended.

Guarantees: `delay()`, `apply_async()` and `enqueue()` within a guarded body work for the body's own
key, at any depth. Does not guarantee this for `apply()`, chains, groups and chords. They need the
result at once, so taskguard refuses them.
"""

from __future__ import annotations

import contextvars
import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from celery import Task
from celery.result import EagerResult

__all__ = ["failed_eagerly", "run_later", "with_later_calls"]

# The request of the outermost guarded call of this thread, and the calls to run after it.
_Later = tuple[Any, list[Callable[[], Any]]]
_later: contextvars.ContextVar[_Later | None] = contextvars.ContextVar(
    "taskguard_celery_later", default=None
)


def with_later_calls(task: Task, request: Any, call: Callable[[], Any]) -> Any:
    """Run `call`, then the messages that its body sent for its own key. Return its value.

    Each message runs even after an error. The first error is raised, if eager mode propagates it.
    """
    if _later.get() is not None or not task.app.conf.task_always_eager:
        return call()
    waiting: list[Callable[[], Any]] = []
    token = _later.set((request, waiting))
    raised: list[Exception] = []
    value = None
    try:
        try:
            value = call()
        except Exception as error:  # noqa: BLE001  # raised after the other calls
            raised.append(error)
        while waiting:
            try:
                waiting.pop(0)()
            except Exception as error:  # noqa: BLE001  # a body can raise anything
                raised.append(error)
    finally:
        _later.reset(token)
    if raised:
        raise raised[0]
    return value


def run_later(task: Task, request: Any) -> bool:
    """Run the eager message in hand after the outermost call.

    Return False if it is that call itself, or if its caller needs the result at once.
    """
    outermost, waiting = _later.get() or (request, [])
    if outermost is request or not _is_sent(sys._getframe()):  # noqa: SLF001  # no other way
        return False
    waiting.append(
        functools.partial(
            task.apply,
            request.args,
            request.kwargs,
            task_id=request.id,
            retries=request.retries,
            link=request.callbacks,
            link_error=request.errbacks,
            headers=request.headers,
            ignore_result=request.ignore_result,
        )
    )
    return True


def _is_sent(frame: FrameType | None) -> bool:
    """Return whether the eager call comes from `apply_async()`, whose caller awaits no result."""
    while frame is not None and not _is_of_task(frame, "apply"):
        frame = frame.f_back
    while frame is not None and frame.f_code.co_name == "apply":  # a class may override it
        frame = frame.f_back
    return frame is not None and _is_of_task(frame, "apply_async")


def _is_of_task(frame: FrameType, name: str) -> bool:
    return frame.f_code.co_name == name and frame.f_globals.get("__name__") == Task.__module__


def failed_eagerly(result: Any) -> Exception | None:
    """Return the error of a message that ran eagerly and failed, or None."""
    if isinstance(result, EagerResult) and result.failed():
        error = result.result
        return error if isinstance(error, Exception) else RuntimeError(str(error))
    return None
