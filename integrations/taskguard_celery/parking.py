"""`busy="park"` for Celery: a message leaves its queue for the ledger, and a worker relays.

Guarantees: what is sent again is the same message (id, links, chord, group, headers, expiry,
priority, route), with the numbers that the ledger knows. One whose expiry is past is sent, too: the
worker that gets it says REVOKED, as Celery does, and takes it out of its line (`startup.py`). So
whoever calls needs neither its task nor its result backend, and one whose end nobody has heard is
sent again. Each worker with a task that parks has a thread that may become
the relay; it ends with its worker. In a prefork pool that is a thread of its first child: the
parent forks at any moment, and what another thread has locked then (SQLite's own mutexes, for
example) stays locked in the child for ever.

Read next: `hand_off.py`, for how who is called comes; `calls.py`; in taskguard `parking.py` and
`relay.py`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from billiard.process import current_process
from celery import Celery, Task
from celery.exceptions import TaskRevokedError
from celery.signals import (
    task_failure,
    task_retry,
    worker_process_shutdown,
    worker_shutdown,
    worker_shutting_down,
)
from celery.states import REVOKED

from taskguard import MessageRef, Relay
from taskguard_celery.calls import NAME, CelerySender, call_in_hand, call_of
from taskguard_celery.message import NotPublishedError
from taskguard_celery.runtime import runtime_of

if TYPE_CHECKING:
    from taskguard import Claim

__all__ = [
    "CeleryParking",
    "gave_up",
    "is_first_child",
    "mark_superseded",
    "start_relay",
]

logger = logging.getLogger("taskguard")

# So long a worker that ends waits for its relay to step down: another one goes on at once then.
_STEP_DOWN_S = 2.0

# An attribute of the request whose work has failed, and keeps its place in its key's line.
_FAILED = "taskguard_failed"

_relays: list[tuple[Relay, threading.Thread]] = []


class CeleryParking:
    """How the message that `task` is handling is parked."""

    queue = NAME

    def __init__(self, task: Task) -> None:
        self._task = task

    def call(self) -> dict[str, Any]:
        """The message in hand as a stored call."""
        return call_in_hand(self._task)

    def send(self, call: Mapping[str, Any], message: MessageRef) -> None:
        """Publish a stored call; raises unless the broker took it."""
        CelerySender(self._task.app).hand_off(dict(call), message)

    def failed(self, claim: Claim) -> None:
        """Wait for Celery to say whether it retries: around the guard there is `autoretry_for`."""
        setattr(self._task.request, _FAILED, claim)


def gave_up(task: Task, request: Any) -> None:
    """The message in hand does not come again: its work, if it has failed, leaves its line."""
    claim = vars(request).pop(_FAILED, None)
    if claim is not None:
        runtime = runtime_of(task.app)
        again = claim.request.message.retries + 1
        parking = CeleryParking(task)
        runtime.runner.line.gave_up(claim, parking, retries=again, app=runtime.namespace)


def _on_failure(sender: Any = None, **_: Any) -> None:
    gave_up(sender, sender.request)


def _on_retry(sender: Any = None, request: Any = None, reason: Any = None, **_: Any) -> None:
    """Celery has sent the message again: until it comes its work keeps its place."""
    claim = vars(request).pop(_FAILED, None)
    if claim is None:
        return
    runtime, call = runtime_of(sender.app), None
    if reason.sig is not None:  # with what the retry has changed: arguments, for example
        again = {k: v for k, v in reason.sig.options.items() if k not in ("countdown", "eta")}
        call = call_of(sender.app, {**reason.sig, "options": again}, sender.serializer)
    again, in_s = claim.request.message.retries + 1, _seconds_until(reason.when)
    runtime.runner.line.retried(claim, retries=again, call=call, app=runtime.namespace, in_s=in_s)


def _seconds_until(when: Any) -> float:
    """Of a retry: a number of seconds, a time, or at once."""
    if isinstance(when, datetime):
        now = datetime.now(when.tzinfo or UTC).replace(tzinfo=when.tzinfo)
        when = (when - now).total_seconds()
    return max(0.0, float(when or 0.0))


def mark_superseded(task: Task, *, key: str) -> None:
    """Tell the caller of the message in hand that it never runs: REVOKED, also to chord and chain.

    Raises NotPublishedError where the result backend does not take that: the message stays alive.
    """
    request = task.request
    error = TaskRevokedError(f"superseded: a newer message of {key} took its place")
    ignores = task.ignore_result or getattr(request, "ignore_result", False)
    try:
        task.backend.mark_as_failure(
            request.id,
            error,
            request=request,
            store_result=not ignores,
            call_errbacks=False,
            state=REVOKED,
        )
    except Exception as failed:
        raise NotPublishedError(f"{type(failed).__name__}: {failed}") from failed


def is_first_child() -> bool:
    """Whether this process of a prefork pool is its first one, or stands in for that."""
    return getattr(current_process(), "index", None) == 0


def start_relay(app: Celery) -> None:
    """A thread that relays whenever this worker is the one to do so."""
    sender = CelerySender(app)
    relay = Relay(runtime_of(app), {NAME: sender}, {NAME: sender.hand_off})
    thread = threading.Thread(target=relay.run, name="taskguard-relay", daemon=True)
    _relays.append((relay, thread))
    thread.start()


def _stop_relays(**_: Any) -> None:
    for relay, _thread in _relays:
        relay.stop()


def _join_relays(**_: Any) -> None:
    while _relays:
        relay, thread = _relays.pop()
        relay.stop()
        thread.join(_STEP_DOWN_S)


task_failure.connect(_on_failure, weak=False)
task_retry.connect(_on_retry, weak=False)
worker_shutting_down.connect(_stop_relays, weak=False)
worker_shutdown.connect(_join_relays, weak=False)
worker_process_shutdown.connect(_join_relays, weak=False)
