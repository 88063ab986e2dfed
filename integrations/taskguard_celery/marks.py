"""The marks of a Celery message: facts that taskguard stores in one header of the message.

The header contains the id of its message. So a body may copy headers to another message: that
message gets marks of its own. taskguard writes the header when kombu publishes the message. That is
after base classes, `Task.retry(headers=…)`, routers and `before_task_publish` handlers, which may
replace all headers.

Guarantees: a message keeps its marks over retries and deferrals, and while it is stored in the
ledger. A message that was published without this package has no marks, and gets none later: the
time of its first publication stays unknown.

Read next: `forwarding.py`, which sends messages again.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from celery._state import _task_stack
from kombu.messaging import Producer

from taskguard_celery.ticks import take_tick

__all__ = [
    "HEADER",
    "MESSAGE_HEADERS",
    "Marks",
    "Route",
    "Stored",
    "marks_of",
    "name_of",
    "publishing",
]

HEADER = "taskguard"

MESSAGE_HEADERS = (
    "lang",
    "task",
    "id",
    "shadow",
    "eta",
    "expires",
    "group",
    "group_index",
    "retries",
    "timelimit",
    "root_id",
    "parent_id",
    "argsrepr",
    "kwargsrepr",
    "origin",
    "ignore_result",
    "replaced_task_nesting",
    "stamped_headers",
    "stamps",
)
"""Celery's own headers in its message protocol 2."""

# Options of a call that Celery also publishes as properties of its message.
_NO_PROPERTIES = ("argsrepr", "kwargsrepr", "origin")

Route = tuple[str | None, str | None, str | None]
"""A queue, or the exchange and routing key with which a message was sent."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of one message.

    Attributes:
        message: the message's name, from `name_of()`.
        sent_s: when it was first published, in seconds since 1970, or None if unknown.
        deferrals: how often it was deferred.
        tick: the tick of a schedule that it was sent for, or "".
        promoted: the original route of a promoted message, which may be sent by another queue. None
            for any other message.
        serializer: the serializer of its body, or "" if unknown.
    """

    message: str
    sent_s: float | None = None
    deferrals: int = 0
    tick: str = ""
    promoted: Route | None = None
    serializer: str = ""

    def header(self) -> dict[str, Any]:
        """Return the value of the header."""
        values: dict[str, Any] = {
            "sent": self.sent_s,
            "deferrals": self.deferrals,
            "tick": self.tick,
            "promoted": None if self.promoted is None else list(self.promoted),
            "serializer": self.serializer,
        }
        given = {name: value for name, value in values.items() if value not in (None, 0, "")}
        return {"id": self.message, **given}

    @classmethod
    def read(cls, header: Any, message: str) -> Marks | None:
        """Return the marks in a header, or None if they belong to another message."""
        if not isinstance(header, Mapping) or header.get("id") != message:
            return None
        sent_s, promoted = header.get("sent"), header.get("promoted")
        return cls(
            message,
            sent_s=None if sent_s is None else float(sent_s),
            deferrals=int(header.get("deferrals") or 0),
            tick=str(header.get("tick") or ""),
            promoted=None if promoted is None else (promoted[0], promoted[1], promoted[2]),
            serializer=str(header.get("serializer") or ""),
        )


def name_of(message_id: Any, nesting: Any) -> str:
    """Return the name of a message: its id, and how often `Task.replace` has used that id."""
    return f"{message_id}~{nesting}" if nesting else str(message_id)


def marks_of(request: Any) -> Marks:
    """Return the marks of the request's message. They are empty if it has none."""
    name = name_of(request.id, request.replaced_task_nesting)
    # The attribute exists even if a handler has replaced `request.headers`.
    header = vars(request).get(HEADER) or (request.headers or {}).get(HEADER)
    return Marks.read(header, name) or Marks(name)


@dataclass(frozen=True, slots=True)
class Stored:
    """A message as it was delivered.

    Attributes:
        args: its positional arguments.
        kwargs: its keyword arguments.
        headers: all headers except `eta`.
        properties: the properties that no option of `apply_async()` sets.
    """

    args: Any
    kwargs: Any
    headers: Mapping[str, Any]
    properties: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Publishing:
    """The message that this package is publishing.

    Attributes:
        marks: the marks of the message.
        stored: the message as it was delivered, or None if Celery and user code create it.
    """

    marks: Marks
    stored: Stored | None


_publishing: ContextVar[_Publishing | None] = ContextVar("taskguard_publishing", default=None)


@contextmanager
def publishing(marks: Marks, stored: Stored | None = None) -> Iterator[None]:
    """Give these marks to the message with their name, if it is published in the block.

    With `stored`, the message is sent unchanged: `before_task_publish` handlers change nothing.
    """
    token = _publishing.set(_Publishing(marks, stored))
    try:
        yield
    finally:
        _publishing.reset(token)


def _mark(headers: dict[str, Any], body: Any, options: dict[str, Any]) -> Any:
    """Write the marks of a message that is about to be published. Return its body."""
    named = headers if "task" in headers else body  # protocol 1 has id and task in its body
    if not isinstance(named, Mapping) or not {"id", "task"} <= named.keys():
        return body
    name = name_of(named["id"], headers.get("replaced_task_nesting"))
    ours = _publishing.get()
    if ours is not None and ours.marks.message == name:
        marks = ours.marks
        if ours.stored is not None:
            body = _restore(headers, body, options, ours.stored)
    else:
        marks = (
            _in_hand(name, named)
            or Marks.read(headers.get(HEADER), name)
            or Marks(name, sent_s=time.time(), tick=take_tick(named["task"]))
        )
    serializer = options.get("serializer")
    if isinstance(serializer, str):
        marks = replace(marks, serializer=serializer)
    headers[HEADER] = marks.header()
    return body


def _restore(headers: dict[str, Any], body: Any, options: dict[str, Any], stored: Stored) -> Any:
    """Give a message the headers, properties and arguments with which it was delivered."""
    for name in headers.keys() - stored.headers.keys() - {*MESSAGE_HEADERS}:
        del headers[name]
    headers.update(stored.headers)
    for name in _NO_PROPERTIES:
        options.pop(name, None)
    options.update(stored.properties)
    if isinstance(body, dict):  # protocol 1
        return {**body, "args": stored.args, "kwargs": stored.kwargs}
    return (stored.args, stored.kwargs, *body[2:])


def _in_hand(name: str, published: Mapping[str, Any]) -> Marks | None:
    """Return the marks of the delivered message if that is being published again, as by a retry."""
    for task in reversed(_task_stack.stack):
        request = task.request
        if request.called_directly:
            continue
        again = request.retries is not None and published.get("retries") == request.retries + 1
        if name == name_of(request.id, request.replaced_task_nesting) or (
            # A retry with another `task_id=`.
            again and published["task"] == task.name and published.get("root_id") == request.root_id
        ):
            return replace(marks_of(request), message=name, promoted=None)
    return None


def _watch(publish: Any) -> Any:
    @functools.wraps(publish)
    def marked_publish(self: Producer, body: Any, *args: Any, **options: Any) -> Any:
        headers = options.get("headers")
        if isinstance(headers, dict):
            body = _mark(headers, body, options)
        return publish(self, body, *args, **options)

    return marked_publish


# The last function that every app's publishing calls.
Producer.publish = _watch(Producer.publish)  # type: ignore[method-assign]
