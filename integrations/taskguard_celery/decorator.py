"""`@guarded_task`: turns a Celery call into a delivery, and its outcome into what Celery expects.

Guarantees: name, signature (without `guard`), argument checking, `bind`, `autoretry_for`, canvas,
`.delay()` and `.s()` work as usual. A deferred delivery publishes its message again before it is
acknowledged. If that fails, the message goes back into the queue.

A body that ends by `raise Ignore`, as `self.replace()` does, has done its work. The work is DONE,
and committed with the body's writes. So a second message of the work does not replace it again, and
gets None. A redelivery of the first message is ignored again: its result comes from the task that
replaced it. In two cases the work is FAILED, as after any exception. The body replaced itself with
its own work (`self.replace(self.s(order))`, which then claims it), or the Ignore left a
transaction, so the writes are rolled back.

Read next: `message.py` for how a message is deferred, `recognition.py` for a guard's task.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Unpack, cast

from celery import Task, current_app
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded

from taskguard import Guard, TaskGuard, errors
from taskguard.integration import (
    Answered,
    Completed,
    Deferred,
    Delivery,
    Dropped,
    Ended,
    GuardedFunction,
    MessageRef,
    attempt_of,
)
from taskguard_celery.calls import call_in_hand, task_id_in
from taskguard_celery.chords import count_once
from taskguard_celery.eager import run_later, with_later_calls
from taskguard_celery.errbacks import call_errback, failed_request
from taskguard_celery.hand_off import take_promoted
from taskguard_celery.maps import call_item, map_at_work
from taskguard_celery.message import (
    CeleryQueue,
    ComesAgain,
    HasFailed,
    NeverRuns,
    expires_at_s,
    is_redelivered,
    is_timed_out,
    message_of,
    published_at_s,
    put_off_unread,
    rank_of,
)
from taskguard_celery.parking import CeleryParking, fail_unrun, gave_up, revoke_unrun
from taskguard_celery.recognition import (
    guarded_function_of,
    in_hand,
    mark,
    take_in_hand,
    task_at_work,
    task_of,
    unrecognised,
)
from taskguard_celery.replacing import replaces_itself
from taskguard_celery.retries import would_retry
from taskguard_celery.runtime import KEPT, runtime_of
from taskguard_celery.tracing import begun_s

if TYPE_CHECKING:
    from taskguard import TaskOptions
    from taskguard.integration import Decorator, KeySpec

__all__ = ["guarded_task"]

_ORDERS = (Retry, Ignore, Reject, SoftTimeLimitExceeded)
# The only item in the stored result of work whose body ended by an Ignore: its message.
_IGNORED = "taskguard_ignored_message"


def guarded_task(
    *,
    key: KeySpec,
    **options: Unpack[TaskOptions],
) -> Decorator:
    """Make a Celery task safe to deliver twice. Put it under `@app.task` or `@shared_task`.

    On a task class, put it on the method `run`, which subclasses may inherit. A worker does not
    start if it cannot find the task of a guard. That happens if a decorator above the guard lacks
    `functools.wraps`, or if an unguarded `run` overrides a guarded one.

    Args:
        key: the key template, for example "order:<order_id>", a list of templates, or a callable.
        options: the options of the guard. docs/reference/options.md describes each of them.

    Raises:
        ConfigurationError: the decorator is above `@app.task`, or an option is wrong.
        KeyTemplateError: a template does not fit the function's parameters.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        _refuse_misplaced(function)
        compiled = GuardedFunction(function, key=key, **options)

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            task = task_of(compiled, args)
            if task is None:
                _refuse_hidden(compiled)
                return runtime_of(current_app).run(compiled, args, kwargs)
            request = task.request
            # A body that calls its own task makes a plain call.
            if request.called_directly or in_hand(request) is not None:
                return with_later_calls(task, request, lambda: _call(task, compiled, args, kwargs))
            take_in_hand(request)
            if request.is_eager:
                return with_later_calls(
                    task, request, lambda: _deliver(task, request, compiled, args, kwargs)
                )
            return _deliver(task, request, compiled, args, kwargs)

        # Celery checks arguments against this before it publishes.
        wrapper.__signature__ = compiled.signature  # type: ignore[attr-defined]
        wrapper.__annotations__ = {
            name: kind for name, kind in wrapper.__annotations__.items() if name != "guard"
        }
        mark(wrapper, compiled)
        return wrapper

    return cast("Decorator", decorate)


def _refuse_misplaced(function: Any) -> None:
    if isinstance(function, Task):
        raise errors.ConfigurationError(
            f"@guarded_task is above @app.task on {function.name}. Put it below: first @app.task, "
            "then @guarded_task, then the function."
        )
    if isinstance(function, type):
        raise errors.ConfigurationError(
            f"@guarded_task is above the class {function.__qualname__}. Put it on its method run()."
        )
    if isinstance(function, staticmethod | classmethod):
        kind = type(function).__name__
        raise errors.ConfigurationError(
            f"@guarded_task is above @{kind} on {function.__qualname__}. Put it below: first "
            f"@{kind}, then @guarded_task, then the function."
        )


def _refuse_hidden(compiled: GuardedFunction) -> None:
    """Raise if a guarded body is called in the delivery of a task that seems unguarded."""
    task = task_at_work()
    if task is None or task.request.called_directly or guarded_function_of(task) is not None:
        return
    error = unrecognised(task, compiled)
    if task.request.is_eager:
        raise error
    queue = CeleryQueue(task)
    queue.until_published(lambda: put_off_unread(queue, error), lambda: None)


def _call(
    task: Task, compiled: GuardedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a plain call of the function, which has no message of its own."""
    runtime = runtime_of(task.app)
    failed = failed_request(args)
    if failed is not None:
        return call_errback(runtime, compiled, args, kwargs, task=task, failed=failed)
    if in_hand(task.request) is None and (map_task := map_at_work(task)) is not None:
        return _as_seen(call_item(runtime, compiled, args, kwargs, task=task, map_task=map_task))
    return _as_seen(runtime.run(compiled, args, kwargs, task=task.name))


def _deliver(
    task: Task,
    request: Any,
    compiled: GuardedFunction,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    queue = None if request.is_eager else CeleryQueue(task)
    promoted = take_promoted(request)
    # The pool counts from the start of the task, even if its delivery is tried again here.
    started_s = (None if request.is_eager else begun_s()) or time.monotonic()
    timed_out = functools.partial(is_timed_out, task, started_s=started_s)

    def attempt() -> Any:
        return _deliver_once(
            task, request, compiled, args, kwargs, queue, promoted=promoted, timed_out=timed_out
        )

    if queue is None:
        return attempt()
    return queue.until_published(attempt, lambda: _count_unread(task, Ended.UNAVAILABLE))


def _count_unread(task: Task, ended: Ended) -> None:
    """Count a delivery that ended outside of the runner."""
    runtime: TaskGuard | None = vars(task.app).get(KEPT)
    if runtime is not None:
        runtime.runner.counting.unread(task.name, task.request.id or "", ended)


def _expect(task: Task, kind: type[Exception]) -> None:
    """Celery logs errors that a task declares as `throws` at INFO and without a traceback."""
    throws = task.throws or ()
    throws = (throws,) if isinstance(throws, type) else tuple(throws)
    if kind not in throws:
        task.throws = (*throws, kind)


def _deliver_once(
    task: Task,
    request: Any,
    compiled: GuardedFunction,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    queue: CeleryQueue | None,
    *,
    promoted: bool,
    timed_out: Callable[[], bool],
) -> Any:
    try:
        runtime = vars(task.app).get(KEPT) or runtime_of(task.app)
    except errors.ConfigurationError as error:
        if queue is None:
            raise
        put_off_unread(queue, error)
    published_s = published_at_s(request)
    policy = compiled.policy
    parks = policy.parks and queue is not None
    delivery_of = functools.partial(
        compiled.delivery,
        args,
        kwargs,
        namespace=runtime.namespace,
        task=task.name,
        message=message_of(request),
        published_at_s=published_s,
        redelivered=is_redelivered(request),
        queue=queue,
        parking=CeleryParking(task) if parks else None,
        promoted=promoted,
        rank=rank_of(task.app, request) if policy.ranked else 0,
        expires_at_s=expires_at_s(task.app, request) if parks else None,
        timed_out=timed_out,
        orders=_ORDERS,
        call=call_in_hand(task) if policy.stores_calls and queue is not None else None,
    )
    delivery = _made(task, delivery_of)
    body = _Body(runtime, task, compiled, args, kwargs, delivery)
    try:
        outcome = runtime.runner.deliver(delivery, body)
    except errors.KeyAlreadyHeldError as error:
        if request.is_eager and not body.began:
            _run_later(task, request, error)
        raise
    except (errors.WorkStillDeadError, errors.WorkFailedError) as error:
        _expect(task, type(error))
        _refuse_retry(task, error)
        raise
    except Reject as rejected:
        if not rejected.requeue:  # Celery sends no signal for it
            gave_up(task, request)
        raise
    if body.ignored is not None and isinstance(outcome, Completed):
        raise body.ignored
    if isinstance(outcome, Answered) and outcome.value == _ignored(delivery.message):
        raise Ignore(f"an earlier delivery of {task.name} ended by an Ignore")
    if isinstance(outcome, Completed | Answered):
        answered = isinstance(outcome, Answered) and outcome.same_message
        count_once(task, answered=answered)
        return _as_seen(outcome.value)
    # Acknowledged without a result: the message was published again, or another one has the result.
    if not isinstance(outcome, Dropped):
        raise ComesAgain(
            f"deferred by {outcome.delay_s:.1f} s" if isinstance(outcome, Deferred) else "parked"
        )
    told = _tell_caller(task, request, outcome, key=delivery.key)
    raise (NeverRuns if told else Ignore)(str(outcome))


def _made(task: Task, delivery_of: Callable[[], Delivery]) -> Delivery:
    """Return the delivery. Its arguments may not fit, and a callable of its key may fail."""
    try:
        return delivery_of()
    except Exception:
        _count_unread(task, Ended.FAILED)
        raise


def _refuse_retry(task: Task, error: errors.TaskguardError) -> None:
    """Store that a run has failed, if `autoretry_for` would retry the task in vain after it."""
    failed = isinstance(error, errors.WorkFailedError)
    if failed and would_retry(task, error) and not task.request.is_eager:
        fail_unrun(task, error)
        raise HasFailed(str(error)) from error


def _tell_caller(task: Task, request: Any, dropped: Dropped, *, key: str) -> bool:
    """Tell the caller of a message that it never runs. Return False if another message will answer.

    That can be a live copy of the message, or a newer call that has its id.
    """
    reason = dropped.reason_for_caller(key)
    if reason is None or task_id_in(dropped.by or "") == request.id:
        return False
    revoke_unrun(task, reason)
    return True


def _run_later(task: Task, request: Any, error: errors.KeyAlreadyHeldError) -> NoReturn:
    """Run an eager message for the key of an outer body after that body. Refuse other calls."""
    if run_later(task, request):
        raise Ignore(f"{task.name} runs after the body that holds {error.key} (eager mode)")
    raise errors.KeyAlreadyHeldError(
        f"{task.name} was called eagerly while this thread holds {error.key}, so it would wait for "
        "itself. The body did not run. In a guarded body, use delay(), apply_async() or enqueue(): "
        "with task_always_eager, the task runs after that body. Release a lock before you call the "
        "task. Test chains, groups and chords for a body's own key with a worker.",
        key=error.key,
    ) from None


class _Body:
    """A task's function as the body of one delivery.

    Attributes:
        began: True if the function was called.
        ignored: the Ignore by which the body ended, to raise to Celery, or None.
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
        self.began = False
        self.ignored: Ignore | None = None

    def __call__(self, guard: Guard) -> Any:
        """Run the body. The runner calls it again after a deadlock."""
        self.began = True
        self.ignored = None
        try:
            return self._compiled.call(self._args, self._kwargs, guard)
        except Reject:
            raise
        except Ignore as ignored:
            if replaces_itself(self._runtime, self._task, self._delivery):
                raise
            try:
                attempt_of(guard).refuse_end()
            except errors.TransactionAbandonedError:
                raise ignored from None
            self.ignored = ignored
            return _ignored(self._delivery.message)


def _ignored(message: MessageRef) -> dict[str, str]:
    """Return the stored result of work that this message ended by an Ignore."""
    return {_IGNORED: message.id}


def _as_seen(value: Any) -> Any:
    """Return a stored result as a caller may see it."""
    return None if isinstance(value, dict) and value.keys() == {_IGNORED} else value
