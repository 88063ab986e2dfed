"""The Celery app of `contention.py`: bodies of a few ms for the same keys, in several ways."""

from __future__ import annotations

import functools
import os
import time
from typing import Any

import redis
import redis_lock
from celery import Celery
from celery.signals import worker_process_init

from benchmarks.journal import note, work_until_commit
from taskguard import Guard
from taskguard.integration import MessageRef
from taskguard.model.claims import ClaimRequest
from taskguard.model.delivery import stored_call
from taskguard.model.lease import new_owner
from taskguard_celery import enqueue, guarded_task
from taskguard_celery.calls import call_of
from taskguard_celery.marks import Marks
from taskguard_celery.recognition import guarded_function_of

QUEUE = "contention"

app = Celery("contention", broker=os.environ["CONTENTION_BROKER"])
app.conf.update(
    task_default_queue=QUEUE,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=4,
    broker_transport_options={"visibility_timeout": 3600},
)


@functools.cache
def client() -> redis.Redis:
    """One a child."""
    return redis.Redis.from_url(os.environ["TASKGUARD_LOCKS_URL"])


@worker_process_init.connect
def forget_parent(**_: object) -> None:
    """Connections are made after the fork."""
    client.cache_clear()


def work(key: str, number: int, body_s: float) -> None:
    """The body of all."""
    began_s = time.monotonic()
    time.sleep(body_s)
    note(key, number, began_s)


@app.task
def bare(key: str, number: int, body_s: float) -> None:
    """No guard: they overlap."""
    work(key, number, body_s)


@app.task
def blocking(key: str, number: int, body_s: float) -> None:
    """A lock in the body. Its release wakes the next waiter, which occupies a worker's child."""
    with redis_lock.Lock(client(), key, expire=30):
        work(key, number, body_s)


@app.task
def polling(key: str, number: int, body_s: float) -> None:
    """redis-py's Lock in the body. A waiter tries every 0.1 s."""
    with client().lock(f"polled:{key}", timeout=30):
        work(key, number, body_s)


@app.task
def chained(key: str, number: int, body_s: float, left: int, step: int) -> None:
    """No guard, and nothing waits: each sends the next of its key, as a hand-off by message has to.

    It shows the cost of the queue alone. One message of each key is fetched at a time.
    """
    work(key, number, body_s)
    if left:
        chained.apply_async((key, number + step, body_s, left - 1, step))


@app.task
@guarded_task(key="hot:<key>", once_per="message")
def retry(key: str, number: int, body_s: float) -> None:
    """Put off until the key is free."""
    work(key, number, body_s)


@app.task
@guarded_task(key="hot:<key>", once_per="message", busy="park")
def park(key: str, number: int, body_s: float) -> None:
    """Waits in the ledger."""
    work(key, number, body_s)


@app.task
@guarded_task(key="hot:<key>", once_per="message", busy="park", order="strict")
def strict(key: str, number: int, body_s: float) -> None:
    """Wait in the ledger, with a position from its enqueueing on."""
    work(key, number, body_s)


@app.task
@guarded_task(key="committed:<key>", once_per="message", busy="park")
def park_committed(key: str, number: int, body_s: float, guard: Guard) -> None:
    """Park as the task before it does. The body ends with its transaction's COMMIT."""
    work_until_commit(key, number, body_s, guard)


@app.task
@guarded_task(key="free:<number>", once_per="message", busy="park")
def free(key: str, number: int, body_s: float) -> None:
    """Do the work of a message whose key no other message has."""
    work(key, number, body_s)


def publish(task: str, keys: list[str], count: int, body_s: float) -> None:
    """Put messages of these keys in turns into the queue."""
    sent = app.tasks[f"{__name__}.{task}"]
    with app.producer_pool.acquire() as producer:
        if task == "chained":
            for number, key in enumerate(keys):
                words = (key, number, body_s, count // len(keys) - 1, len(keys))
                sent.apply_async(words, producer=producer)
            return
        for number in range(count):
            words = (keys[number % len(keys)], number, body_s)
            if task == "strict":
                enqueue(sent, words)
            else:
                sent.apply_async(words, producer=producer)


def publish_mixed(keys: list[str], count: int, body_s: float, *, cold: int) -> None:
    """Put messages of these keys in turns into the queue, and of keys of their own between them."""
    with app.producer_pool.acquire() as producer:
        for number in range(count):
            words = (keys[number % len(keys)], number, body_s)
            park.apply_async(words, producer=producer)
            if number * cold // count != (number + 1) * cold // count:
                free.apply_async(("cold", number, body_s), producer=producer)


def parked_template(key: str, body_s: float, message: str) -> ClaimRequest:
    """Return the request that parks one message of `park`. The message's id is in it unchanged."""
    now_s = time.time()
    signature = park.s(key, 0, body_s).set(task_id=message, queue=QUEUE)
    numbers = MessageRef(message, sending=f"{now_s:.6f}")
    call: Any = call_of(app, signature, marks=Marks(message, sent_s=now_s))
    compiled = guarded_function_of(park)
    assert compiled is not None
    delivery = compiled.delivery(
        (key, 0, body_s), {}, namespace="", task=park.name, message=numbers
    )
    return ClaimRequest(
        keys=(f"hot:{key}",),
        owner=new_owner(message),
        ttl_s=30.0,
        work=delivery.work,
        task=park.name,
        message=numbers,
        call=stored_call(call, numbers, ""),
        in_line=True,
        sent_us=int(now_s * 1e6),
    )
