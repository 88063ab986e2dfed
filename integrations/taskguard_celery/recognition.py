"""Find the task of a guard, and the guard of a task, through other decorators.

Guarantees: a task's function is found through decorators that use `functools.wraps`, through
Celery's own wrappers, and as the method `run` of a class, inherited or not. If another decorator
hides a guard, taskguard searches the objects that the decorator holds, so that a worker can refuse
to start. From the call of a task's function on, its message counts as being handled. So a call that
the body makes is a plain call.
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
# Attribute of a request whose message is being handled.
_IN_HAND = "taskguard_in_hand"

# A call that replaces the running task: the task's name, args and kwargs.
Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def mark(wrapper: Any, compiled: GuardedFunction) -> None:
    """Note on a wrapper which guarded function it belongs to."""
    setattr(wrapper, _MARK, compiled)


def guarded_function_of(task: Task) -> GuardedFunction | None:
    """Return the guarded function of a task, or None if the task is not guarded."""
    for function in layers(task):
        compiled = _marked(function)
        if compiled is not None:
            return compiled
    return None


def guarded_tasks(app: Any) -> Iterator[tuple[Task, GuardedFunction]]:
    """Yield the app's guarded tasks."""
    for task in app.tasks.values():
        compiled = guarded_function_of(task)
        if compiled is not None:
            yield task, compiled


def _marked(function: Any) -> GuardedFunction | None:
    compiled = vars(function).get(_MARK) if hasattr(function, "__dict__") else None
    return compiled if isinstance(compiled, GuardedFunction) else None


def layers(task: Task) -> Iterator[Any]:
    """Yield the task's function and the functions that it wraps, outermost first.

    Start with the function under `@app.task`, then with the method `run`, inherited or not.
    """
    for outermost in (getattr(task, "__wrapped__", None), getattr(task, "run", None)):
        function = outermost
        while function is not None:
            function = getattr(function, "__func__", function)
            yield function
            function = getattr(function, "__wrapped__", None)


def hidden_guard_of(task: Task) -> GuardedFunction | None:
    """Return the guard of a task that is not recognised as guarded, or None if there is none.

    Such a guard is under a decorator without `functools.wraps`, or on a `run` that the task's class
    overrides. The search does not find every way to hide a function in Python.
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
    """Yield the objects that a decorator's function or object holds. It may wrap one of them."""
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a closure's variable without a value
            yield cell.cell_contents
    yield from getattr(function, "__defaults__", None) or ()
    yield from (getattr(function, "__kwdefaults__", None) or {}).values()
    if isinstance(function, functools.partial):
        yield function.func
    yield from getattr(function, "__dict__", {}).values()


def _may_be_under(held: Any) -> bool:
    # type() instead of isinstance(), because using a proxy of a task or an app may fail.
    return callable(held) and not issubclass(type(held), type | Task | Celery | Proxy)


def unrecognised(task: Task, compiled: GuardedFunction) -> errors.ConfigurationError:
    """Return the error that says why a task's guard does nothing, and how to fix that."""
    return errors.ConfigurationError(
        f"{task.name}: taskguard does not recognise @guarded_task on {compiled.name} as the guard "
        "of this task, so its duplicates would run. Add functools.wraps to a decorator above the "
        "guard, or move it below. Put @guarded_task on a run() that overrides a guarded one. Guard "
        "a function that is not a task with taskguard_celery.runtime_of(app).guarded(…)."
    )


def takes_itself(task: Task) -> bool:
    """Return True if the function's first parameter is the task: `bind=True`, or a task class."""
    # autoretry_for wraps it in a plain function. `__bound__` means something else.
    return inspect.ismethod(getattr(task, "_orig_run", task.run))


def task_at_work() -> Task | None:
    """Return the task that is running in this thread, or None."""
    task: Task | None = get_current_task()
    return task


def in_hand(request: Any) -> list[Call] | None:
    """Return the calls that replace the request's task, or None if it is not being handled."""
    calls: list[Call] | None = vars(request).get(_IN_HAND)
    return calls


def let_go(request: Any) -> None:
    """Note that the request's message is no longer being handled."""
    vars(request).pop(_IN_HAND, None)


def take_in_hand(request: Any) -> None:
    """Note that the request's message is being handled from now on."""
    setattr(request, _IN_HAND, [])


def _has_guard(task: Task, compiled: GuardedFunction) -> bool:
    """Return True if this is the task's guard. The answer is kept for each `run` of the task."""
    known, run = vars(task).get(_KNOWN, (None, None)), vars(task).get("run")
    if known[0] is compiled and known[1] is run:
        return True
    found = guarded_function_of(task) is compiled
    if found:
        setattr(task, _KNOWN, (compiled, run))
    return found


def task_of(compiled: GuardedFunction, args: tuple[Any, ...]) -> Task | None:
    """Return the task of this function: its first argument, the running task, or any other."""
    itself = args[0] if args and isinstance(args[0], Task) else None
    for task in (itself, task_at_work()):
        if task is not None and _has_guard(task, compiled):
            return task
    # `ship.run(42)`, or a call of the decorated function, is work of the task as well.
    at_work = task_at_work()
    apps = [current_app] if at_work is None else [at_work.app, current_app]
    tasks = (task for app in apps for task in app.tasks.values())
    return next((task for task in tasks if guarded_function_of(task) is compiled), None)
