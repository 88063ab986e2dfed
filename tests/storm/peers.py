"""The same work, guarded by other libraries as their documentation shows. An app for the same
workers.

In their favour, every body first checks whether its effect exists, every server error is retried
without end, and the task's own retries wait for a taken lock.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from datetime import timedelta
from typing import Any

import redis
import sqlalchemy as sa
from celery.signals import worker_process_init

from storm.app import DATABASE_URL, LOCKS_URL, app, write
from storm.journal import in_body
from storm.settings import TTL_S

__all__ = ["PEERS", "app"]

RETRIED = (redis.RedisError, sa.exc.DBAPIError, OSError)
AGAIN: dict[str, Any] = {"autoretry_for": RETRIED, "default_retry_delay": 0.5, "max_retries": None}
PEERS = {
    "bare": "no guard",
    "redis_lock": "redis-py Lock",
    "celery_once": "celery-once",
    "fencekit": "fencekit",
}


@functools.cache
def client() -> redis.Redis:
    """Return the client, one for each child."""
    return redis.Redis.from_url(LOCKS_URL, socket_timeout=2, socket_connect_timeout=2)


@functools.cache
def engine() -> sa.Engine:
    """Return the engine, one for each child."""
    arguments = {"connect_timeout": 5, "tcp_user_timeout": 5_000}
    return sa.create_engine(DATABASE_URL, pool_pre_ping=True, connect_args=arguments)


@worker_process_init.connect
def forget_parent(**_: object) -> None:
    """Drop the parent's connections after the fork."""
    client.cache_clear()
    engine.cache_clear()


def work(item: str, pause_s: float) -> None:
    """Check, work, write: work that is done is not done again."""
    with in_body(item):
        with engine().connect() as db:
            found = sa.text("select 1 from effects where item = :item")
            if db.execute(found, {"item": item}).first():
                return
        time.sleep(pause_s)
        with engine().begin() as db:
            write(db, item)


@app.task(**AGAIN)
def bare(item: str, kind: str, pause_s: float) -> None:
    """Only the check."""
    work(item, pause_s)


@app.task(bind=True, **AGAIN)
def redis_lock(self: Any, item: str, kind: str, pause_s: float) -> None:
    """redis-py's Lock around the body. A taken lock means a retry."""
    lock = client().lock(f"item:{item}", timeout=TTL_S)
    if not lock.acquire(blocking=False):
        raise self.retry(countdown=0.5)
    try:
        work(item, pause_s)
    finally:
        with contextlib.suppress(redis.exceptions.LockError):  # it expired
            lock.release()


def _celery_once() -> Any:
    from celery_once import QueueOnce

    app.conf.ONCE = {
        "backend": "celery_once.backends.Redis",
        # Without a timeout, a lost reply blocks the producer without end.
        "settings": {"url": f"{LOCKS_URL}?socket_timeout=2", "default_timeout": 3600},
    }

    @app.task(base=QueueOnce, once={"graceful": True, "keys": ["item"]}, **AGAIN)
    def celery_once(item: str, kind: str, pause_s: float) -> None:
        """One message of an item at a time, by a lock that is taken when it is published."""
        work(item, pause_s)

    return celery_once


def _fencekit() -> Any:
    from fencekit import DistributedLock, IdempotencyGuard
    from fencekit.celery import idempotent_task

    connection = redis.Redis.from_url(LOCKS_URL, socket_timeout=2, socket_connect_timeout=2)

    @app.task(bind=True, name="storm.peers.fencekit", **AGAIN)
    @idempotent_task(
        guard=IdempotencyGuard(connection),
        lock=DistributedLock(connection),
        key=lambda item, kind, pause_s: f"item:{item}",
        lock_resource=lambda item, kind, pause_s: f"item:{item}",
        idempotency_ttl=timedelta(hours=1),
        lock_ttl=timedelta(seconds=TTL_S),
        retry_on_in_progress=True,
        retry_countdown=0.5,
    )
    def fencekit(self: Any, item: str, kind: str, pause_s: float) -> None:
        """fencekit's lock and its record, both in Redis."""
        work(item, pause_s)

    return fencekit


if os.environ.get("STORM_PEER") == "celery_once":
    celery_once = _celery_once()
if os.environ.get("STORM_PEER") == "fencekit":
    fencekit = _fencekit()
