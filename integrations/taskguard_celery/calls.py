"""Store a Celery message as JSON in the record of its work, and send it from there.

Guarantees: a message that was delivered to a worker is sent again unchanged (`forwarding.py`). A
call that was enqueued is sent by its task's `apply_async()`, with its options, root and parent.
Neither inherits anything from the process that sends it.

An expired call is sent as well, without the `expiration` for which a broker would drop it. Then the
worker that gets it marks it REVOKED, as Celery does with each expired message.

The arguments are written by the message's own serializer, or the task's. taskguard reads them only
if the app accepts that serializer.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from celery import Celery, Task
from celery.app.task import Context
from celery.canvas import Signature
from celery.utils.functional import maybe_list
from celery.utils.time import maybe_make_aware
from kombu.exceptions import OperationalError
from kombu.serialization import dumps, loads, prepare_accept_content

from taskguard import errors
from taskguard.integration import NOT_BEFORE, Existing, MessageRef
from taskguard_celery.eager import failed_eagerly
from taskguard_celery.forwarding import came, forward, outside, signature_in_hand
from taskguard_celery.hand_off import to_hand_off
from taskguard_celery.marks import HEADER, Marks, marks_of, name_of, publishing
from taskguard_celery.message import EXPIRES_HEADER, stores_errors
from taskguard_celery.recognition import guarded_function_of
from taskguard_celery.routes import Routes

__all__ = [
    "NAME",
    "CelerySender",
    "call_in_hand",
    "call_of",
    "id_in",
    "task_id_in",
]

NAME = "celery"


def call_of(
    app: Celery,
    signature: Signature,
    serializer: str | None = None,
    *,
    marks: Marks | None = None,
) -> dict[str, Any]:
    """Return a signature with its options as a JSON value. `expires` becomes an absolute time."""
    fields = dict(signature)
    options = dict(fields.get("options") or {})
    if options.get("expires") is not None:
        options["expires"] = _expires_at(app, options["expires"])
    if marks is not None:
        options["headers"] = {**(options.get("headers") or {}), HEADER: marks.header()}
    fields["options"] = options
    kind, encoding, body = dumps(  # type: ignore[no-untyped-call]  # kombu has no types
        fields, serializer or app.conf.task_serializer
    )
    raw = isinstance(body, bytes)
    return {
        "queue": NAME,
        "kind": kind,
        "encoding": encoding,
        "base64": raw,
        "body": base64.b64encode(body).decode() if raw else body,
    }


def _expires_at(app: Celery, expires: Any) -> str:
    """Return a time, or seconds from now, as text, which every serializer can write."""
    if isinstance(expires, str):
        return expires
    if not isinstance(expires, datetime):
        expires = app.now() + timedelta(seconds=float(expires))
    return str(maybe_make_aware(expires, app.timezone).isoformat())


def call_in_hand(task: Task) -> dict[str, Any]:
    """Return the message that `task` is handling as a stored call."""
    marks = replace(marks_of(task.request), promoted=None)
    return call_of(
        task.app, signature_in_hand(task), marks.serializer or task.serializer, marks=marks
    )


def id_in(existing: Existing, sender: CelerySender) -> str:
    """Return the task id of the message of this work, under which its result will be."""
    if existing.call is not None:
        return sender.task_id_of(json.loads(existing.call))
    return task_id_in(existing.message)


def task_id_in(message: str) -> str:
    """Return the id of the task in the name of a message, as `MessageRef.name` makes it.

    A name has the id, the number of replacements if there were any, and the time of publication.
    """
    name, _, published = message.rpartition("@")
    return (name if published else message).partition("~")[0]


_LINKS = ("link", "link_error", "chain", "chord", "group_id", "group_index")


class CelerySender:
    """Sends stored calls to an app's broker, even if their tasks are not imported here."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._routes = Routes(app)

    def __call__(self, call: dict[str, Any], message: MessageRef) -> None:
        """Send a call with the numbers of `message`. Raises unless the broker took it.

        If no worker consumes from its queue any more, use the present route of its task.
        """
        signature = self._read(call)
        signature.options.update(self._routes.present(signature, asks=True))
        self._send(signature, _marks_in(signature, message), message)

    def send_first(self, call: dict[str, Any], message: MessageRef) -> None:
        """Send a call for the first time, as a child of the running task and in its context."""
        signature = self._read(call)
        self._apply(signature, _marks_in(signature, message), message)

    def hand_off(self, call: dict[str, Any], message: MessageRef) -> None:
        """Send a promoted call through `<queue>.taskguard`, if this app has that queue.

        If the call has a time before which it must not run, the message has that time as its eta.
        """
        signature = self._read(call)
        signature.options.update(self._routes.present(signature, asks=False))
        beside, route = to_hand_off(self._app, signature.options)
        signature.options.update(beside)
        not_before_s, eta = float(call.get(NOT_BEFORE, 0.0)), None
        signature.options.pop("eta", None)
        if not_before_s > time.time():
            # A worker reads it. As an option of `apply_async()` RabbitMQ would delay the message,
            # if there are quorum queues, and bring it by another exchange.
            eta = datetime.fromtimestamp(not_before_s, UTC).isoformat()
        marks = replace(_marks_in(signature, message), promoted=route)
        self._send(signature, marks, message, eta=eta)

    def fail(self, call: dict[str, Any], message: MessageRef, reason: str) -> None:
        """Report FAILURE of a stored call to its caller, chord, chain and errbacks.

        Raises the errors of the result backend.
        """
        del message
        signature = self._read(call)
        options, task = signature.options, self._app.tasks.get(signature.task)
        request = Context({**signature, **options}, delivery_info={})
        request.id, request.group = options["task_id"], options.get("group_id")
        request.errbacks = maybe_list(options.get("link_error"))
        stored = stores_errors(task, options.get("ignore_result"))
        backend = self._app.backend if task is None else task.backend
        error = errors.StoredCallError(f"{signature.task}: {reason}")
        # Errbacks are callbacks of this call, not children of the task that is running here.
        fail = partial(backend.mark_as_failure, request.id, error)
        outside(lambda: fail(request=request, store_result=stored))

    def links_of(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a stored call that name what waits for its result.

        Raises StoredCallError.
        """
        options = self._read(call).options
        return {name: options[name] for name in _LINKS if options.get(name) is not None}

    def task_id_of(self, call: dict[str, Any]) -> str:
        """Return the task id of a stored call. Raises StoredCallError."""
        return str(self._read(call).options["task_id"])

    @contextmanager
    def batch(self) -> Iterator[Callable[[dict[str, Any], MessageRef], None]]:
        """Return a sender of many messages that has its own producer and uses batches if possible.

        If the block ends without an error, the broker has taken all of them. On RabbitMQ, the
        producer requests confirms. Batches need kombu 5.7 and Redis as the broker. Otherwise each
        message is sent at once.
        """
        with ExitStack() as opened:
            connection = opened.enter_context(self._app.connection_for_write())
            if connection.transport.driver_name == "py-amqp":
                connection.transport_options["confirm_publish"] = True
            producer = self._app.amqp.Producer(connection, auto_declare=False)
            options: dict[str, Any] = {"producer": producer}
            if getattr(producer, "supports_batch_publish", False):
                opened.enter_context(producer.batch())
                # A retry changes the channel, after which the batch takes no more messages.
                options["retry"] = False

            def send(call: dict[str, Any], message: MessageRef) -> None:
                signature = self._read(call)
                signature.options.update(self._routes.present(signature, asks=True))
                self._send(signature, _marks_in(signature, message), message, **options)

            yield send

    def _send(
        self,
        signature: Signature,
        marks: Marks,
        message: MessageRef,
        *,
        eta: str | None = None,
        **options: Any,
    ) -> None:
        """Send a call outside the running task. Raises StoredCallError or the broker's errors.

        `eta` goes into the message's headers, for the worker that gets it.
        """
        if eta is not None:
            headers = signature.options.get("headers") or {}
            signature.options["headers"] = {**headers, "eta": eta}
        if not came(signature):
            headers = signature.options.get("headers")
            outside(lambda: self._apply(signature, marks, message, **options), headers)
            return
        self._check_arguments(signature)
        forward(self._app, signature, marks, retries=message.retries, **options)

    def _apply(
        self, signature: Signature, marks: Marks, message: MessageRef, **options: Any
    ) -> None:
        headers = {**(signature.options.get("headers") or {}), HEADER: marks.header()}
        if signature.options.get("expires") is not None:
            headers[EXPIRES_HEADER] = signature.options["expires"]
            # Not as an option of `apply_async()`, for which None means that it is not given.
            signature.options["expires"] = None
        signature["args"] = tuple(signature.args or ())  # JSON has made a list of them
        try:
            with publishing(marks):
                result = signature.apply_async(retries=message.retries, headers=headers, **options)
        except TypeError as error:
            raise _misfit(signature, error) from error
        failed = failed_eagerly(result)
        if failed is not None:
            raise failed

    def _check_arguments(self, signature: Signature) -> None:
        """Check the arguments like `Task.apply_async()`: the task may be newer than the call."""
        task = self._app.tasks.get(signature.task)
        check = getattr(task, "__header__", None) if getattr(task, "typing", False) else None
        if check is None:
            return
        try:
            check(*(signature.args or ()), **(signature.kwargs or {}))
        except TypeError as error:
            raise _misfit(signature, error) from error

    def _read(self, call: dict[str, Any]) -> Signature:
        accepted = {*(self._app.conf.accept_content or ()), "json"}
        try:
            body = base64.b64decode(call["body"]) if call["base64"] else call["body"]
            fields = loads(  # type: ignore[no-untyped-call]  # kombu has no types
                body,
                call["kind"],
                call["encoding"],
                accept=prepare_accept_content(accepted),  # type: ignore[no-untyped-call]
            )
            return Signature.from_dict(fields, app=self._app)
        except Exception as error:
            # The call is damaged, so a later sweep would fail in the same way.
            raise errors.StoredCallError(f"its stored call cannot be read: {error!r}") from error

    def rate_of(self, task: str) -> Any:
        """Return the current rate of a task, or None. Raises LookupError if it is unknown."""
        compiled = guarded_function_of(self._app.tasks[task])
        return None if compiled is None else compiled.policy.starts

    def is_away(self, error: Exception) -> bool:
        """Return True if the error is about the connection to the broker, not about one message."""
        cause = error.__cause__ if isinstance(error, OperationalError) else error
        if cause is None:
            return True
        with self._app.connection_for_write() as connection:
            return isinstance(cause, (*connection.connection_errors, OSError))


def _misfit(signature: Signature, error: TypeError) -> errors.StoredCallError:
    return errors.StoredCallError(
        f"its stored call does not fit {signature.task} any more: {error}"
    )


def _marks_in(signature: Signature, message: MessageRef) -> Marks:
    """Return the marks with which a stored call is sent now."""
    options = signature.options
    nesting = options.get("replaced_task_nesting")
    name = name_of(options.get("task_id"), nesting)
    stored = Marks.read((options.get("headers") or {}).get(HEADER), name) or Marks(name)
    return replace(stored, deferrals=message.deferrals)
