"""`busy="park"` for Celery: a message waits in the ledger, and a worker runs the relay.

Guarantees: taskguard sends the same message again (id, links, chord, group, headers, expiry,
priority, route), with the numbers that the ledger has. An expired message is sent as well: the
worker that gets it marks it REVOKED, as Celery does, and removes it from its line (`startup.py`).
So the process that promotes a message needs neither its task nor its result backend. A message is
sent again until its caller can read its final state.

Each worker with a task that parks may become the relay. With a prefork pool, the relay is a process
of its own, because the parent forks at any moment and must run no threads. In other pools it is a
thread.

Read next: `hand_off.py` for the queue of promoted messages; `calls.py`; in taskguard
`run/parking.py` and `outbox/relay.py`.
"""

from __future__ import annotations

import logging
import multiprocessing
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from billiard.process import current_process
from billiard.util import _run_after_forkers
from celery import Celery, Signature, Task, platforms
from celery.exceptions import TaskRevokedError
from celery.signals import (
    task_failure,
    task_retry,
    worker_shutdown,
    worker_shutting_down,
)
from celery.states import FAILURE, REVOKED
from kombu.asynchronous import set_event_loop

from taskguard import errors
from taskguard.integration import MessageRef, Relay, RelayProcess
from taskguard_celery.arguments import body_arguments
from taskguard_celery.calls import NAME, CelerySender, call_in_hand, call_of
from taskguard_celery.chords import count_once
from taskguard_celery.marks import marks_of, name_of
from taskguard_celery.message import NotPublishedError, stores_errors
from taskguard_celery.recognition import guarded_function_of
from taskguard_celery.retries import seconds_until
from taskguard_celery.runtime import build, runtime_of

if TYPE_CHECKING:
    from taskguard import TaskGuard
    from taskguard.integration import Claim, Delivery

__all__ = [
    "CeleryParking",
    "CeleryRelay",
    "fail_unrun",
    "gave_up",
    "relay_is_needed",
    "revoke_unrun",
]

logger = logging.getLogger("taskguard")

# How long a worker that ends waits for its relay to step down, so that another takes over at once.
_STEP_DOWN_S = 2.0
# Interval at which a worker checks whether messages of other deploys wait, in seconds.
_LOOK_FOR_LINES_S = 60.0

# Attribute of a request whose work has failed and keeps its position in the line.
_FAILED = "taskguard_failed"

_relays: list[CeleryRelay] = []


class CeleryParking:
    """Parks the message that `task` is handling."""

    queue = NAME

    def __init__(self, task: Task) -> None:
        self._task = task

    def call(self) -> dict[str, Any]:
        """Return the delivered message as a stored call."""
        return call_in_hand(self._task)

    def send(self, call: Mapping[str, Any], message: MessageRef) -> None:
        """Publish a promoted call. Raises unless the broker took it."""
        CelerySender(self._task.app).hand_off(dict(call), message)

    def failed(self, claim: Claim) -> None:
        """Note a failure. Celery reports later whether `autoretry_for` retries the message."""
        setattr(self._task.request, _FAILED, claim)


def gave_up(task: Task, request: Any) -> None:
    """Remove failed work from its line, because Celery does not send its message again."""
    claim = vars(request).pop(_FAILED, None)
    if claim is not None:
        runtime = runtime_of(task.app)
        again = claim.message.retries + 1
        parking = CeleryParking(task)
        runtime.runner.gave_up(claim, parking, retries=again, app=runtime.namespace)


def _on_failure(sender: Any = None, **_: Any) -> None:
    gave_up(sender, sender.request)


def _on_retry(sender: Any = None, request: Any = None, reason: Any = None, **_: Any) -> None:
    """Keep the position of work whose message Celery has sent again.

    With other arguments or another id, the message may now be other work or have another key.
    """
    claim = vars(request).pop(_FAILED, None)
    if claim is None:
        return
    runtime, call, delivery = runtime_of(sender.app), None, None
    again, in_s = claim.message.retries + 1, seconds_until(reason.when)
    if reason.sig is not None:
        options = {k: v for k, v in reason.sig.options.items() if k not in ("countdown", "eta")}
        again_sig, marks = {**reason.sig, "options": options}, marks_of(request)
        name = name_of(options.get("task_id"), options.get("replaced_task_nesting"))
        marked = replace(marks, message=name, promoted=None)
        call = call_of(sender.app, again_sig, sender.serializer, marks=marked)
        if name != marks.message or _arguments(reason.sig) != _arguments(request):
            message = replace(claim.message, id=name, retries=again, deferrals=0)
            delivery = _retry_of(sender, reason.sig, claim, call, message)
    runner, app = runtime.runner, runtime.namespace
    parking = CeleryParking(sender)
    runner.retried(claim, parking, retries=again, call=call, again=delivery, app=app, in_s=in_s)


def _arguments(call: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(call.args or ()), dict(call.kwargs or {})


def _retry_of(
    task: Task, signature: Signature, claim: Claim, call: Mapping[str, Any], message: MessageRef
) -> Delivery | None:
    """Return the next delivery of a retried message, or None if its arguments make no key."""
    compiled = guarded_function_of(task)
    assert compiled is not None  # noqa: S101  # it had a claim
    try:
        args, kwargs = body_arguments(task, *_arguments(signature))
        return compiled.delivery(
            args,
            kwargs,
            namespace=runtime_of(task.app).namespace,
            task=task.name,
            message=message,
            call=call,
        )
    except (errors.TaskguardError, TypeError) as error:
        logger.warning("%s: the key of its retry is unknown: %s", claim.work, error)
        return None


def revoke_unrun(task: Task, reason: str) -> None:
    """Store for the caller of the delivered message that it never runs: REVOKED, with `reason`.

    Celery notifies its chord and chain, but calls no errbacks, as after any revoke. Eager calls
    raise TaskRevokedError. If the result backend fails, raise NotPublishedError: the message stays
    alive.
    """
    if task.request.is_eager:
        raise TaskRevokedError(reason)
    _store_end(task, TaskRevokedError(reason), call_errbacks=False, state=REVOKED)


def fail_unrun(task: Task, error: Exception) -> None:
    """Store for the caller of the delivered message that it failed, as Celery does after an error.

    If the result backend fails, raise NotPublishedError: the message stays alive.
    """
    _store_end(task, error, call_errbacks=True, state=FAILURE)


def _store_end(task: Task, error: Exception, **options: Any) -> None:
    request = task.request
    count_once(task)
    try:
        task.backend.mark_as_failure(
            request.id,
            error,
            request=request,
            # Celery stores it for the rest of a chain only if it stores it for this message.
            store_result=bool(request.chain)
            or stores_errors(task, vars(request).get("ignore_result")),
            **options,
        )
    except Exception as failed:
        raise NotPublishedError(f"{type(failed).__name__}: {failed}") from failed


class CeleryRelay:
    """The relay of one worker: a process if the pool forks, otherwise a thread.

    With `forks`, the pool forks, so the worker must run no threads. With `parks`, a task of the
    worker may park. Otherwise it relays only if messages of other deploys wait in the ledger.
    """

    def __init__(self, app: Celery, *, forks: bool, parks: bool) -> None:
        self._app = app
        self._parks = parks
        self._process = RelayProcess(self._make_in_child) if forks else None
        self._thread: threading.Thread | None = None
        self._relay: Relay | None = None
        self._stopped = threading.Event()
        _relays.append(self)

    def keep(self) -> None:
        """Start the relay if it is not running. Called every second."""
        if self._process is not None:
            self._process.keep(parks=self._parks)
        elif self._thread is None:
            self._thread = threading.Thread(target=self._run, name="taskguard-relay", daemon=True)
            self._thread.start()

    def step_down(self) -> None:
        """Let another worker's relay take over."""
        self._stopped.set()
        if self._process is not None:
            self._process.step_down()
        if self._relay is not None:
            self._relay.stop()

    def stop(self) -> None:
        """Let another worker's relay take over, and wait for the end of this one."""
        self.step_down()
        if self._process is not None:
            self._process.stop()
        if self._thread is not None:
            self._thread.join(_STEP_DOWN_S)

    def _run(self) -> None:
        relay = self._relay = _make_relay(self._app)
        while not (self._parks or relay.is_needed()):
            if self._stopped.wait(_LOOK_FOR_LINES_S):
                return
        if not self._stopped.is_set():
            relay.run()

    def _make_in_child(self) -> Relay:
        """Create the relay in its process. Forget the worker's connections and event loop."""
        _run_after_forkers()
        set_event_loop(None)
        for process in (current_process(), multiprocessing.current_process()):
            process.name = "taskguard-relay"  # in log lines and in `ps`
        platforms.set_mp_process_title("celeryd", info="taskguard-relay")
        return _make_relay(self._app)


def _make_relay(app: Celery) -> Relay:
    return _relay_of(runtime_of(app), app)


def _relay_of(runtime: TaskGuard, app: Celery) -> Relay:
    sender = CelerySender(app)
    return Relay(runtime, {NAME: sender}, {NAME: sender.hand_off})


def relay_is_needed(app: Celery) -> bool:
    """Return True if messages of this app wait in the ledger. Uses connections of its own."""
    runtime = build(app)
    try:
        return bool(_relay_of(runtime, app).is_needed())
    finally:
        runtime.close()


def _step_down(**_: Any) -> None:
    for relay in _relays:
        relay.step_down()


def _stop(**_: Any) -> None:
    while _relays:
        _relays.pop().stop()


task_failure.connect(_on_failure, weak=False)
task_retry.connect(_on_retry, weak=False)
worker_shutting_down.connect(_step_down, weak=False)
worker_shutdown.connect(_stop, weak=False)
