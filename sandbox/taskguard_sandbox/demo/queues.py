"""The two queues as the demo's producer sees them: publish, ask for answers, ask for quiet.

Each item is delivered three times: a message of which the broker holds two copies (the same task
id, the same job id), and a second message. Quiet means that the broker holds no message at all,
waiting, scheduled or not acknowledged.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from uuid import uuid4

import redis
from rq import Queue, Retry
from rq.job import Job, JobStatus

from taskguard_sandbox.demo import invoices, orders
from taskguard_sandbox.workers import CeleryWorker, RQWorker, Worker

__all__ = ["DELIVERIES", "DemoQueue", "Invoices", "Orders"]

DELIVERIES = 3
_CHUNK = 500
_WINDOW = 40


class DemoQueue(ABC):
    """One queue and the items that go through it."""

    name: str
    things: str
    done: str

    def __init__(self, items: Sequence[str], *, broker: str) -> None:
        self.items = items
        self.broker_url = broker
        self.broker = redis.Redis.from_url(broker)
        self.messages: list[str] = []

    @property
    def sent(self) -> int:
        """How many deliveries were asked for."""
        return DELIVERIES * len(self.items)

    def publish(self) -> Iterator[None]:
        """Everything three times; one delivery with each step.

        Shuffled within a window: that the same work comes again soon is what happens in life, and
        lets several workers have it at once.
        """
        for start in range(0, len(self.items), _WINDOW):
            deliveries = []
            for item in self.items[start : start + _WINDOW]:
                first, second = str(uuid4()), str(uuid4())
                self.messages += [first, second]
                deliveries += [(item, first), (item, first), (item, second)]
            random.shuffle(deliveries)
            for item, message in deliveries:
                yield self.send(item, message)

    @abstractmethod
    def send(self, item: str, message: str) -> None:
        """One delivery of the message `message` about `item`."""

    @abstractmethod
    def workers(self) -> list[Worker]:
        """The workers, not started."""

    @abstractmethod
    def waiting(self) -> int:
        """How many messages no worker has taken yet."""

    @abstractmethod
    def quiet(self) -> bool:
        """Whether the broker holds no message, at this moment."""

    @abstractmethod
    def unanswered(self) -> int:
        """How many messages have no result."""

    def close(self) -> None:
        """Close the connection."""
        self.broker.close()

    def _chunks(self) -> Iterator[list[str]]:
        for start in range(0, len(self.messages), _CHUNK):
            yield self.messages[start : start + _CHUNK]


class Orders(DemoQueue):
    """Orders by Celery: one prefork worker with four children."""

    name = orders.QUEUE
    things = "orders"
    done = "shipped"

    def send(self, item: str, message: str) -> None:
        orders.ship.apply_async((item,), task_id=message)

    def workers(self) -> list[Worker]:
        return [CeleryWorker(orders.__name__, children=orders.CHILDREN)]

    def waiting(self) -> int:
        return int(self.broker.llen(orders.app.conf.task_default_queue))

    def quiet(self) -> bool:
        with self.broker.pipeline(transaction=True) as pipe:
            pipe.llen(orders.app.conf.task_default_queue)
            pipe.hlen("unacked")
            return not any(pipe.execute())

    def unanswered(self) -> int:
        backend = orders.app.backend
        answered = [
            meta
            for chunk in self._chunks()
            for meta in backend.mget([backend.get_key_for_task(message) for message in chunk])
            if meta is not None and backend.decode_result(meta)["status"] == "SUCCESS"
        ]
        return len(self.messages) - len(answered)


class Invoices(DemoQueue):
    """Invoices by RQ: two workers, each with a scheduler and a work horse for every job."""

    name = invoices.QUEUE
    things = "invoices"
    done = "charged"

    def __init__(self, items: Sequence[str], *, broker: str) -> None:
        super().__init__(items, broker=broker)
        self._queue = Queue(self.things, connection=self.broker)
        self._enqueued: set[str] = set()

    def send(self, item: str, message: str) -> None:
        if message in self._enqueued:
            self._queue.push_job_id(message)
            return
        self._enqueued.add(message)
        # RQ runs the job of a killed work horse again only if it may be retried.
        self._queue.enqueue(invoices.charge, item, job_id=message, retry=Retry(max=3))

    def workers(self) -> list[Worker]:
        return [RQWorker(self.things, url=self.broker_url) for _ in range(2)]

    def waiting(self) -> int:
        return len(self._queue)

    def quiet(self) -> bool:
        with self.broker.pipeline(transaction=True) as pipe:
            pipe.llen(self._queue.key)
            pipe.zcard(self._queue.scheduled_job_registry.key)
            pipe.zcard(self._queue.started_job_registry.key)
            pipe.llen(self._queue.intermediate_queue_key)
            return not any(pipe.execute())

    def unanswered(self) -> int:
        jobs = [
            job
            for chunk in self._chunks()
            for job in Job.fetch_many(chunk, connection=self.broker)
            if job is not None and job.get_status(refresh=False) == JobStatus.FINISHED
        ]
        return len(self.messages) - len(jobs)
