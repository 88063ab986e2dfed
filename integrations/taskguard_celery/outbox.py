"""Enqueue a task as part of the user's transaction, and sweep the outbox with Celery beat.

    with Session(engine) as session, session.begin():
        session.add(order)
        enqueue(ship, (order.id,), session=session)

Guarantees: taskguard publishes the message if the transaction commits, and not if it is rolled
back. If the process dies after the COMMIT, a sweep publishes the message.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from celery import Celery, Signature, Task, uuid
from celery.app.utils import find_app
from celery.exceptions import NotRegistered
from celery.result import AsyncResult
from celery.utils.time import maybe_make_aware

from taskguard import errors
from taskguard.integration import (
    NOT_BEFORE,
    MessageRef,
    Sweeper,
    check_delay,
    enqueue_in,
    not_before_s,
    trace_headers,
)
from taskguard_celery.arguments import body_arguments, sent_arguments
from taskguard_celery.calls import NAME, CelerySender, call_of, id_in
from taskguard_celery.marks import Marks, name_of
from taskguard_celery.message import sending_of
from taskguard_celery.recognition import guarded_function_of
from taskguard_celery.runtime import runtime_of

if TYPE_CHECKING:
    from taskguard import TaskGuard
    from taskguard.integration import (
        Delivery,
        Duplicate,
        Existing,
        GuardedFunction,
        OutcomeOfEnqueue,
        Placed,
        Swept,
    )
    from taskguard_celery.options import MessageOptions

__all__ = [
    "SWEEP_TASK",
    "Enqueued",
    "app_at",
    "enqueue",
    "open_queue",
    "schedule_sweep",
    "sweep",
]

SWEEP_TASK = "taskguard.sweep"


class Enqueued:
    """A message that taskguard publishes after its transaction has committed.

    Attributes:
        result: the AsyncResult of the message. With "attached" or "replaced", that of the first
            message.
        outcome: "sent": published, or will be as soon as the transaction commits. "stored": waits
            for `send()` or a sweep. "attached" or "replaced": as `duplicate=` says.
    """

    def __init__(self, result: AsyncResult, placed: Placed) -> None:
        self.result = result
        self._placed = placed

    @property
    def outcome(self) -> OutcomeOfEnqueue:
        """The current outcome. "stored" becomes "sent" once the message is published."""
        return self._placed.outcome

    def send(self) -> None:
        """Publish the message now. With a plain Connection, call this after the COMMIT.

        Does nothing if it was attached to another message. Does nothing if the transaction was
        rolled back, unless the ledger knew the work before: then it sends a harmless duplicate.

        Raises the broker's errors if the broker does not take the message.
        """
        self._placed()


@overload
def enqueue(
    task: Task | Signature,
    args: Sequence[Any] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    *,
    session: Any = ...,
    duplicate: Literal["answer", "attach", "replace", "raise"] = ...,
    delay_s: float | None = ...,
    **options: Unpack[MessageOptions],
) -> Enqueued: ...


@overload
def enqueue(
    task: Task | Signature,
    args: Sequence[Any] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    *,
    session: Any = ...,
    duplicate: Literal["skip"],
    delay_s: float | None = ...,
    **options: Unpack[MessageOptions],
) -> Enqueued | None: ...


def enqueue(
    task: Task | Signature,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    session: Any = None,
    duplicate: Duplicate = "answer",
    delay_s: float | None = None,
    **options: Unpack[MessageOptions],
) -> Enqueued | None:
    """Enqueue a guarded task in the transaction of `session`, or in a transaction of its own.

    taskguard writes the work, with the task's name and arguments, to the ledger as NEW. On an ORM
    Session, or on `guard.db` in a guarded body, it publishes the message right after the COMMIT. On
    a Connection of your own, call `.send()` on the returned object after the COMMIT, or leave the
    message to the next sweep.

    Args:
        task: a guarded task, or its signature: `enqueue(ship.s(42).set(priority=9))`.
        args: its positional arguments. They precede those of a signature. Default: none.
        kwargs: its keyword arguments. Default: none.
        session: a Session, Connection or `guard.db` whose transaction the message is part of.
            Default: a transaction of its own.
        duplicate: what to do if the same work (`once_per`) is waiting or in progress. Default:
            "answer".
        delay_s: the delay before the task runs, in seconds. Default: None, no delay.
        options: options of `apply_async()`. docs/reference/options-enqueue.md describes each.

    Returns:
        The enqueued message, or None if `duplicate="skip"` skipped it.

    Raises:
        ConfigurationError: the task is not guarded, there is no ledger, or an option is not
            possible. Also for a chain, a group or a chord: the error says what to enqueue instead.
        AlreadyEnqueuedError: with `duplicate="raise"`, the work is on record. Nothing is written.
        FingerprintMismatchError: with `duplicate="attach"`, the first message has other arguments.
        KeyArgumentError: an argument cannot be part of a key.
    """
    signature = _signature_of(task, args, kwargs, options)
    task = _task_of(signature)
    compiled = guarded_function_of(task)
    if compiled is None:
        raise errors.ConfigurationError(
            f"enqueue() cannot send {task.name}: it is not guarded, so its duplicates would run. "
            "Put @guarded_task under @app.task."
        )
    if signature.options.get("expires") is not None or task.expires is not None:
        raise errors.ConfigurationError(
            f"enqueue() cannot send {task.name} with expires=: taskguard publishes the message "
            "again until a worker runs it. Remove expires=, and let the body check how old its "
            "work is."
        )
    _refuse_lost_links(signature, duplicate)
    _delay(signature, delay_s)
    _keep_parent(task, signature)
    signature["args"], signature["kwargs"] = sent_arguments(
        task,
        signature.args,
        signature.kwargs,
        serializer=signature.options.get("serializer") or task.serializer,
    )
    runtime, sender = runtime_of(task.app), CelerySender(task.app)
    message = _Message(runtime, compiled, signature, time.time(), _fix_time(runtime, signature))

    def replacement_of(first: Existing) -> Delivery:
        message.id = id_in(first, sender)
        if first.call is not None:
            # Its chord or chain gets the result of the call that takes its place.
            signature.options.update(sender.links_of(json.loads(first.call)))
        return message.delivery()

    placed = enqueue_in(
        session,
        runtime,
        message.delivery(),
        sender.send_first,
        duplicate=duplicate,
        replacement_of=replacement_of,
    )
    if placed.outcome == "skipped":
        return None
    if placed.outcome == "attached" and placed.first is not None:
        message.id = id_in(placed.first, sender)
    result = AsyncResult(message.id, backend=task.backend, app=task.app)
    return Enqueued(result, placed)


class _Message:
    """A signature as one message. Its identity is fixed here, so that a sweep sends the same one.

    Attributes:
        id: the task's id. If the message replaces another one, that one's id.
    """

    def __init__(
        self,
        runtime: TaskGuard,
        compiled: GuardedFunction,
        signature: Signature,
        published_s: float,
        not_before_s: float | None,
    ) -> None:
        self.id: str = signature.options.get("task_id") or uuid()
        self._runtime = runtime
        self._compiled = compiled
        self._signature = signature
        self._published_s = published_s
        self._not_before_s = not_before_s

    def delivery(self) -> Delivery:
        """Return the delivery of the message, with the stored call."""
        signature, task = self._signature, self._signature.type
        signature.options["task_id"] = self.id
        carried = trace_headers()
        if carried:
            headers = signature.options.get("headers") or {}
            signature.options["headers"] = {**headers, **carried}
        name = name_of(self.id, signature.options.get("replaced_task_nesting"))
        marks = Marks(name, sent_s=self._published_s)
        call = call_of(task.app, signature, task.serializer, marks=marks)
        if self._not_before_s is not None:
            call[NOT_BEFORE] = self._not_before_s
        args, kwargs = body_arguments(task, signature.args, signature.kwargs)
        return self._compiled.delivery(
            args,
            kwargs,
            namespace=self._runtime.namespace,
            task=task.name,
            message=MessageRef(name, sending=sending_of(self._published_s)),
            call=call,
        )


def _refuse_lost_links(signature: Signature, duplicate: str) -> None:
    """A link is called when its own message has ended; where nothing is sent there is none."""
    if duplicate in ("answer", "raise"):
        return
    options = signature.options
    links = [each for each in ("link", "link_error", "chain", "chord") if options.get(each)]
    if links:
        raise errors.ConfigurationError(
            f"{signature.task} has a {links[0]}, which would be lost where the work is enqueued "
            f"already (duplicate={duplicate!r}). Let the body enqueue what follows, or send each "
            'message: duplicate="answer".'
        )


def _keep_parent(task: Task, signature: Signature) -> None:
    """Note the task that enqueues this one: a sweep sends it as a child of that, too."""
    parent, options = task.app.current_worker_task, signature.options
    if parent is None:
        return
    request = parent.request
    inherited = {"root_id": request.root_id or request.id, "parent_id": request.id}
    if task.app.conf.task_inherit_parent_priority and _has_no_priority(task, signature):
        inherited["priority"] = (request.delivery_info or {}).get("priority")
    for name, value in inherited.items():
        if options.get(name) is None:
            options[name] = value


def _has_no_priority(task: Task, signature: Signature) -> bool:
    """Whether neither the task has one, nor its route."""
    options, router = dict(signature.options), task.app.amqp.router
    routed = router.route(options, task.name, signature.args, signature.kwargs, task)
    return task.priority is None and routed.get("priority") is None


def _delay(signature: Signature, delay_s: float | None) -> None:
    check_delay(delay_s)
    if delay_s is None:
        return
    options = signature.options
    if options.get("countdown") is not None or options.get("eta") is not None:
        raise errors.ConfigurationError(
            f"{signature.task} has delay_s, and a countdown or an eta, too: give one of them."
        )
    options["countdown"] = delay_s


_INSTEAD = {
    "chain": "its first task is enqueued with the rest as its link: enqueue(first.s(…), link=rest)",
    "group": "its tasks are enqueued one by one, in the same transaction",
    "chord": "a guarded task is enqueued whose body calls it",
}


def _signature_of(
    task: Task | Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> Signature:
    if isinstance(task, Task):
        return task.signature(tuple(args), dict(kwargs or {}), **options)
    if not isinstance(task, Signature):
        raise errors.ConfigurationError(
            f"enqueue() takes a Celery task or its signature, not {type(task).__name__}."
        )
    kind = task.get("subtask_type")
    if kind:
        instead = _INSTEAD.get(kind, "a guarded task is enqueued whose body calls it")
        raise errors.ConfigurationError(
            f"A {kind} is several tasks, and a work in the ledger is one of them: {instead}."
        )
    return task.clone(tuple(args), dict(kwargs or {}), **options)


def _task_of(signature: Signature) -> Task:
    try:
        return signature.type
    except NotRegistered:
        raise errors.ConfigurationError(
            f"enqueue() cannot send {signature.task}: this process does not know the task, so its "
            "key is unknown. Import the module that defines it."
        ) from None


def _fix_time(runtime: TaskGuard, signature: Signature) -> float | None:
    """Return when the task may run, in seconds since 1970, or None for at once.

    A countdown becomes an eta by the database's clock, so that a message that a sweep sends later
    does not wait again.
    """
    options, app = signature.options, signature.app
    countdown, eta = options.pop("countdown", None), options.get("eta")
    if countdown is not None:
        moment_s = not_before_s(runtime, float(countdown))
        eta = datetime.fromtimestamp(moment_s, UTC)
    elif isinstance(eta, str):
        eta = datetime.fromisoformat(eta)
    if eta is None:
        return None
    eta = maybe_make_aware(eta, app.timezone)
    options["eta"] = eta.isoformat()  # every serializer can write text
    return float(eta.timestamp())


def sweep(app: Celery, **options: Any) -> Swept:
    """Publish overdue messages of the outbox, once.

    Args:
        app: the Celery app.
        options: options of `taskguard.integration.Sweeper`.

    Returns:
        The counts of the sweep.

    Raises:
        KeyBusyError: another sweep is running.
        ConfigurationError: a setting is wrong or missing.
    """
    return Sweeper(runtime_of(app), {NAME: CelerySender(app)}, **options).sweep()


def schedule_sweep(app: Celery, *, every_s: float = 60.0, **options: Any) -> None:
    """Let Celery beat sweep: add the task `taskguard.sweep` and its entry in the schedule.

    Args:
        app: the Celery app.
        every_s: the interval between sweeps, in seconds. Default: 60.
        options: options of `taskguard.integration.Sweeper`.

    Raises:
        ConfigurationError: `every_s` is not a positive number.
    """
    if not 0 < every_s < math.inf:
        raise errors.ConfigurationError(
            f"every_s={every_s!r} is not a positive number. Pass the interval in seconds."
        )

    def run() -> str:
        try:
            swept = sweep(app, **options)
        except errors.KeyBusyError:
            return "another sweep is running"
        failed = f", failed {swept.failed}" if swept.failed else ""
        return f"sent {swept.sent}, refused {swept.refused}{failed}"

    # A sweep message expires after this time, because the next one has been sent by then.
    app.task(name=SWEEP_TASK, ignore_result=True, expires=every_s)(run)
    app.conf.beat_schedule = {
        **(app.conf.beat_schedule or {}),
        SWEEP_TASK: {"task": SWEEP_TASK, "schedule": every_s},
    }


def open_queue(target: str) -> tuple[TaskGuard, CelerySender]:
    """Open what `taskguard sweep --celery shop:app` needs. The target is that of `celery -A`."""
    app = app_at(target)
    return runtime_of(app), CelerySender(app)


def app_at(target: str) -> Celery:
    """Find the app and import the modules of its tasks.

    Raises CommandTargetError if there is no app, and any error of its modules.
    """
    app = _found_app(target)
    # As when a worker starts: with Django, that is where its settings are read.
    app.loader.import_default_modules()
    return app


def _found_app(target: str) -> Celery:
    missing = errors.CommandTargetError(
        f"--celery: there is no Celery app at {target!r}. Pass MODULE:APP, as for `celery -A`, and "
        "run the command in a folder where Python can import that module."
    )
    if not target.strip(":. "):
        raise missing
    try:
        app = find_app(target)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{target}.".startswith((f"{error.name}.", f"{error.name}:")):
            raise  # a module that the app's module imports is missing
        raise missing from error
    except AttributeError as error:
        if error.name not in ("app", "celery", re.split("[:.]", target)[-1]):
            raise
        raise missing from error
    if not isinstance(app, Celery):
        raise missing
    return app
