"""On RabbitMQ, declare and use `<queue>.taskguard`, the queue for promoted messages.

Guarantees: a worker consumes from this queue if it can, and never ends because it cannot. The queue
is declared on a channel of its own. If that fails, RabbitMQ closes only this channel: with 406 for
other arguments, 404 if the queue's node is down, 403 without the permission.

Does not know policies: a queue's policy applies to `<queue>.taskguard` only if its pattern matches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from celery import Celery, bootsteps
from kombu.common import ignore_errors
from kombu.entity import Exchange, Queue

__all__ = ["ConsumeBeside", "QueueBeside", "beside_of", "consume_beside"]

logger = logging.getLogger("taskguard")

# The arguments that the queue beside takes over from its queue, and why. It takes over no others,
# because a called message must not be dropped. Bounds are meant for a backlog (x-max-length,
# x-max-length-bytes); x-message-ttl would drop it while no worker is there; a plugin's
# x-message-deduplication would drop it as a duplicate. Unknown arguments may do the same.
_ARGUMENTS = {
    "x-queue-type": "a queue on one node would go down with it, though its queue goes on",
    "x-quorum-initial-group-size": "as many nodes may be lost as of its queue",
    "x-quorum-target-group-size": "as many nodes may be lost as of its queue",
    "x-queue-leader-locator": "placement",
    "x-queue-master-locator": "placement",
    "x-queue-mode": "memory",
    "x-queue-version": "memory",
    "x-max-priority": "a called message keeps its rank among others that are called",
    "x-consumer-timeout": "its bodies take as long as those of its queue",
    "x-delivery-limit": "a message that kills its workers is dead-lettered after as many tries",
    "x-dead-letter-exchange": "a rejected message gets to where it gets from its queue",
    "x-dead-letter-routing-key": "a rejected message gets to where it gets from its queue",
    "x-dead-letter-strategy": "at-least-once, if its queue has that",
    "x-overflow": "at-least-once needs reject-publish; without a length it does nothing",
}
# Queues without one beside. Calls go to the queue itself.
_ALONE = {
    "x-expires": "RabbitMQ deletes it when it is unused, and the queue beside would be left over",
    "x-single-active-consumer": "of two queues two workers may be the active one",
}
_TYPES = (None, "classic", "quorum")  # a stream keeps what was acknowledged

_TRY_AGAIN_S = 10.0
# An attribute of an app.
_KEPT = "_taskguard_queues_beside"
# How long an answer counts to the question whether a queue beside is in service.
_KNOWN_FOR_S = 1.0


def beside_of(app: Celery) -> Mapping[str, QueueBeside]:
    """The queues beside those that this app's worker consumes from, by their names."""
    found: Mapping[str, QueueBeside] = vars(app).get(_KEPT, {})
    return found


def consume_beside(app: Celery, own: Mapping[str, Any]) -> None:
    """Let a worker that is set up consume from queues beside its own.

    `own` has the queues by the names of those beside them. Some have none: calls of their messages
    go to the queue itself.
    """
    vars(app)[_KEPT] = {
        name: QueueBeside(name, queue) for name, queue in own.items() if _has_one_beside(queue)
    }


def _has_one_beside(queue: Any) -> bool:
    arguments = _arguments_of(queue)
    # If RabbitMQ deletes the queue by itself, the queue beside it would be left over.
    if queue.auto_delete or queue.exclusive or any(arguments.get(name) for name in _ALONE):
        return False
    return arguments.get("x-queue-type") in _TYPES


def _arguments_of(queue: Any) -> dict[str, Any]:
    """A queue's arguments, of which kombu keeps some as attributes."""
    given = {"x-expires": queue.expires, "x-max-priority": queue.max_priority}
    arguments = {name: value for name, value in given.items() if value is not None}
    return {**arguments, **(queue.queue_arguments or {})}


class QueueBeside:
    """The queue `name` beside the queue `own`.

    Messages reach it by a fanout exchange of its own, which keeps their routing key. By the
    default exchange the queue's name would be their key, and the key of their dead letters.
    """

    def __init__(self, name: str, own: Any) -> None:
        self.name = name
        self._own = own
        arguments = {k: v for k, v in _arguments_of(own).items() if k in _ARGUMENTS}
        exchange = Exchange(f"{name}.calls", type="fanout")  # type: ignore[no-untyped-call]  # kombu has no types
        self.queue: Any = Queue(  # type: ignore[no-untyped-call]
            name,
            exchange,
            routing_key=name,
            queue_arguments=arguments,
            consumer_arguments=own.consumer_arguments,
            # Consumers and producers would declare it on the channel that they work with.
            no_declare=True,
        )
        self._known_until_s, self._is_served = 0.0, False
        self._said: set[str] = set()

    def options(self, routing_key: str) -> dict[str, Any]:
        """How a message with this routing key is sent through it."""
        exchange = self.queue.exchange.name
        return {"queue": self.queue, "exchange": exchange, "routing_key": routing_key}

    def open(self, connection: Any) -> bool:
        """Declare it; returns whether a worker can consume from it."""
        # If its own queue is not to be declared, its arguments are not known here.
        actions = [self._look] if self._own.no_declare else [self._declare, self._bind, self._look]
        problem: Exception | None = None
        for action in actions:
            try:
                with _channel(connection) as channel:
                    action(channel)
            except connection.channel_errors as error:
                problem = problem or error
                continue
            if problem is not None:
                self._say_other(problem)
            return True
        self._say_missing(problem)
        return False

    def serves(self, app: Celery) -> bool:
        """Whether a worker consumes from it. RabbitMQ is asked at most once a second."""
        now_s = time.monotonic()
        if now_s >= self._known_until_s:
            try:
                with app.connection_or_acquire() as connection, _channel(connection) as channel:
                    self._is_served = self._look(channel) > 0
            except Exception as error:  # noqa: BLE001  # missing, or down; sending says what it is
                logger.debug("the queue %s is not in service: %s", self.name, error)
                self._is_served = False
            self._known_until_s = now_s + _KNOWN_FOR_S
        return self._is_served

    def _declare(self, channel: Any) -> None:
        self.queue(channel).queue_declare()
        self._bind(channel)

    def _bind(self, channel: Any) -> None:
        """For a queue that was declared otherwise."""
        queue = self.queue(channel)
        queue.queue_declare(passive=True)
        queue.exchange.declare()
        queue.queue_bind()

    def _look(self, channel: Any) -> int:
        """How many consume from it. Raises a channel error where queue or exchange is missing."""
        queue = self.queue(channel)
        queue.exchange.declare(passive=True)
        consumers: int = queue.queue_declare(passive=True).consumer_count
        return consumers

    def _say_other(self, problem: Exception) -> None:
        self._warn(
            f"The queue {self.name} exists and cannot be declared with the arguments of "
            f"{self._own.name}: {problem}. taskguard uses it unchanged. If its arguments are "
            f"wrong, stop the workers and run `rabbitmqctl delete_queue {self.name}`: the relay "
            "sends its messages again."
        )

    def _say_missing(self, problem: Exception | None) -> None:
        self._warn(
            f"The queue {self.name} cannot be used: {problem}. Until it can, promoted messages go "
            f"to {self._own.name}, behind its backlog. The worker tries again every "
            f"{_TRY_AGAIN_S:g} s."
        )

    def _warn(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.warning("%s", text)


@contextmanager
def _channel(connection: Any) -> Iterator[Any]:
    """A channel of its own."""
    channel = connection.channel()
    try:
        yield channel
    finally:
        ignore_errors(connection, channel.close)  # type: ignore[no-untyped-call]


class ConsumeBeside(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """A worker consumes from the queues beside its own, as far as they are there.

    It must be one of the app's steps before the worker is made, and does nothing until
    `consume_beside()` was called. It starts with each new connection of the worker's.
    """

    name = "taskguard-queues-beside"
    requires = ("celery.worker.consumer.tasks:Tasks",)
    _timer: Any = None

    def start(self, consumer: Any) -> None:
        """Add the queues; the worker consumes from them as soon as it can handle messages."""
        self._add(consumer)
        if self._timer is not None:  # of the connection before
            self._timer.cancel()
        if list(self._missing(consumer)):
            again = (_TRY_AGAIN_S, self._try_again, (consumer,))
            self._timer = consumer.timer.call_repeatedly(*again)

    def _try_again(self, consumer: Any) -> None:
        # In some pools a timer has a thread of its own.
        consumer.call_soon(self._add_later, consumer)

    def _add_later(self, consumer: Any) -> None:
        if self._add(consumer):
            consumer.task_consumer.consume()

    def _add(self, consumer: Any) -> bool:
        found = [each for each in self._missing(consumer) if each.open(consumer.connection)]
        for each in found:
            consumer.task_consumer.add_queue(each.queue)
        return bool(found)

    def _missing(self, consumer: Any) -> Iterator[QueueBeside]:
        there = {queue.name for queue in consumer.task_consumer.queues}
        return (each for name, each in beside_of(consumer.app).items() if name not in there)
