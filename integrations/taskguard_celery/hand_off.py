"""How a message that is called from a line comes to a worker: by the queue beside its own.

At the end of its own queue it would stand behind all that have to be parked before. So workers
consume from `<queue>.taskguard` as well. There it is a message of its own queue, or of its own
exchange, for retries and whatever else is sent with its route.

Guarantees: a called message says so (`marks.py`), however it was sent. On RabbitMQ the queue beside
is the same kind of queue, and the message keeps its routing key. So a rejected message is
dead-lettered as from its own queue. A queue beside that is down, missing, forbidden, or has other
arguments stops no worker: without it a message is sent to its own queue (`rabbitmq_queues.py`).

Does not guarantee that the queue of a message is found that came by an exchange: not if several
queues of this app have it, nor by a headers exchange. Then it comes by that exchange, behind all
others. It does not know the policies of RabbitMQ either.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from celery import Celery
from kombu.common import Broadcast

from taskguard_celery.broker import broker_kind
from taskguard_celery.marks import HEADER, Route, marks_of
from taskguard_celery.rabbitmq_queues import beside_of, consume_beside

__all__ = ["consume_hand_offs", "hand_off_of", "take_called", "to_hand_off"]


def hand_off_of(queue: str) -> str:
    """The queue beside a queue, through which called messages come."""
    return f"{queue}.taskguard"


def consume_hand_offs(app: Celery) -> None:
    """Let a worker that is set up consume from the queue beside each of its own, too."""
    queues = app.amqp.queues
    if not queues.create_missing:
        return
    own = {
        hand_off_of(name): queue
        for name, queue in queues.consume_from.items()
        # One of those beside may be among them, as an application's own declaration.
        if not (isinstance(queue, Broadcast) or name.endswith(hand_off_of("")))
        and hand_off_of(name) not in queues.consume_from
    }
    if broker_kind(app) == "amqp":
        consume_beside(app, own)
        return
    for name in own:
        queues.select_add(queues.new_missing(name))


def to_hand_off(app: Celery, options: Mapping[str, Any]) -> tuple[dict[str, Any], Route]:
    """Options by which a call that has these goes through the queue beside its own; its own route.

    Without options: this app does not have that queue, or the call's own queue is not known.
    """
    queue, exchange, key = (options.get(each) for each in ("queue", "exchange", "routing_key"))
    queue = getattr(queue, "name", queue)
    route: Route = (queue, None, None) if queue is not None else (None, exchange, key)
    if queue is None:
        queue = _queue_of(app, exchange, key)
    name = hand_off_of(queue) if isinstance(queue, str) else ""
    beside = beside_of(app).get(name)
    if beside is not None:
        return (beside.options(str(key or queue)) if beside.serves(app) else {}), route
    if name not in app.amqp.queues:
        return {}, route
    return {"queue": name, "exchange": None, "routing_key": None}, route


def take_called(request: Any) -> bool:
    """Whether the message was called; it is one of its own queue or exchange then."""
    marks = marks_of(request)
    if marks.called is None:
        return False
    header = dataclasses.replace(marks, called=None).header()
    setattr(request, HEADER, header)
    if HEADER in (request.headers or {}):
        request.headers = {**request.headers, HEADER: header}
    queue, exchange, key = marks.called
    own: dict[str, Any] = {}
    if queue is not None:
        own = {"exchange": "", "routing_key": queue}
    elif exchange is not None or key is not None:
        own = {"exchange": exchange, "routing_key": key}
    request.delivery_info = {**(request.delivery_info or {}), **own}
    return True


def _queue_of(app: Celery, exchange: Any, key: Any) -> str | None:
    """The one queue of this app that an exchange brings such messages to."""
    found = [
        str(name)
        for name, queue in app.amqp.queues.items()
        if any(_leads(*binding, exchange, key) for binding in _bindings(queue))
    ]
    return found[0] if len(found) == 1 else None


def _bindings(queue: Any) -> Iterator[tuple[Any, Any]]:
    yield queue.exchange, queue.routing_key
    for each in queue.bindings or ():
        yield each.exchange, each.routing_key


def _leads(bound: Any, pattern: Any, exchange: Any, key: Any) -> bool:
    if bound is None or not exchange or bound.name != exchange:
        return False
    if bound.type == "topic":
        # 11 ms, which a worker on RabbitMQ, or whoever only sends, need not wait for.
        from kombu.transport.virtual.exchange import TopicExchange

        expression = TopicExchange(None).key_to_pattern(pattern or "")  # type: ignore[no-untyped-call]  # kombu has no types
        return re.match(expression, key or "") is not None
    return bool(bound.type == "direct" and pattern == key)
