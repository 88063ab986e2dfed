"""One task, made unique by celery-once, by celery-singleton and by a guard. An app for the workers
of `shop`.

Each of them is declared as its documentation shows. celery-once and celery-singleton hold their
locks on the lock server of the shop.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import redis
import sqlalchemy as sa
from celery import Task
from celery_once import AlreadyQueued, QueueOnce
from celery_singleton import Singleton
from celery_singleton.exceptions import DuplicateTaskError

from support.shop import TTL_S, UNTIL_GO, app, engine, step, take, task
from taskguard import Guard
from taskguard.errors import AlreadyEnqueuedError
from taskguard_celery import enqueue, guarded_task

LOCKS = os.environ["SHOP_LOCKS"]
DUPLICATES = (AlreadyQueued, DuplicateTaskError, AlreadyEnqueuedError)
app.conf.ONCE = {
    "backend": "celery_once.backends.Redis",
    "settings": {"url": LOCKS, "default_timeout": 3600},
}
app.conf.singleton_backend_url = LOCKS
guarded = guarded_task(key="account:<account>", once_per="run", ttl_s=TTL_S)
moved = guarded_task(
    key="account:<account>", once_per=os.environ.get("MOVED_ONCE_PER", "run"), ttl_s=TTL_S
)


def _begin(account: str, words: str, go: str = "") -> None:
    step(account, "began")
    if go:
        take(UNTIL_GO, go)
    if words == "fails":
        step(account, "ended")
        raise ValueError(account)


def _end(db: sa.Connection, account: str, words: str) -> None:
    db.execute(sa.text("insert into effects (item) values (:item)"), {"item": f"{account} {words}"})
    step(account, "ended")


def _unguarded(account: str, words: str, go: str) -> str:
    _begin(account, words, go)
    with engine().begin() as db:
        _end(db, account, words)
    return words


@task(name="moved.once", base=QueueOnce, once={"keys": ["account"]})
def once(account: str, words: str, go: str = "") -> str:
    return _unguarded(account, words, go)


@task(name="moved.singleton", base=Singleton, unique_on=["account"], raise_on_duplicate=True)
def singleton(account: str, words: str, go: str = "") -> str:
    return _unguarded(account, words, go)


@task(
    name="moved.brief_singleton",
    base=Singleton,
    unique_on=["account"],
    raise_on_duplicate=True,
    lock_expiry=1,
)
def brief_singleton(account: str, words: str, go: str = "") -> str:
    return _unguarded(account, words, go)


@task(
    name="moved.unlocked_once",
    base=QueueOnce,
    once={"keys": ["account"], "unlock_before_run": True},
)
def unlocked_once(account: str, words: str, go: str = "") -> str:
    return _unguarded(account, words, go)


def _retry_once(self: Task, account: str) -> int:
    step(account, "began")
    if not self.request.retries:
        raise self.retry(countdown=0)
    step(account, "ended")
    return int(self.request.retries)


@task(name="moved.retried_once", bind=True, base=QueueOnce, once={"keys": ["account"]})
def retried_once(self: Task, account: str) -> int:
    return _retry_once(self, account)


@task(name="moved.retried_singleton", bind=True, base=Singleton, unique_on=["account"])
def retried_singleton(self: Task, account: str) -> int:
    return _retry_once(self, account)


@task(name="moved.retried_run", bind=True)
@guarded
def retried_run(self: Task, account: str) -> int:
    return _retry_once(self, account)


@task(name="moved.run")
@moved
def run(account: str, words: str, go: str = "", *, guard: Guard) -> str:
    _begin(account, words, go)
    with guard.transaction() as db:
        _end(db, account, words)
        guard.result = words
    return words


def _guarded(account: str, words: str, guard: Guard) -> str:
    _begin(account, words)
    with guard.transaction() as db:
        _end(db, account, words)
    return words


@task(name="moved.guarded_once", base=QueueOnce, once={"keys": ["account"]})
@moved
def guarded_once(account: str, words: str, *, guard: Guard) -> str:
    return _guarded(account, words, guard)


@task(
    name="moved.guarded_singleton",
    base=Singleton,
    unique_on=["account"],
    raise_on_duplicate=True,
)
@moved
def guarded_singleton(account: str, words: str, *, guard: Guard) -> str:
    return _guarded(account, words, guard)


def _enqueued(*args: str) -> Any:
    return enqueue(run, args, duplicate="raise").result


SENDERS: dict[str, Callable[..., Any]] = {
    "celery-once": once.delay,
    "celery-singleton": singleton.delay,
    "taskguard": _enqueued,
}
"""How each library sends a message that must be unique."""


def is_sent(library: str, words: str, go: str = "") -> bool:
    """Send a message of the library's account. Return False if the library refuses it."""
    try:
        SENDERS[library](library, words, go)
    except DUPLICATES:
        return False
    return True


def close() -> None:
    """Close the connections that both libraries leave open."""
    import celery_once.backends.redis as backend

    with contextlib.suppress(AttributeError):
        backend.redis.close()
    backend.redis = None
    for each in (singleton, brief_singleton):
        with contextlib.suppress(AttributeError):
            each._singleton_backend.redis.close()


def lock_ttl_s(library: str) -> int:
    """Return in how many seconds the library's lock expires. -1: never. -2: there is no lock."""
    pattern = {"celery-once": "qo_moved*", "celery-singleton": "SINGLETONLOCK_*"}[library]
    with redis.Redis.from_url(LOCKS) as client:
        found = list(client.scan_iter(pattern))
        return int(client.ttl(found[0])) if found else -2
