"""Which task a guard belongs to, whatever stands around it.

Guarantees: a task's own function is found through decorators that use `functools.wraps`, through
Celery's own wrappers, and as the method `run` of a class, inherited or not. What is hidden is
found where Python's objects lead to it, so that a worker can refuse to start. A message is known
to be in hand from the call of its task's function on, so that what the body calls is a plain call.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

from celery import Celery, Task, current_app
from celery._state import get_current_task
from celery.local import Proxy

from taskguard import errors
from taskguard.integration import GuardedFunction

__all__ = [
    "Call",
    "guarded_function_of",
    "guarded_tasks",
    "hidden_guard_of",
    "in_hand",
    "layers",
    "let_go",
    "mark",
    "take_in_hand",
    "takes_itself",
    "task_at_work",
    "task_of",
    "unrecognised",
]

_MARK = "__taskguard__"
_KNOWN = "__taskguard_known__"
_MOST_DECORATORS = 8
# An attribute of a request whose message is being handled.
_IN_HAND = "taskguard_in_hand"

# A call that a body has put in its own place: the task's name, args and kwargs.
Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def mark(wrapper: Any, compiled: GuardedFunction) -> None:
    """`wrapper` is what `@guarded_task` made of a function."""
    setattr(wrapper, _MARK, compiled)


def guarded_function_of(task: Task) -> GuardedFunction | None:
    """What `@guarded_task` made of the task's function; None for a task that is not guarded."""
    for function in layers(task):
        compiled = _marked(function)
        if compiled is not None:
            return compiled
    return None


def guarded_tasks(app: Any) -> Iterator[tuple[Task, GuardedFunction]]:
    """The app's guarded tasks."""
    for task in app.tasks.values():
        compiled = guarded_function_of(task)
        if compiled is not None:
            yield task, compiled


def _marked(function: Any) -> GuardedFunction | None:
    compiled = vars(function).get(_MARK) if hasattr(function, "__dict__") else None
    return compiled if isinstance(compiled, GuardedFunction) else None


def layers(task: Task) -> Iterator[Any]:
    """The task's function, outermost first: other decorators and pydantic may stand around it.

    What `@app.task` was given, then the method `run`, which a class may have inherited.
    """
    for outermost in (getattr(task, "__wrapped__", None), getattr(task, "run", None)):
        function = outermost
        while function is not None:
            function = getattr(function, "__func__", function)
            yield function
            function = getattr(function, "__wrapped__", None)


def hidden_guard_of(task: Task) -> GuardedFunction | None:
    """A guard behind a task that is not recognised as guarded; None if there is none.

    Such a guard is under a decorator without `functools.wraps`, or on a `run` that the task's class
    overrides. Not every way to hide a function in Python is searched.
    """
    if guarded_function_of(task) is not None:
        return None
    inherited = [vars(kind)["run"] for kind in type(task).__mro__ if "run" in vars(kind)]
    waiting: list[tuple[Any, int]] = [(each, 0) for each in (task.run, *inherited)]
    seen: set[int] = set()
    while waiting:
        function, depth = waiting.pop(0)  # the outermost function first
        function = getattr(function, "__func__", function)
        if id(function) in seen:
            continue
        seen.add(id(function))
        compiled = _marked(function)
        if compiled is not None:
            return compiled
        if depth < _MOST_DECORATORS:
            waiting += [(each, depth + 1) for each in _held_by(function) if _may_be_under(each)]
    return None


def _held_by(function: Any) -> Iterator[Any]:
    """The functions that a decorator's function or object holds; it wraps one of them."""
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a closure's variable without a value
            yield cell.cell_contents
    yield from getattr(function, "__defaults__", None) or ()
    yield from (getattr(function, "__kwdefaults__", None) or {}).values()
    if isinstance(function, functools.partial):
        yield function.func
    yield from getattr(function, "__dict__", {}).values()


def _may_be_under(held: Any) -> bool:
    # By type(), not isinstance(): a proxy stands for a task or an app, and using it may fail.
    return callable(held) and not issubclass(type(held), type | Task | Celery | Proxy)


def unrecognised(task: Task, compiled: GuardedFunction) -> errors.ConfigurationError:
    """Return the error that says why a task's guard does nothing, and how to fix that."""
    return errors.ConfigurationError(
        f"{task.name}: @guarded_task on {compiled.name} is not recognised as this task's, so that "
        "its duplicates would run. A decorator over it has to use functools.wraps, or go under "
        "it; a run() that overrides a guarded one wants @guarded_task of its own. A function that "
        "is no task is guarded by taskguard_celery.runtime_of(app).guarded(…)."
    )


def takes_itself(task: Task) -> bool:
    """Whether the function's first parameter is the task: `bind=True`, or a class of its own."""
    # autoretry_for puts a plain function around it. `__bound__` says something else.
    return inspect.ismethod(getattr(task, "_orig_run", task.run))


def task_at_work() -> Task | None:
    """The task whose delivery this is, or None."""
    task: Task | None = get_current_task()
    return task


def in_hand(request: Any) -> list[Call] | None:
    """What was put in the place of the request's message; None if that is not being handled."""
    calls: list[Call] | None = vars(request).get(_IN_HAND)
    return calls


def let_go(request: Any) -> None:
    """Note that the request's message is not being handled any more."""
    vars(request).pop(_IN_HAND, None)


def take_in_hand(request: Any) -> None:
    """Note that the request's message is being handled from now on."""
    setattr(request, _IN_HAND, [])


def _has_guard(task: Task, compiled: GuardedFunction) -> bool:
    """Whether this is the guard of the task: found once for each `run` that it has."""
    known, run = vars(task).get(_KNOWN, (None, None)), vars(task).get("run")
    if known[0] is compiled and known[1] is run:
        return True
    found = guarded_function_of(task) is compiled
    if found:
        setattr(task, _KNOWN, (compiled, run))
    return found


def task_of(compiled: GuardedFunction, args: tuple[Any, ...]) -> Task | None:
    """The task whose function this is: the one it is a method of, the one at work, or any."""
    itself = args[0] if args and isinstance(args[0], Task) else None
    for task in (itself, task_at_work()):
        if task is not None and _has_guard(task, compiled):
            return task
    # `ship.run(42)`, or a call of the decorated function: the same work under the same name.
    at_work = task_at_work()
    apps = [current_app] if at_work is None else [at_work.app, current_app]
    tasks = (task for app in apps for task in app.tasks.values())
    return next((task for task in tasks if guarded_function_of(task) is compiled), None)
