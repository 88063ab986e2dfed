"""Choose the queue of a stored message after a deploy has changed the route of its task.

A message goes to its original queue as long as a live worker consumes from that queue. Otherwise it
goes to the queue of its task's present route, if a live worker consumes from that one.

Only if a promoted message is not claimed, taskguard requests the workers' queues by remote control,
at most twice a minute. Without a reply (`worker_enable_remote_control=False`) the message stays in
its original queue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from celery import Celery, Signature

__all__ = ["Routes"]

logger = logging.getLogger("taskguard")

_ASK_EVERY_S = 30.0
_ANSWER_S = 1.0


class Routes:
    """The routes of one app, for one sender of stored calls."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._served: frozenset[str] = frozenset()
        self._requested_at_s = -_ASK_EVERY_S

    def present(self, signature: Signature, *, asks: bool) -> dict[str, Any]:
        """Return options for the queue of the present route, or no options if the queue is kept.

        With `asks`, request the workers' queues, unless that was done in the last 30 s.
        """
        stored = _queue_in(signature.options)
        if stored is None or not (asks or self._served):
            return {}
        route = self._app.amqp.router.route(
            {}, signature.task, tuple(signature.args or ()), dict(signature.kwargs or {})
        )
        queue = route.get("queue")
        name = str(getattr(queue, "name", queue))
        if queue is None or name == stored or name == _own_name(stored):
            return {}
        if asks:
            self._ask()
        if stored in self._served or name not in self._served:
            return {}
        task = signature.task
        logger.info("%s: no worker consumes from %s, so it is sent to %s", task, stored, name)
        return {"queue": name, "exchange": None, "routing_key": None}

    def _ask(self) -> None:
        now_s = time.monotonic()
        if now_s - self._requested_at_s < _ASK_EVERY_S:
            return
        self._requested_at_s = now_s
        replies: Mapping[str, Any] = (
            self._app.control.inspect(timeout=_ANSWER_S).active_queues() or {}
        )
        self._served = frozenset(
            str(queue["name"]) for queues in replies.values() for queue in queues or ()
        )


def _queue_in(options: Mapping[str, Any]) -> str | None:
    """Return the queue of a call, or None if an exchange routes it to a queue of another name."""
    queue, exchange, key = (options.get(each) for each in ("queue", "exchange", "routing_key"))
    if queue is not None:
        return str(getattr(queue, "name", queue))
    exchange = str(getattr(exchange, "name", exchange) or "")
    return str(key) if key and exchange in ("", key) else None


def _own_name(queue: str) -> str:
    return queue.removesuffix(".taskguard")
