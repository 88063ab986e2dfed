"""The queue in which promoted messages arrive, and their form there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from kombu import Exchange, Queue, binding

from taskguard_celery.hand_off import consume_hand_offs, hand_off_of, take_promoted, to_hand_off
from taskguard_celery.marks import HEADER, Marks, Route
from taskguard_celery.rabbitmq_queues import beside_of

ORDERS = Exchange("orders", type="topic")
BILLS = Exchange("bills", type="direct")
QUEUES = [
    Queue("plain"),
    Queue("new", ORDERS, routing_key="order.new.#"),
    Queue("old", ORDERS, routing_key="order.*.old"),
    Queue("paid", BILLS, routing_key="paid"),
    Queue("due", [binding(BILLS, routing_key="due"), binding(BILLS, routing_key="overdue")]),
    Queue("odd", Exchange("odd", type="headers"), routing_key="x"),
]


@pytest.fixture
def app() -> Iterator[Celery]:
    """A worker's, which consumes from the queues beside its own, too."""
    with Celery("hand-off", broker="memory://", set_as_current=False) as made:
        made.conf.task_queues = QUEUES
        consume_hand_offs(made)
        yield made


def request_of(route: Route | None) -> Context:
    """A message as it comes by the queue beside its own."""
    came_by = {"exchange": "", "routing_key": "x.taskguard", "priority": 3}
    header = Marks("m", promoted=route).header()
    return Context({"id": "m", "mine": 1, HEADER: header, "delivery_info": came_by})


def is_restored(request: Context) -> bool:
    """Return True if the marks of a promotion are gone, and the other headers are kept."""
    return request.headers == {"mine": 1, HEADER: {"id": "m"}} and not take_promoted(request)


def test_a_message_of_a_queue(app: Celery) -> None:
    """A promoted message goes to the queue beside its own, and arrives with the route of its
    own."""
    options, route = to_hand_off(app, {"queue": "plain"})
    assert options == {"queue": "plain.taskguard", "exchange": None, "routing_key": None}
    request = request_of(route)
    assert take_promoted(request)
    assert is_restored(request)
    assert request.delivery_info == {"exchange": "", "routing_key": "plain", "priority": 3}


@pytest.mark.parametrize(
    ("exchange", "key", "queue"),
    [
        ("orders", "order.new.a.b", "new"),
        ("orders", "order.x.old", "old"),
        ("bills", "paid", "paid"),
        ("bills", "overdue", "due"),
    ],
)
def test_a_message_that_came_by_an_exchange(
    app: Celery, exchange: str, key: str, queue: str
) -> None:
    """A message of an exchange goes to the queue beside the one that the exchange would choose."""
    options, route = to_hand_off(app, {"exchange": exchange, "routing_key": key})
    assert options["queue"] == hand_off_of(queue)
    request = request_of(route)
    assert take_promoted(request)
    assert is_restored(request)
    assert request.delivery_info == {"exchange": exchange, "routing_key": key, "priority": 3}


@pytest.mark.parametrize(
    ("exchange", "key"),
    [
        ("orders", "order.new.old"),  # of two queues
        ("orders", "bill"),
        ("bills", "order"),
        ("odd", "x"),
        ("elsewhere", "x"),
        (None, None),
    ],
)
def test_a_message_whose_queue_is_not_known(
    app: Celery, exchange: str | None, key: str | None
) -> None:
    """If its queue is not known, a promoted message goes by its own route, and is marked as
    promoted."""
    options, route = to_hand_off(app, {"exchange": exchange, "routing_key": key})
    assert options == {}
    request = request_of(route)
    assert take_promoted(request)
    assert request.delivery_info["exchange"] == (exchange or "")


def test_a_message_that_was_not_promoted() -> None:
    """A message that was not promoted does not change."""
    request = request_of(None)
    assert not take_promoted(request)
    assert request.delivery_info["routing_key"] == "x.taskguard"


def arguments_beside(queue: Queue, **settings: Any) -> dict[str, Any] | None:
    """The arguments of the queue beside a queue of RabbitMQ; None if it has none."""
    with Celery("rabbit", broker="amqp://", set_as_current=False) as app:
        app.conf.update(settings)
        app.conf.task_queues = [queue]
        consume_hand_offs(app)
        beside = beside_of(app)
        assert set(beside) <= {hand_off_of(queue.name)}
        return beside[hand_off_of(queue.name)].queue.queue_arguments if beside else None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-queue-type", "quorum"),
        ("x-quorum-initial-group-size", 5),
        ("x-delivery-limit", 3),
        ("x-consumer-timeout", 7_200_000),
        ("x-dead-letter-exchange", "dead"),
        ("x-dead-letter-routing-key", "orders"),
        ("x-dead-letter-strategy", "at-least-once"),
        ("x-overflow", "reject-publish"),
        ("x-max-priority", 9),
    ],
)
def test_a_queue_beside_on_rabbitmq_is_of_its_queues_kind(name: str, value: Any) -> None:
    """The queue of promoted messages keeps this argument of its queue."""
    assert arguments_beside(Queue("orders", queue_arguments={name: value})) == {name: value}


@pytest.mark.parametrize(
    "bounds",
    [
        {"queue_arguments": {"x-max-length": 5}},
        {"queue_arguments": {"x-max-length-bytes": 5}},
        {"queue_arguments": {"x-message-ttl": 5}},
        {"queue_arguments": {"x-message-deduplication": True}},
        {"max_length": 5},
        {"message_ttl": 5},
        {"durable": False},
    ],
    ids=str,
)
def test_a_bound_of_a_queue_drops_no_called_message(bounds: dict[str, Any]) -> None:
    """Limits of a queue's backlog do not apply to the queue of promoted messages."""
    assert arguments_beside(Queue("orders", **bounds)) == {}


def test_priorities_of_a_queue_hold_among_called_messages() -> None:
    """The queue of promoted messages has the priorities of its queue."""
    nine = {"x-max-priority": 9}
    assert arguments_beside(Queue("orders", max_priority=9)) == nine
    assert arguments_beside(Queue("orders"), task_queue_max_priority=9) == nine


@pytest.mark.parametrize(
    "kind",
    [
        {"exclusive": True},
        {"auto_delete": True},
        {"expires": 60},
        {"queue_arguments": {"x-expires": 60_000}},
        {"queue_arguments": {"x-single-active-consumer": True}},
        {"queue_arguments": {"x-queue-type": "stream"}},
    ],
    ids=str,
)
def test_some_queues_have_none_beside_them(kind: dict[str, Any]) -> None:
    """A queue that ends by itself, or has one active consumer, has no queue of promoted
    messages."""
    assert arguments_beside(Queue("orders", **kind)) is None


def test_an_own_declaration_of_the_queue_beside_stays() -> None:
    """If the user declares the queue of promoted messages, that declaration stays."""
    with Celery("own", broker="amqp://", set_as_current=False) as app:
        app.amqp.queues.select(["orders", hand_off_of("orders")])
        consume_hand_offs(app)
        assert set(app.amqp.queues.consume_from) == {"orders", hand_off_of("orders")}
        assert not beside_of(app)
