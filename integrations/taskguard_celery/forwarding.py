"""Send a message again without changing it.

Guarantees: a message keeps its id, links, chord, group, parent, root, priority, route, headers,
properties, serializer and compression. The task that runs at that moment adds nothing to it. The
message is published outside every task, in an empty context. Its own task's `apply_async()` and
`task_routes` are bypassed. `before_task_publish` handlers run, but change nothing.

Two properties are not kept: the broker's `expiration` (see `message.py`), and RabbitMQ's `user_id`,
which names the publishing user.

Read next: `marks.py`; `calls.py` for how a message is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context as Variables
from datetime import datetime
from decimal import Decimal
from typing import Any

from celery import Celery, Task
from celery._state import _task_stack
from celery.app.routes import Router
from celery.app.task import Context
from celery.canvas import Signature

from taskguard.integration import trace_context
from taskguard_celery.marks import HEADER, MESSAGE_HEADERS, Marks, Stored, marks_of, publishing

__all__ = ["came", "forward", "outside", "signature_in_hand"]

_PROPERTIES = "taskguard_properties"
_OPTIONS = (
    "link",
    "link_error",
    "chain",
    "chord",
    "priority",
    "queue",
    "exchange",
    "routing_key",
    "serializer",
    "compression",
    "delivery_mode",
)
# Properties that an option sets, or that belong to one delivery or to its publisher.
_NOT_KEPT = frozenset(
    {
        "application_headers",
        "body_encoding",
        "content_encoding",
        "content_type",
        "delivery_info",
        "delivery_mode",
        "delivery_tag",
        "expiration",
        "headers",
        "priority",
        "user_id",
    }
)
# Attributes of a request that are no custom headers.
_NO_HEADERS = frozenset({*vars(Context), *MESSAGE_HEADERS, "compression"})
_OWN = ("_", "taskguard_")
_HEADER_VALUES = (str, bytes, int, float, Decimal, datetime, dict, list, tuple, type(None))
# Headers that RabbitMQ sets.
_NOT_CARRIED = (
    "x-acquired-count",
    "x-death",
    "x-delivery-count",
    "x-first-death-",
    "x-last-death-",
)


def signature_in_hand(task: Task) -> Signature:
    """Return the message that `task` is handling as a signature with headers and properties."""
    request = task.request
    carried, custom = vars(request), _custom_headers(request)
    headers = {name: carried[name] for name in MESSAGE_HEADERS if name in carried}
    headers |= {name: custom[name] for name in custom if not name.startswith(_NOT_CARRIED)}
    headers.pop("eta", None)  # it was for the worker that has the message
    headers.setdefault("ignore_result", bool(request.ignore_result))
    signature = task.signature_from_request(request, retries=request.retries, headers=headers)
    properties = request.properties or {}
    signature.options.pop("redelivered", None)  # of `delivery_info`, as the route is
    signature.options.update(
        serializer=marks_of(request).serializer or None,
        compression=carried.get("compression"),
        delivery_mode=properties.get("delivery_mode"),
        **{_PROPERTIES: {k: v for k, v in properties.items() if k not in _NOT_KEPT}},
    )
    return signature


def _custom_headers(request: Context) -> dict[str, Any]:
    """Return the headers of a message that are not Celery's own.

    They are in `request.headers`, unless the message has a header named "headers", as Sentry sets
    it. Celery takes its value for all headers. Then they are attributes of the request.
    """
    carried, custom = vars(request), request.headers or {}
    if HEADER not in carried or HEADER in custom:
        return dict(custom)
    found = {
        name: value
        for name, value in carried.items()
        # Other attributes have been set in this process.
        if not (name in _NO_HEADERS or name.startswith(_OWN)) and isinstance(value, _HEADER_VALUES)
    }
    return {**found, "headers": custom}


def came(signature: Signature) -> bool:
    """Return True if a stored call is a message that was delivered to a worker."""
    return _PROPERTIES in signature.options


def forward(
    app: Celery,
    signature: Signature,
    marks: Marks,
    *,
    retries: int,
    countdown: float | None = None,
    **publishing_options: Any,
) -> None:
    """Send a delivered message again. Raises unless the broker took it."""
    options = signature.options
    headers = {**options["headers"], "retries": retries}
    headers.pop(HEADER, None)
    args, kwargs = signature.args or (), signature.kwargs or {}
    stored = Stored(args, kwargs, headers, options[_PROPERTIES])
    kept = {name: options[name] for name in _OPTIONS if options.get(name) is not None}

    def send() -> None:
        with publishing(marks, stored):
            app.send_task(
                signature.task,
                list(args),
                dict(kwargs),
                task_id=options["task_id"],
                countdown=countdown,
                retries=retries,
                headers=headers,
                # Also in the event `task-sent`, which has no headers.
                argsrepr=headers.get("argsrepr"),
                kwargsrepr=headers.get("kwargsrepr"),
                root_id=headers.get("root_id"),
                parent_id=headers.get("parent_id"),
                reply_to=options.get("reply_to"),
                ignore_result=True,  # for this call; the message's own value is in its headers
                add_to_parent=False,
                router=Router(queues=app.amqp.queues, app=app),
                task_type=signature,  # has no options or route of its own
                **kept,
                **publishing_options,
            )

    outside(send, headers)


@contextmanager
def _no_task() -> Iterator[None]:
    """Hide the running tasks of this thread or greenlet from Celery."""
    tasks = list(_task_stack.stack)
    try:
        for _ in tasks:
            _task_stack.pop()
        yield
    finally:
        # A time limit may have interrupted the loop above.
        for task in tasks[len(_task_stack.stack) :]:
            _task_stack.push(task)


def outside(function: Any, headers: Mapping[str, Any] | None = None) -> Any:
    """Call a function outside the running task, in an empty `contextvars` context.

    `headers`: those of a stored call, whose trace goes on.
    """

    def call() -> Any:
        with trace_context(headers):
            return function()

    with _no_task():
        return Variables().run(call)
