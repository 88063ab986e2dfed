"""`@guarded_task`: from a Celery call to a delivery, and from its outcome to what Celery is told.

Guarantees: name, signature (less `guard`), argument checking, `bind`, `autoretry_for`, canvas,
`.delay()` and `.s()` work as without it. A delivery that is put off leaves a live copy behind
before it is acknowledged; where even that fails it is rejected back into the queue.

Read next: `queue.py` for how a copy is published.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from celery import Task, current_app, current_task
from celery.exceptions import Ignore

from taskguard import Answered, Completed, GuardedFunction, errors
from taskguard_celery.calls import call_in_hand
from taskguard_celery.house import house_of
from taskguard_celery.message import message_of, published_at_s
from taskguard_celery.queue import CeleryQueue, put_off_unread

__all__ = ["guarded_function_of", "guarded_task"]

Function = TypeVar("Function", bound=Callable[..., Any])

_MARK = "__taskguard__"
# On a request whose message is being handled: a body that calls its own task calls a function.
_IN_HAND = "taskguard_in_hand"


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
        if isinstance(function, Task):
            raise errors.ConfigurationError(
                f"@guarded_task stands over @app.task on {function.name}. Put it under: first "
                "@app.task, then @guarded_task, then the function."
            )
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
            task = _task_of(wrapper)
            if task is None:
                return house_of(current_app).run(compiled, args, kwargs)
            request = task.request
            if request.called_directly or vars(request).get(_IN_HAND):
                return house_of(task.app).run(compiled, args, kwargs, task=task.name)
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


def guarded_function_of(task: Task) -> GuardedFunction | None:
    """What `@guarded_task` made of the task's function; None for a task that is not guarded."""
    for function in _layers(task):
        compiled = vars(function).get(_MARK) if hasattr(function, "__dict__") else None
        if compiled is not None:
            return compiled  # type: ignore[no-any-return]
    return None


def _layers(task: Task) -> Iterator[Any]:
    """The task's function, outermost first: other decorators and pydantic may stand around it."""
    function = getattr(task, "__wrapped__", None)
    while function is not None:
        function = getattr(function, "__func__", function)
        yield function
        function = getattr(function, "__wrapped__", None)


def takes_itself(task: Task) -> bool:
    """Whether the function's first parameter is the task: `bind=True`, or a class of its own."""
    # autoretry_for puts a plain function around it. `__bound__` says something else.
    return inspect.ismethod(getattr(task, "_orig_run", task.run))


def _task_of(wrapper: Any) -> Task | None:
    """The task whose function `wrapper` is: the one at work here, else one of the current app."""
    task = current_task._get_current_object() if current_task else None  # noqa: SLF001  # Celery's
    if task is not None and any(function is wrapper for function in _layers(task)):
        return task
    # `ship.run(42)`, or a call of what the decorator returned: the same work under the same name.
    tasks = current_app.tasks.values()
    return next((task for task in tasks if any(f is wrapper for f in _layers(task))), None)


def _deliver(
    task: Task, compiled: GuardedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    request = task.request
    queue = None if request.is_eager else CeleryQueue(task)
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
