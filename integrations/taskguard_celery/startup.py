"""Check a worker when it starts, and end the work of messages that never run.

A message never runs if it is revoked, expires, or fails before its guard.

Guarantees: a worker with guarded tasks and wrong settings does not start, and says why. A worker
whose database is down starts. A prefork worker notices within half a second that a child is gone,
so that the child's message is delivered again before its lease ends. A worker with greenlets
delivers again the messages that a killed worker left in Redis.
"""

from __future__ import annotations

import functools
import logging
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from celery import Task, bootsteps
from celery._state import get_current_app
from celery.exceptions import WorkerLostError
from celery.signals import (
    celeryd_after_setup,
    task_failure,
    task_revoked,
    worker_init,
    worker_process_init,
    worker_process_shutdown,
)

from taskguard import errors
from taskguard.integration import (
    EXPIRED,
    Delivery,
    Ended,
    GuardedFunction,
    describe_worker,
    examine,
    flush_all,
    flush_when_idle,
    log_findings,
)
from taskguard_celery.arguments import body_arguments
from taskguard_celery.broker import broker_kind, visibility_timeout_s
from taskguard_celery.chords import count_by_results
from taskguard_celery.doctor import configuration_of
from taskguard_celery.hand_off import consume_hand_offs
from taskguard_celery.health import time_limit_s
from taskguard_celery.marks import marks_of
from taskguard_celery.message import message_of, note_time_limit
from taskguard_celery.monitors import add_inspection, show_outcomes
from taskguard_celery.parking import CeleryParking, CeleryRelay, relay_is_needed
from taskguard_celery.rabbitmq_queues import ConsumeBeside
from taskguard_celery.recognition import (
    guarded_function_of,
    guarded_tasks,
    hidden_guard_of,
    in_hand,
    unrecognised,
)
from taskguard_celery.runtime import build, runtime_of
from taskguard_celery.tracing import trace_briefly

__all__ = ["check_worker", "safe_defaults"]

logger = logging.getLogger("taskguard")

_LOOK_FOR_LOST_CHILDREN_S = 0.5
_AFTER_TIME_LIMIT_S = 60.0
_LOOK_AT_COUNTS_S = 5.0
_KEEP_RELAY_S = 1.0
_SAID_BY_CELERY = frozenset({"queue_server_away"})


def safe_defaults(app: Any) -> None:
    """Set Celery's settings so that no message of a killed worker is lost.

    Sets task_acks_late, task_reject_on_worker_lost and worker_prefetch_multiplier = 1. On RabbitMQ,
    sets confirm_publish. On other brokers, sets a visibility_timeout above the time limits of the
    app and of its guarded tasks. A setting of a single task is kept. Call this before the first
    task is used, because Celery then copies settings into tasks.

    Args:
        app: the Celery app.
    """
    app.conf.update(
        task_acks_late=True, task_reject_on_worker_lost=True, worker_prefetch_multiplier=1
    )
    if broker_kind(app, write=True) == "amqp":
        _set_transport_option(app, "confirm_publish", True)

    def outlast(**_: Any) -> None:
        _outlast_time_limits(app)

    if app.finalized:
        outlast()
    else:
        app.on_after_finalize.connect(outlast, weak=False)


def _outlast_time_limits(app: Any) -> None:
    """Raise the visibility timeout above all time limits: no redelivery while a body may run."""
    visible_s = visibility_timeout_s(app)
    limits_s = [time_limit_s(task) for task, _ in guarded_tasks(app)]
    longest_s = max((limit_s for limit_s in limits_s if limit_s is not None), default=0.0)
    if visible_s is not None and visible_s < longest_s:
        _set_transport_option(app, "visibility_timeout", longest_s + _AFTER_TIME_LIMIT_S)


def _set_transport_option(app: Any, name: str, value: Any) -> None:
    options = {**(app.conf.broker_transport_options or {}), name: value}
    app.conf.broker_transport_options = options


def check_worker(app: Any) -> None:
    """Log findings about an app's settings and servers, as its workers do when they start.

    Args:
        app: the Celery app.

    Raises:
        ConfigurationError: guarded tasks cannot run, or a guard is ignored.
    """
    _check(app, registers=False)


def _check(app: Any, *, registers: bool) -> None:
    _refuse_hidden_guards(app)
    tasks = list(guarded_tasks(app))
    if tasks:
        rows = [compiled.row for _, compiled in tasks if compiled.row is not None]
        _check_servers(app, rows, registers=registers)


def _refuse_hidden_guards(app: Any) -> None:
    for task in app.tasks.values():
        compiled = hidden_guard_of(task)
        if compiled is not None:
            raise unrecognised(task, compiled)


def _check_servers(app: Any, rows: list[Any], *, registers: bool) -> None:
    """Check the servers, and close the connections before the pool forks.

    `registers`: this process is the worker, whose name the ledger stores.
    """
    runtime = build(app)
    try:
        reports = examine(replace(configuration_of(app, runtime=runtime), starts=True))
        found = [each for report in reports for each in report.findings]
        names = {each.name for each in found}
        if runtime.ledger is not None and "ledger_away" not in names:
            # Raises ConfigurationError for the findings that stop a worker.
            runtime.ledger.check_schema(rows)
            if registers:
                runtime.runner.names.register()
                runtime.runner.counting.flush.begin([task.name for task, _ in guarded_tasks(app)])
    except errors.LedgerUnavailableError as error:
        logger.warning("the ledger is down; messages will be deferred: %s", error)
        return
    finally:
        runtime.close()
    log_findings(found, but=_SAID_BY_CELERY)


def _on_worker_init(sender: Any = None, **_: Any) -> None:
    """Add steps to the worker: Celery creates them before it sets up the worker."""
    sender.app.steps["consumer"].update((ConsumeBeside, LookAfter))
    add_inspection()


def _on_worker_setup(instance: Any = None, **_: Any) -> None:
    """Run the checks. Logging is set up, the pool has not forked, and no message was fetched."""
    note_time_limit(instance)
    instance.taskguard_number = describe_worker(
        "celery", instance.hostname, ",".join(instance.app.amqp.queues.consume_from)
    )
    try:
        _check(instance.app, registers=True)
        if next(guarded_tasks(instance.app), None) is not None:
            count_by_results(instance.app)
        show_outcomes(instance.app)
        parks, ledger = _parks(instance.app), _has_ledger(instance.app)
        if parks and not ledger:
            raise _no_ledger()
        if parks or (ledger and relay_is_needed(instance.app)):
            # Also for messages that another deploy has parked.
            consume_hand_offs(instance.app)
        if ledger:
            instance.taskguard_relay = _start_relay(instance, parks=parks)
    except Exception as error:
        # After any error: a check that failed does not show that tasks can run.
        logger.critical("the worker does not start: %s", error)
        # Celery only logs an exception of a signal receiver. SystemExit stops the worker.
        raise SystemExit(f"taskguard: {error}") from error


class LookAfter(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """Watch the worker's relay and children, and recover lost messages.

    It starts again with each connection, because Celery before 5.6 drops all timers with the old
    connection.
    """

    name = "taskguard-look-after"
    requires = ("celery.worker.consumer.tasks:Tasks",)
    _timers: tuple[Any, ...] = ()

    def start(self, consumer: Any) -> None:
        """Start the timers, and cancel those of the previous connection."""
        for timer in self._timers:
            timer.cancel()
        self._timers = tuple(_timers_of(consumer))


def _timers_of(consumer: Any) -> Iterator[Any]:
    if next(guarded_tasks(consumer.app), None) is not None:
        yield from _look_for_lost_children(consumer)
        yield from _look_for_lost_messages(consumer)
        # Counts of this process: messages that never ran, and all deliveries if it has no children.
        timer = consumer.timer if consumer.hub is None else consumer.hub
        yield timer.call_repeatedly(_LOOK_AT_COUNTS_S, functools.partial(flush_all, due=True))
    relay = getattr(consumer.controller, "taskguard_relay", None)
    if relay is not None:
        relay.keep()
        timer = consumer.timer if consumer.hub is None else consumer.hub
        yield timer.call_repeatedly(_KEEP_RELAY_S, relay.keep)


def _on_child_ready(sender: str | None = None, **_: Any) -> None:
    trace_briefly(get_current_app(), sender)
    flush_when_idle()


def _on_child_shutdown(**_: Any) -> None:
    flush_all()


def _start_relay(worker: Any, *, parks: bool) -> CeleryRelay:
    """Start the relay process before the pool, and before there are connections to inherit.

    If no task parks, the process ends unless messages wait in the ledger.
    """
    forks = worker.pool_cls.__module__ == "celery.concurrency.prefork"
    relay = CeleryRelay(worker.app, forks=forks, parks=parks)
    if forks:
        relay.keep()
    return relay


def _has_ledger(app: Any) -> bool:
    """Return True if the app has a ledger."""
    try:
        return build(app).ledger is not None
    except errors.ConfigurationError:
        return False  # if the app has guarded tasks, `check_worker()` has raised this error


def _no_ledger() -> errors.ConfigurationError:
    return errors.ConfigurationError(
        'A task can wait for its key (busy="park", "latest" or "supersede"), but there is no '
        'ledger to wait in. Configure one (taskguard_ledger_url), or set busy="retry".'
    )


def _parks(app: Any) -> bool:
    return any(compiled.policy.parks for _, compiled in guarded_tasks(app))


def _look_for_lost_children(consumer: Any) -> Iterator[Any]:
    """Check the children of a prefork pool more often than Celery does.

    When a child's pipe closes, Celery checks at once whether the child has ended. If the system
    has not ended it yet, Celery checks again only every 5 s. In every second kill, the message of
    the killed child came back 5 s late.
    """
    maintain = getattr(consumer.pool, "maintain_pool", None)
    if consumer.hub is not None and maintain is not None:
        yield consumer.hub.call_repeatedly(_LOOK_FOR_LOST_CHILDREN_S, maintain)


def _look_for_lost_messages(consumer: Any) -> Iterator[Any]:
    """Redeliver unacknowledged messages after the visibility timeout, with gevent or eventlet.

    kombu does this when a poll of Redis ends without an event. Without an event loop, that never
    happens: its BRPOP ends after 1 s, which is an event, and the poll only after 2 s. So messages
    of a killed worker were never redelivered.
    """
    channel = getattr(consumer.task_consumer, "channel", None)
    interval_s = getattr(channel, "unacked_restore_interval", None)
    if consumer.hub is not None or not interval_s:
        return

    def restore() -> None:
        # A reconnect creates another channel. Until then there is none.
        channel = getattr(consumer.task_consumer, "channel", None)
        if channel is None:
            return
        try:
            channel.qos.restore_visible(
                num=channel.unacked_restore_limit, interval=channel.unacked_restore_throttle
            )
        except channel.connection_errors as error:
            logger.debug("messages of killed workers were not redelivered: %s", error)

    yield consumer.timer.call_repeatedly(interval_s, restore)


def _on_revoked(
    sender: Any = None,
    request: Any = None,
    expired: bool = False,
    terminated: bool = False,
    signum: Any = None,
    **_: Any,
) -> None:
    """Revoke or expire the message's work in the ledger.

    In the pool's child, a revoke looks like a shutdown, so the signal is used. If the message has
    expired, change the ledger only for a task whose calls are stored: it would be sent again, and
    other messages might wait for it.
    """
    compiled = None if sender is None else guarded_function_of(sender)
    if compiled is None:
        return
    # A child that is told to stop counts its delivery as interrupted.
    if not terminated or signum in (signal.SIGKILL, "SIGKILL", "KILL"):
        _count(sender, compiled, request, Ended.EXPIRED if expired else Ended.REVOKED)
    if expired and not compiled.policy.resends:
        return
    try:
        _end(sender, compiled, request, expired=expired)
    except (errors.TaskguardError, TypeError) as error:
        what = "expiry" if expired else "revoke"
        logger.warning("%s: the %s was not recorded: %s", sender.name, what, error)


def _on_failure(sender: Any = None, task_id: str = "", exception: Any = None, **_: Any) -> None:
    """End the work of a message that failed before its guard: in `before_start()`, for example.

    Celery has reported FAILURE to its caller. Otherwise the message would be sent, and fail, many
    times more, and other messages would wait for it. The worker's own process, which reports killed
    children, does nothing here, because it handles no message.
    """
    compiled = None if sender is None else guarded_function_of(sender)
    if compiled is None:
        return
    if isinstance(exception, WorkerLostError):
        runtime_of(sender.app).runner.counting.note_gap()
        return
    request = sender.request
    if request.id != task_id or request.is_eager or in_hand(request) is not None:
        return
    _count(sender, compiled, request, Ended.FAILED)
    error = f"it failed before its guard: {type(exception).__name__}: {exception}"
    try:
        _end(sender, compiled, request, expired=True, error=error)
    except (errors.TaskguardError, TypeError) as unknown:
        logger.warning("%s: its failure was not recorded: %s", sender.name, unknown)


def _count(task: Task, compiled: GuardedFunction, request: Any, ended: Ended) -> None:
    """Count a delivery that never reached its guard. Its arguments may not fit."""
    counting = runtime_of(task.app).runner.counting
    try:
        counting.unrun(_delivery_of(task, compiled, request), ended)
    except (errors.TaskguardError, TypeError):
        counting.unread(task.name, request.id or "", ended)


def _delivery_of(task: Task, compiled: GuardedFunction, request: Any) -> Delivery:
    context = getattr(request, "_context", None) or request
    args, kwargs = body_arguments(task, request.args or (), request.kwargs or {})
    return compiled.delivery(
        args,
        kwargs,
        namespace=runtime_of(task.app).namespace,
        task=task.name,
        message=message_of(context),
        parking=CeleryParking(task),
        promoted=marks_of(context).promoted is not None,
    )


def _end(
    task: Task,
    compiled: GuardedFunction,
    request: Any,
    *,
    expired: bool,
    error: str = EXPIRED,
) -> None:
    """End the message's work, and promote the next message of its line at once.

    If that fails, a relay promotes the next message, or sends this one again.
    """
    runtime = runtime_of(task.app)
    delivery = _delivery_of(task, compiled, request)
    message = delivery.message
    ledger = runtime.ledger
    if ledger is None or delivery.work is None:
        return
    request = ledger.of_run(runtime.runner.request(delivery))
    ended = [
        ledger.expire(work, message=message, error=error)
        if expired
        else ledger.revoke(work, message=message.name)
        for work in (str(request.work), *delivery.formerly)
    ]
    if delivery.parking is not None and (any(ended) or delivery.promoted):
        runtime.runner.never_runs(delivery)


if "celery.worker.control" in sys.modules:  # `celery inspect` looks for the command at its client
    add_inspection()
worker_init.connect(_on_worker_init, weak=False)
celeryd_after_setup.connect(_on_worker_setup, weak=False)
worker_process_init.connect(_on_child_ready, weak=False)
worker_process_shutdown.connect(_on_child_shutdown, weak=False)
task_failure.connect(_on_failure, weak=False)
task_revoked.connect(_on_revoked, weak=False)
