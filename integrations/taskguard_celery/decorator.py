"""`@guarded_task`: from a Celery call to a delivery, and from its outcome to what Celery is told.

Guarantees: name, signature (less `guard`), argument checking, `bind`, `autoretry_for`, canvas,
`.delay()` and `.s()` work as without it. A delivery that is put off leaves a live copy behind
before it is acknowledged; where even that fails it goes back into the queue.

Read next: `queue.py` for how a copy is published.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from celery import Celery, Task, current_app, current_task
from celery.exceptions import Ignore

from taskguard import Answered, Completed, GuardedFunction, errors
from taskguard_celery.calls import call_in_hand
from taskguard_celery.errbacks import call_errback, failed_request
from taskguard_celery.house import house_of
from taskguard_celery.message import message_of, published_at_s
from taskguard_celery.queue import CeleryQueue, NotPublishedError, put_off_unread

__all__ = ["guarded_function_of", "guarded_task"]

Function = TypeVar("Function", bound=Callable[..., Any])

_MARK = "__taskguard__"
# On a request whose message is being handled: a body that calls its own task calls a function.
_IN_HAND = "taskguard_in_hand"
_MOST_DECORATORS = 8


def guarded_task(
    *,
    key: Any,
    once_per: str = "key",
    work: str | None = None,
    fingerprint: Any = None,
    row: Any = None,
    **options: Any,
) -> Callable[[Function], Function]:
    """Make a Celery task safe to deliver twice. Stands under `@app.task` or `@shared_task`.

    Args:
        key: the key template, for example "order:<order_id>"; a list or a callable does too.
        once_per: "key": the work is done once for the key. "message": messages of one key never
            overlap, each message's effects happen once. Or a template that names the work.
        work: the first part of the work's id; by default the task's name.
        fingerprint: a template, for example "<amount>:<currency>": a later message of the same work
            that differs in it raises FingerprintMismatchError, instead of getting a result that
            is not its own. Only a digest is stored.
        row: a `taskguard.GuardedRow`: a row of your own whose state is moved with the claim and
            with the effects, and says whether there is anything to do.
        options: see `taskguard.Policy`.

    Raises:
        ConfigurationError: it stands over `@app.task`, or an option is wrong.
        KeyTemplateError: a template does not fit the function's parameters.
    """

    def decorate(function: Function) -> Function:
        _refuse_misplaced(function)
        compiled = GuardedFunction(
            function,
            key=key,
            once_per=once_per,
            work=work,
            fingerprint=fingerprint,
            row=row,
            options=options,
            busy="retry",
        )

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            task = _task_of(compiled, args)
            if task is None:
                _refuse_hidden(compiled)
                return house_of(current_app).run(compiled, args, kwargs)
            request = task.request
            if request.called_directly or vars(request).get(_IN_HAND):
                return _call(task, compiled, args, kwargs)
            setattr(request, _IN_HAND, True)
            return _deliver(task, compiled, args, kwargs)

        # Celery checks arguments against this before it publishes.
        wrapper.__signature__ = compiled.signature  # type: ignore[attr-defined]
        wrapper.__annotations__ = {
            name: kind for name, kind in wrapper.__annotations__.items() if name != "guard"
        }
        setattr(wrapper, _MARK, compiled)
        return wrapper  # type: ignore[return-value]

    return decorate


def _refuse_misplaced(function: Any) -> None:
    if isinstance(function, Task):
        raise errors.ConfigurationError(
            f"@guarded_task stands over @app.task on {function.name}. Put it under: first "
            "@app.task, then @guarded_task, then the function."
        )
    if isinstance(function, type):
        raise errors.ConfigurationError(
            f"@guarded_task stands over the class {function.__qualname__}. Put it on its method: "
            "run."
        )
    if isinstance(function, staticmethod | classmethod):
        kind = type(function).__name__
        raise errors.ConfigurationError(
            f"@guarded_task stands over @{kind} on {function.__qualname__}. Put it under: first "
            f"@{kind}, then @guarded_task, then the function."
        )


def guarded_function_of(task: Task) -> GuardedFunction | None:
    """What `@guarded_task` made of the task's function; None for a task that is not guarded."""
    for function in _layers(task):
        compiled = _marked(function)
        if compiled is not None:
            return compiled
    return None


def _marked(function: Any) -> GuardedFunction | None:
    compiled = vars(function).get(_MARK) if hasattr(function, "__dict__") else None
    return compiled if isinstance(compiled, GuardedFunction) else None


def _layers(task: Task) -> Iterator[Any]:
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
    """A guard of a task that is not recognised as guarded: it would run under no message.

    It is under a decorator that does not say what it stands around (`functools.wraps` does), or
    on a `run` that the task's class overrides. Not all that Python can do is looked through.
    """
    if guarded_function_of(task) is not None:
        return None
    inherited = [vars(kind)["run"] for kind in type(task).__mro__ if "run" in vars(kind)]
    waiting: list[tuple[Any, int]] = [(each, 0) for each in (task.run, *inherited)]
    seen: set[int] = set()
    while waiting:
        function, depth = waiting.pop(0)  # the nearest first
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
    """What a decorator's function or object holds: one of them is what it stands around."""
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # not bound yet
            yield cell.cell_contents
    yield from getattr(function, "__defaults__", None) or ()
    yield from (getattr(function, "__kwdefaults__", None) or {}).values()
    if isinstance(function, functools.partial):
        yield function.func
    yield from getattr(function, "__dict__", {}).values()


def _may_be_under(held: Any) -> bool:
    return callable(held) and not isinstance(held, type | Task | Celery)


def _refuse_hidden(compiled: GuardedFunction) -> None:
    """A body that no task answers for is not begun in the delivery of a task that has no guard."""
    task = _task_at_work()
    if task is None or task.request.called_directly or guarded_function_of(task) is not None:
        return
    error = unrecognised(task, compiled)
    if task.request.is_eager:
        raise error
    queue = CeleryQueue(task)
    while True:
        try:
            put_off_unread(queue, error)
        except NotPublishedError as unpublished:
            queue.keep(unpublished)


def unrecognised(task: Task, compiled: GuardedFunction) -> errors.ConfigurationError:
    """The error that says why a task's guard does nothing, and how to mend it."""
    return errors.ConfigurationError(
        f"{task.name}: @guarded_task on {compiled.name} is not recognised as this task's, so that "
        "its duplicates would run. A decorator over it has to use functools.wraps, or go under "
        "it; a run() that overrides a guarded one wants @guarded_task of its own. A function that "
        "is no task is guarded by taskguard_celery.house_of(app).guarded(…)."
    )


def takes_itself(task: Task) -> bool:
    """Whether the function's first parameter is the task: `bind=True`, or a class of its own."""
    # autoretry_for puts a plain function around it. `__bound__` says something else.
    return inspect.ismethod(getattr(task, "_orig_run", task.run))


def _task_at_work() -> Task | None:
    return current_task._get_current_object() if current_task else None  # noqa: SLF001  # Celery's


def _task_of(compiled: GuardedFunction, args: tuple[Any, ...]) -> Task | None:
    """The task whose function this is: the one it is a method of, the one at work, or any."""
    itself = args[0] if args and isinstance(args[0], Task) else None
    for task in (itself, _task_at_work()):
        if task is not None and guarded_function_of(task) is compiled:
            return task
    # `ship.run(42)`, or a call of what the decorator returned: the same work under the same name.
    tasks = current_app.tasks.values()
    return next((task for task in tasks if guarded_function_of(task) is compiled), None)


def _call(
    task: Task, compiled: GuardedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A call, not a message."""
    house = house_of(task.app)
    failed = failed_request(args)
    if failed is not None:
        return call_errback(house, compiled, args, kwargs, task=task, failed=failed)
    return house.run(compiled, args, kwargs, task=task.name)


def _deliver(
    task: Task, compiled: GuardedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    queue = None if task.request.is_eager else CeleryQueue(task)
    while True:
        try:
            return _deliver_once(task, compiled, args, kwargs, queue)
        except NotPublishedError as error:
            if queue is None:
                raise
            queue.keep(error)


def _deliver_once(
    task: Task,
    compiled: GuardedFunction,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    queue: CeleryQueue | None,
) -> Any:
    request = task.request
    try:
        house = house_of(task.app)
    except errors.ConfigurationError as error:
        if queue is None:
            raise
        put_off_unread(queue, error)
    delivery = house.delivery(
        compiled,
        args,
        kwargs,
        task=task.name,
        message=message_of(request),
        published_at_s=published_at_s(request),
        queue=queue,
        call=call_in_hand(task) if compiled.policy.recoverable and queue is not None else None,
    )
    outcome = house.runner.deliver(delivery, lambda guard: compiled.call(args, kwargs, guard))
    if isinstance(outcome, Completed | Answered):
        return outcome.value
    # Acknowledged without a result: a copy is on its way, or the message's answer is another's.
    raise Ignore(str(outcome))
