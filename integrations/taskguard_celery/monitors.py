"""Tell monitors the truth: the events of Celery that Flower shows, and `celery inspect taskguard`.

Celery sends no event for a message that ends by an Ignore, so a monitor shows STARTED for ever.
Guarantees: a message that is parked or deferred sends `task-retried`, and one that never runs sends
`task-revoked`. The worker's own process sends them, and only if its events are on. A child sends
nothing. A message that another copy of it answers sends no event, because that copy's event counts.

Not guaranteed: if the parked message runs on another worker at once, its `task-succeeded` may come
before this `task-retried`. Then a monitor shows RETRY for a task that has succeeded.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from celery.utils.imports import symbol_by_name

from taskguard import errors
from taskguard_celery.arguments import body_arguments
from taskguard_celery.message import (
    ComesAgain,
    HasFailed,
    NeverRuns,
    PutBack,
    message_of,
)
from taskguard_celery.recognition import guarded_function_of, guarded_tasks
from taskguard_celery.runtime import build, runtime_of

__all__ = ["add_inspection", "show_outcomes"]


def show_outcomes(app: Any) -> None:
    """Make the worker's process send an event for each guarded message that ends by an Ignore."""
    for task, _ in guarded_tasks(app):
        kind = symbol_by_name(task.Request)
        if not issubclass(kind, _Shown):
            task.Request = type(kind.__name__, (_Shown, kind), {"__slots__": ()})


class _Shown:
    """The part of a request that sends our events."""

    __slots__ = ()

    def on_failure(self, exc_info: Any, *args: Any, **options: Any) -> Any:
        """Do as Celery does, then send the event of our Ignore."""
        ended = super().on_failure(exc_info, *args, **options)  # type: ignore[misc]
        error = getattr(exc_info.exception, "exc", exc_info.exception)
        if isinstance(error, ComesAgain | PutBack):
            self._send("task-retried", exception=str(error), traceback="")
        elif isinstance(error, HasFailed):
            self._send("task-failed", exception=str(error), traceback="")
        elif isinstance(error, NeverRuns):
            self._send("task-revoked", terminated=False, signum=None, expired=False)
        return ended

    def _send(self, kind: str, **fields: Any) -> None:
        self.send_event(kind, **fields)  # type: ignore[attr-defined]  # if events are on


# -- celery inspect taskguard ---------------------------------------------------------------------


def add_inspection() -> None:
    """Add `celery inspect taskguard` to this worker."""
    from celery.worker.control import inspect_command

    inspect_command(name="taskguard")(_inspect)


def _inspect(state: Any, **_: Any) -> dict[str, Any]:
    """List the keys that this worker holds: key, fencing token, since when."""
    from celery.worker import state as worker_state

    requests = list(state.tset(worker_state.active_requests))
    # A pool that forks at any moment must not inherit a connection.
    forks = state.consumer.controller.pool_cls.__module__ == "celery.concurrency.prefork"
    runtime = build(state.app) if forks else runtime_of(state.app)
    try:
        held = [each for request in requests for each in _held(runtime, request)]
    except errors.TaskguardError as error:
        return {"error": f"The leases are unknown: {error}"}
    finally:
        if forks:
            runtime.close()
    number = state.consumer.controller.taskguard_number
    return {"worker": number, "leases": [each for each in held if each.pop("worker") == number]}


def _held(runtime: Any, request: Any) -> Iterator[dict[str, Any]]:
    """Yield the leases of a message at work, also those of other workers that have it."""
    task = request.task
    compiled = guarded_function_of(task)
    if compiled is None or runtime.ledger is None:
        return
    args, kwargs = body_arguments(task, request.args or (), request.kwargs or {})
    delivery = compiled.delivery(
        args,
        kwargs,
        namespace=runtime.namespace,
        task=task.name,
        message=message_of(request._context),  # noqa: SLF001  # as in startup.py
    )
    for key in (delivery.key,) if delivery.bounds is not None else delivery.keys:
        for holder in runtime.ledger.holders(key):
            if holder.owner.is_ours and holder.owner.message == delivery.message.id:
                number, pid = holder.owner.named
                yield {
                    "worker": number,
                    "key": holder.key,
                    "fence": holder.fence,
                    "since": datetime.fromtimestamp(holder.fence / 1e6, UTC).isoformat(),
                    "lease_left_s": round(holder.remaining_s, 1),
                    "task": task.name,
                    "id": request.id,
                    "pid": pid,
                }
