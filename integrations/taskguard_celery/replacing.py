"""A body that ends by `raise Ignore`, as `self.replace()` does, has done its work.

Guarantees: the work is DONE, and what is to be committed with DONE is committed; so a second
    message of its key does not replace it again, and gets None. The same message, delivered again,
    is ignored again: its result comes from what took its place. The work is FAILED, as after any
    exception, if the body put the very same work in its own place (`self.replace(self.s(order))`,
    which then claims it), or left a transaction by the Ignore, so that its writes are gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from celery import Task
from celery.exceptions import Ignore, Reject
from celery.signals import before_task_publish

from taskguard import Delivery, Guard, GuardedFunction, MessageRef, TaskGuard, errors
from taskguard_celery.recognition import guarded_function_of, takes_itself, task_at_work

__all__ = ["Body", "in_hand", "is_ignored", "take_in_hand", "without_mark"]

# An attribute of the request in hand: the calls that its body has put in its own place.
_IN_HAND = "taskguard_in_hand"

# The only item in the stored result of such work: the message that was ignored.
_IGNORED = "taskguard_ignored_message"

_Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def in_hand(request: Any) -> list[_Call] | None:
    """What was put in the place of the request's message; None if that is not being handled."""
    calls: list[_Call] | None = vars(request).get(_IN_HAND)
    return calls


def take_in_hand(request: Any) -> None:
    """Note that the request's message is being handled from now on."""
    setattr(request, _IN_HAND, [])


def is_ignored(value: Any, message: MessageRef) -> bool:
    """Whether a stored result says that this message has ended by an Ignore."""
    return isinstance(value, dict) and value == {_IGNORED: message.id}


def without_mark(value: Any) -> Any:
    """A stored result as a caller may see it."""
    return None if isinstance(value, dict) and value.keys() == {_IGNORED} else value


class Body:
    """A task's function as the body of one delivery.

    Attributes:
        ignored: the Ignore by which the body ended, to be raised to Celery; None: it did not.
    """

    def __init__(
        self,
        runtime: TaskGuard,
        task: Task,
        compiled: GuardedFunction,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        delivery: Delivery,
    ) -> None:
        self._runtime = runtime
        self._task = task
        self._compiled = compiled
        self._args = args
        self._kwargs = kwargs
        self._delivery = delivery
        self.ignored: Ignore | None = None

    def __call__(self, guard: Guard) -> Any:
        """Run the body; called once more after a deadlock."""
        self.ignored = None
        try:
            return self._compiled.call(self._args, self._kwargs, guard)
        except Reject:
            raise
        except Ignore as ignored:
            if self._goes_on():
                raise
            try:
                guard.refuse_end()
            except errors.TransactionAbandonedError:
                raise ignored from None
            self.ignored = ignored
            return {_IGNORED: self._delivery.message.id}

    def _goes_on(self) -> bool:
        """Whether what the body put in its own place is this very work."""
        return any(self._is_same_work(*call) for call in in_hand(self._task.request) or ())

    def _is_same_work(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        task = self._task.app.tasks.get(name)
        compiled = None if task is None else guarded_function_of(task)
        # With once_per="message" what takes its place is other work.
        if compiled is None or compiled.by_message:
            return False
        if takes_itself(task):
            args = (task, *args)
        try:
            there = self._runtime.delivery(
                compiled, args, kwargs, task=name, message=MessageRef("")
            )
        except (errors.TaskguardError, TypeError):
            # A step of a chain gets its first argument later, so its work is unknown: run twice,
            # not never.
            return bool(name == self._task.name)
        return there.work == self._delivery.work


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


def _calls_in(canvas: Any) -> Iterator[_Call]:
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
