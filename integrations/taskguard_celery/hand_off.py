"""Send promoted messages through `<queue>.taskguard`, so that they overtake the backlog.

At the end of its own queue, a promoted message would wait behind messages that have to be parked
first. So workers consume from `<queue>.taskguard` as well. A retry of such a message goes to its
original queue or exchange.

Guarantees: a promoted message has a mark that says so (`marks.py`), by whichever queue it is sent.
On RabbitMQ, `<queue>.taskguard` is of the same kind as its queue, and the message keeps its routing
key. So a rejected message is dead-lettered as from its own queue. If `<queue>.taskguard` is down,
missing, forbidden or has other arguments, workers go on: messages are sent to their own queue
(`rabbitmq_queues.py`).

Not guaranteed: if a message was sent to an exchange, its queue may be unknown. That is so if
several queues of this app match, or for a headers exchange. Then the message is sent to its
exchange, behind the backlog. The policies of RabbitMQ are not known either.
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

__all__ = ["consume_hand_offs", "hand_off_of", "take_promoted", "to_hand_off"]


def hand_off_of(queue: str) -> str:
    """Return the name of the queue for promoted messages of a queue."""
    return f"{queue}.taskguard"


def consume_hand_offs(app: Celery) -> None:
    """Make a worker that is being set up also consume from `<queue>.taskguard` of its queues."""
    queues = app.amqp.queues
    if not queues.create_missing:
        return
    own = {
        hand_off_of(name): queue
        for name, queue in queues.consume_from.items()
        # An application may declare a `<queue>.taskguard` itself.
        if not (isinstance(queue, Broadcast) or name.endswith(hand_off_of("")))
        and hand_off_of(name) not in queues.consume_from
    }
    if broker_kind(app) == "amqp":
        consume_beside(app, own)
        return
    for name in own:
        queues.select_add(queues.new_missing(name))


def to_hand_off(app: Celery, options: Mapping[str, Any]) -> tuple[dict[str, Any], Route]:
    """Return the options that send a call through `<queue>.taskguard`, and the call's own route.

    The options are empty if this app lacks that queue, or if the call's own queue is not known.
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


def take_promoted(request: Any) -> bool:
    """Return True if the message was promoted, and restore its own queue or exchange."""
    marks = marks_of(request)
    if marks.promoted is None:
        return False
    header = dataclasses.replace(marks, promoted=None).header()
    setattr(request, HEADER, header)
    if HEADER in (request.headers or {}):
        request.headers = {**request.headers, HEADER: header}
    queue, exchange, key = marks.promoted
    own: dict[str, Any] = {}
    if queue is not None:
        own = {"exchange": "", "routing_key": queue}
    elif exchange is not None or key is not None:
        own = {"exchange": exchange, "routing_key": key}
    request.delivery_info = {**(request.delivery_info or {}), **own}
    return True


def _queue_of(app: Celery, exchange: Any, key: Any) -> str | None:
    """Return the queue of this app to which an exchange routes the key, or None if ambiguous."""
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
        # Imported here: it takes 11 ms, and most processes do not need it.
        from kombu.transport.virtual.exchange import TopicExchange

        expression = TopicExchange(None).key_to_pattern(pattern or "")  # type: ignore[no-untyped-call]  # kombu has no types
        return re.match(expression, key or "") is not None
    return bool(bound.type == "direct" and pattern == key)
