"""Through which queue those come who were called, and what their messages are there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from kombu import Exchange, Queue, binding

from taskguard_celery.hand_off import consume_hand_offs, hand_off_of, take_called, to_hand_off

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


def request_of(headers: dict[str, Any]) -> Context:
    """A message as it comes by the queue beside its own."""
    came_by = {"exchange": "", "routing_key": "x.taskguard", "priority": 3}
    return Context({"headers": {"mine": 1, **headers}, "delivery_info": came_by})


def test_a_message_of_a_queue(app: Celery) -> None:
    """It comes by the queue beside, and is one of its own queue there."""
    options, headers = to_hand_off(app, {"queue": "plain"})
    assert options == {"queue": "plain.taskguard", "exchange": None, "routing_key": None}
    request = request_of(headers)
    assert take_called(request)
    assert request.headers == {"mine": 1}
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
    """The same, by the queue beside that which the exchange brought it to."""
    options, headers = to_hand_off(app, {"exchange": exchange, "routing_key": key})
    assert options["queue"] == hand_off_of(queue)
    request = request_of(headers)
    assert take_called(request)
    assert request.headers == {"mine": 1}
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
    """It comes as it came before, and says that it was called."""
    options, headers = to_hand_off(app, {"exchange": exchange, "routing_key": key})
    assert options == {}
    request = request_of(headers)
    assert take_called(request)
    assert request.delivery_info["exchange"] == exchange


def test_a_message_that_was_not_called() -> None:
    """It stays as it is."""
    request = request_of({})
    assert not take_called(request)
    assert request.delivery_info["routing_key"] == "x.taskguard"
