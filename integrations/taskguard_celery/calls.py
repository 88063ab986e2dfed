"""A Celery message as JSON, to be stored with its work and sent again later.

Guarantees: id, root, parent, links, chord, group, headers, time limits, priority and route stay.
The arguments are written by the task's own serializer, and read only if the app accepts that one.
"""

from __future__ import annotations

import base64
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from celery import Celery, Task
from celery.canvas import Signature
from kombu.serialization import dumps, loads, prepare_accept_content

from taskguard import MessageRef
from taskguard_celery.message import COPY_HEADER

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["NAME", "CelerySender", "call_in_hand", "call_of"]

NAME = "celery"


def call_of(app: Celery, signature: Signature, serializer: str | None = None) -> dict[str, Any]:
    """A signature with its options, as JSON."""
    kind, encoding, body = dumps(  # type: ignore[no-untyped-call]  # kombu has no types
        dict(signature), serializer or app.conf.task_serializer
    )
    raw = isinstance(body, bytes)
    return {
        "queue": NAME,
        "kind": kind,
        "encoding": encoding,
        "base64": raw,
        "body": base64.b64encode(body).decode() if raw else body,
    }


def call_in_hand(task: Task) -> dict[str, Any]:
    """The message that `task` is handling."""
    request = task.request
    signature = task.signature_from_request(
        request, retries=request.retries, headers=dict(request.headers or {})
    )
    return call_of(task.app, signature, task.serializer)


class CelerySender:
    """Sends stored calls to an app's broker, whether or not their tasks are imported here.

    Within a `with` block, of one thread, all go by one producer of the app's pool: to take it out
    and put it back for each costs a fifth of the sending.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._block: ExitStack | None = None
        self._producer: Any = None

    def __enter__(self) -> Self:
        self._block = ExitStack()
        return self

    def __exit__(self, *_: object) -> None:
        block, self._block = self._block, None
        self._give_back(block)

    def _give_back(self, block: ExitStack | None) -> None:
        self._producer = None
        if block is not None:
            block.close()

    def __call__(self, call: dict[str, Any], message: MessageRef) -> None:
        """Send a call with these numbers; raises unless the broker took it."""
        body = base64.b64decode(call["body"]) if call["base64"] else call["body"]
        accepted = {*(self._app.conf.accept_content or ()), "json"}
        fields = loads(  # type: ignore[no-untyped-call]  # kombu has no types
            body,
            call["kind"],
            call["encoding"],
            accept=prepare_accept_content(accepted),  # type: ignore[no-untyped-call]
        )
        signature = Signature.from_dict(fields, app=self._app)
        headers = {**(signature.options.get("headers") or {}), COPY_HEADER: message.copy}
        try:
            signature.apply_async(
                retries=message.retries, headers=headers, producer=self._kept_producer()
            )
        except BaseException:
            self._give_back(self._block)  # the next one is sent by another
            raise

    def _kept_producer(self) -> Any:
        if self._block is not None and self._producer is None:
            self._producer = self._block.enter_context(self._app.producer_or_acquire())
        return self._producer
