"""The queue of RabbitMQ through which called messages come: on one node, and on three."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import celery
import pytest
from kombu import Connection, Exchange, Queue

from support.celery_shop import Shop
from support.needs import need
from support.waiting import patience_s, wait_until
from taskguard_celery.rabbitmq_queues import QueueBeside
from taskguard_sandbox.servers import RabbitMQ, RabbitMQCluster

pytestmark = pytest.mark.debian


@pytest.fixture(scope="module")
def cluster() -> Iterator[RabbitMQCluster]:
    """Three nodes, which a test halts and starts again."""
    need(RabbitMQ)
    with RabbitMQCluster() as made:
        yield made


@pytest.fixture
def cluster_shop(make_shop: Callable[..., Shop], cluster: RabbitMQCluster) -> Shop:
    """A shop on quorum queues. Its processes use the first node, or the second without it."""
    if celery.VERSION < (5, 5):
        pytest.skip("Celery consumes from quorum queues since 5.5")
    return make_shop(
        SHOP_BROKER=";".join(node.url for node in cluster.nodes[:2]),
        SHOP_QUEUE=f"cluster-{time.time_ns()}",
        SHOP_SETTINGS=json.dumps({"task_default_queue_type": "quorum"}),
    )


def beside(shop: Any) -> str:
    """The name of the queue beside the shop's."""
    return f"{shop.tasks.app.conf.task_default_queue}.taskguard"


def consumers(server: RabbitMQ, queue: str) -> int:
    """How many consume from a queue; 0 if it cannot be reached."""
    with Connection(server.url) as connection:
        channel = connection.channel()
        try:
            return int(channel.queue_declare(queue, passive=True).consumer_count)
        except connection.channel_errors:
            return 0


def take_turns(shop: Any, first: int, count: int) -> None:
    """Some messages of a key, of which all but one wait in line."""
    numbers = range(first, first + count)
    results = [shop.tasks.queue_up.delay("a", number, 0.02) for number in numbers]
    assert [each.get(timeout=patience_s()) for each in results] == list(numbers)


def test_a_lost_node_stops_no_worker_on_quorum_queues(
    cluster: RabbitMQCluster, cluster_shop: Shop
) -> None:
    """The queue of promoted messages of a quorum queue is a quorum queue, so it survives the loss
    of its node."""
    shop = cluster_shop
    with shop.worker(concurrency=2) as worker:
        take_turns(shop, 0, 5)
        assert consumers(cluster.nodes[1], beside(shop)) == 1
        cluster.nodes[0].halt()
        try:
            take_turns(shop, 5, 5)
            assert consumers(cluster.nodes[1], beside(shop)) == 1
        finally:
            cluster.nodes[0].start()
        assert worker.process.poll() is None
    assert set(shop.effects().values()) == {1}


def test_a_queue_of_an_earlier_version_is_used_as_it_is(
    cluster: RabbitMQCluster, cluster_shop: Shop
) -> None:
    """A queue of promoted messages of another type is used as it is. While its node is down,
    promoted messages go to their own queue."""
    shop, name = cluster_shop, beside(cluster_shop)
    with Connection(cluster.nodes[2].url) as connection:
        Queue(name, Exchange(name), routing_key=name)(connection.channel()).declare()
    with shop.worker(concurrency=2) as worker:
        take_turns(shop, 0, 5)
        assert consumers(cluster.nodes[0], name) == 1
        assert f"rabbitmqctl delete_queue {name}" in worker.text()
        cluster.nodes[2].halt()
        try:
            take_turns(shop, 5, 5)
            wait_until(lambda: "cannot be used" in worker.text(), message="it says what it lacks")
            take_turns(shop, 10, 5)
        finally:
            cluster.nodes[2].start()
        wait_until(lambda: consumers(cluster.nodes[0], name) == 1, message="used")
        take_turns(shop, 15, 5)
        assert worker.process.poll() is None
    assert set(shop.effects().values()) == {1}


@pytest.mark.parametrize("any_rabbitmq", ["rabbitmq", "newest_rabbitmq"], indirect=True)
@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_a_rejected_message_is_dead_lettered_as_from_its_own_queue(
    make_shop: Callable[..., Shop], any_rabbitmq: RabbitMQ, kind: str
) -> None:
    """A rejected promoted message is dead-lettered with its own routing key."""
    if kind == "quorum" and celery.VERSION < (5, 5):
        pytest.skip("Celery consumes from quorum queues since 5.5")
    name = f"dead-{time.time_ns()}"
    arguments = {
        "x-queue-type": kind,
        "x-dead-letter-exchange": f"{name}.x",
        "x-max-length": 10,
        "x-overflow": "reject-publish",
    }
    queue = {
        "exchange": name,
        "exchange_type": "topic",
        "routing_key": "order.#",
        "queue_arguments": arguments,
    }
    dead = Queue(f"{name}.dead", Exchange(f"{name}.x", type="topic"), routing_key="order.*")
    with Connection(any_rabbitmq.url) as connection:
        bound = dead(connection.channel())
        bound.declare()
        shop = make_shop(
            SHOP_BROKER=any_rabbitmq.url,
            SHOP_QUEUE=name,
            SHOP_SETTINGS=json.dumps({"task_queues": {name: queue}}),
        )
        with shop.worker(concurrency=2):
            for number in range(4):
                shop.tasks.reject.apply_async(
                    ("a", number, 0.1), exchange=name, routing_key=f"order.{number}"
                )
            shop.wait_for_effects(4)
            letters: list[Any] = []

            def is_there() -> bool:
                letters.extend(filter(None, [bound.get(no_ack=True)]))
                return len(letters) == 4

            wait_until(is_there, message=lambda: f"four dead letters, there are {letters}")
    keys = sorted(letter.delivery_info["routing_key"] for letter in letters)
    assert keys == [f"order.{number}" for number in range(4)]
    assert f"{name}.taskguard" in {letter.headers["x-death"][0]["queue"] for letter in letters}


def test_a_queue_that_cannot_be_used_is_named_once(
    rabbitmq: RabbitMQ, caplog: pytest.LogCaptureFixture
) -> None:
    """A queue of promoted messages that cannot be used is logged once."""
    name = f"locked-{time.time_ns()}"
    with Connection(rabbitmq.url) as connection, Connection(rabbitmq.url) as other:
        taken = Queue(f"{name}.taskguard", exclusive=True, durable=False)
        taken(other.channel()).declare()
        for own in (Queue(name), Queue(f"{name}-2", no_declare=True)):
            tried = QueueBeside(f"{own.name}.taskguard", own)
            caplog.clear()
            with caplog.at_level(logging.WARNING, logger="taskguard"):
                assert not tried.open(connection)
                assert not tried.open(connection)
            [record] = caplog.records
            assert f"The queue {own.name}.taskguard cannot be used" in record.getMessage()
        assert QueueBeside(f"{name}-3.taskguard", Queue(f"{name}-3")).open(connection)
        Queue(f"{name}-3.taskguard")(connection.channel()).delete()
