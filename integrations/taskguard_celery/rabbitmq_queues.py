"""On RabbitMQ, declare and use `<queue>.taskguard`, the queue for promoted messages.

In the code, this queue is the queue "beside" its own queue.

Guarantees: a worker consumes from this queue if it can, and never ends because it cannot. The queue
is declared on a channel of its own. If that fails, RabbitMQ closes only this channel: with 406 for
other arguments, 404 if the queue's node is down, 403 without the permission.

It does not know policies: a policy applies to `<queue>.taskguard` only if its pattern matches.
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

# The arguments that the queue copies from its own queue, and why. It copies no others, because a
# promoted message must not be dropped. x-max-length and x-max-length-bytes are meant for a backlog.
# x-message-ttl would drop the message while no worker runs. A plugin's x-message-deduplication
# would drop it as a duplicate. Unknown arguments may drop messages, too.
_ARGUMENTS = {
    "x-queue-type": "a classic queue would be down with its node, while a quorum queue goes on",
    "x-quorum-initial-group-size": "both queues survive the loss of as many nodes",
    "x-quorum-target-group-size": "both queues survive the loss of as many nodes",
    "x-queue-leader-locator": "placement",
    "x-queue-master-locator": "placement",
    "x-queue-mode": "memory",
    "x-queue-version": "memory",
    "x-max-priority": "a promoted message keeps its rank among other promoted messages",
    "x-consumer-timeout": "the bodies take equally long",
    "x-delivery-limit": "a message that kills its workers is dead-lettered after as many tries",
    "x-dead-letter-exchange": "a rejected message is dead-lettered as from its own queue",
    "x-dead-letter-routing-key": "a rejected message is dead-lettered as from its own queue",
    "x-dead-letter-strategy": "at-least-once, if its own queue has that",
    "x-overflow": "at-least-once needs reject-publish; without a length it does nothing",
}
# Arguments of queues that get no second queue. Promoted messages go to the queue itself.
_ALONE = {
    "x-expires": "RabbitMQ deletes an unused queue, and `<queue>.taskguard` would remain",
    "x-single-active-consumer": "each of the two queues could have another active consumer",
}
_TYPES = (None, "classic", "quorum")  # a stream keeps what was acknowledged

_TRY_AGAIN_S = 10.0
# An attribute of an app.
_KEPT = "_taskguard_queues_beside"
# How long a worker trusts its last check whether the queue is in service, in seconds.
_KNOWN_FOR_S = 1.0


def beside_of(app: Celery) -> Mapping[str, QueueBeside]:
    """Return the `<queue>.taskguard` queues of this app's worker, by name."""
    found: Mapping[str, QueueBeside] = vars(app).get(_KEPT, {})
    return found


def consume_beside(app: Celery, own: Mapping[str, Any]) -> None:
    """Make a worker that is being set up consume from `<queue>.taskguard` of its queues.

    `own` maps the name of each such queue to its own queue. Some queues get none: their promoted
    messages go to the queue itself.
    """
    vars(app)[_KEPT] = {
        name: QueueBeside(name, queue) for name, queue in own.items() if _has_one_beside(queue)
    }


def _has_one_beside(queue: Any) -> bool:
    arguments = _arguments_of(queue)
    # If RabbitMQ deletes the queue automatically, `<queue>.taskguard` would remain.
    if queue.auto_delete or queue.exclusive or any(arguments.get(name) for name in _ALONE):
        return False
    return arguments.get("x-queue-type") in _TYPES


def _arguments_of(queue: Any) -> dict[str, Any]:
    """Return a queue's arguments. kombu keeps some of them as attributes."""
    given = {"x-expires": queue.expires, "x-max-priority": queue.max_priority}
    arguments = {name: value for name, value in given.items() if value is not None}
    return {**arguments, **(queue.queue_arguments or {})}


class QueueBeside:
    """The queue `name` for promoted messages of the queue `own`.

    Messages reach it through its own fanout exchange, so they keep their routing key. With the
    default exchange, the queue's name would be their key, and the key of their dead letters.
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
            # Otherwise consumers and producers would declare it on their own channel.
            no_declare=True,
        )
        self._known_until_s, self._is_served = 0.0, False
        self._said: set[str] = set()

    def options(self, routing_key: str) -> dict[str, Any]:
        """Return the options that send a message with this routing key through the queue."""
        exchange = self.queue.exchange.name
        return {"queue": self.queue, "exchange": exchange, "routing_key": routing_key}

    def open(self, connection: Any) -> bool:
        """Declare the queue. Return True if a worker can consume from it."""
        # If its own queue must not be declared, its arguments are not known here.
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
        """Return True if a worker consumes from it. Checks RabbitMQ at most once a second."""
        now_s = time.monotonic()
        if now_s >= self._known_until_s:
            try:
                with app.connection_or_acquire() as connection, _channel(connection) as channel:
                    self._is_served = self._look(channel) > 0
            except Exception as error:  # noqa: BLE001  # missing or down; sending raises the error
                logger.debug("the queue %s is not in service: %s", self.name, error)
                self._is_served = False
            self._known_until_s = now_s + _KNOWN_FOR_S
        return self._is_served

    def _declare(self, channel: Any) -> None:
        self.queue(channel).queue_declare()
        self._bind(channel)

    def _bind(self, channel: Any) -> None:
        """Bind a queue that was declared with other arguments."""
        queue = self.queue(channel)
        queue.queue_declare(passive=True)
        queue.exchange.declare()
        queue.queue_bind()

    def _look(self, channel: Any) -> int:
        """Return the number of consumers. Raises a channel error without queue or exchange."""
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
    """Open a separate channel."""
    channel = connection.channel()
    try:
        yield channel
    finally:
        ignore_errors(connection, channel.close)  # type: ignore[no-untyped-call]


class ConsumeBeside(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """Make a worker consume from the `<queue>.taskguard` queues that exist.

    Add it to the app's steps before the worker is created. It does nothing until `consume_beside()`
    is called. It starts with each new connection of the worker.
    """

    name = "taskguard-queues-beside"
    requires = ("celery.worker.consumer.tasks:Tasks",)
    _timer: Any = None

    def start(self, consumer: Any) -> None:
        """Add the queues. The worker consumes from them as soon as it can handle messages."""
        self._add(consumer)
        if self._timer is not None:  # of the previous connection
            self._timer.cancel()
        if list(self._missing(consumer)):
            again = (_TRY_AGAIN_S, self._try_again, (consumer,))
            self._timer = consumer.timer.call_repeatedly(*again)

    def _try_again(self, consumer: Any) -> None:
        # In some pools, a timer runs in a thread of its own.
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
