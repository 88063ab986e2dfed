"""Acquire and release of one free lock on one server, beside other libraries and two PINGs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta

import redis
import redis_lock
import structlog
from fencekit import DistributedLock
from mithril import Lock as MithrilLock
from mithril.backends._redis import RedisBackend
from redis.sentinel import Sentinel

from benchmarks.measure import CONSOLE, in_turns, show
from taskguard.lease import new_owner
from taskguard.locks.redis import RedisLocks
from taskguard_sandbox.servers import DebianRedis, SentinelOf, Valkey

PEER = "redis-py Lock"


def main(*, quick: bool) -> None:
    """Print the table."""
    # By default mithril-locks prints two lines a cycle, which would be measured as well.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with ExitStack() as stack:
        server = stack.enter_context(Valkey())
        client = stack.enter_context(redis.Redis.from_url(server.url))
        cases = _cases(server.url, client) | _behind_sentinel(server, stack)
        trips = {name: f"{_round_trips(server, case)} round trips" for name, case in cases.items()}
        found = in_turns(
            cases, reference=PEER, rounds=5 if quick else 25, repeats=100 if quick else 300
        )
    show("Lock cycle: acquire and release, nobody else there", "µs", found, notes=trips)


def _cases(url: str, client: redis.Redis) -> dict[str, Callable[[], object]]:
    ours = RedisLocks(url)
    fencekit = DistributedLock(client)
    mithril = RedisBackend(client)
    plain = client.lock("redis-py", timeout=30)

    def taskguard_cycle() -> None:
        owner = new_owner("message")
        ours.acquire(("order:42",), owner, ttl_s=30, with_fence=True, wait_s=0)
        ours.release(("order:42",), owner)

    def redis_py_cycle() -> None:
        plain.acquire()
        plain.release()

    def redis_lock_cycle() -> None:
        lock = redis_lock.Lock(client, "python-redis-lock", expire=30)
        lock.acquire(blocking=False)
        lock.release()

    def mithril_cycle() -> None:
        with MithrilLock("mithril", backend=mithril):
            pass

    def fencekit_cycle() -> None:
        fencekit.release(fencekit.acquire("fencekit", ttl=timedelta(seconds=30)))

    def pings() -> None:
        client.ping()
        client.ping()

    return {
        "taskguard, with a token": taskguard_cycle,
        PEER: redis_py_cycle,
        "python-redis-lock": redis_lock_cycle,
        "mithril-locks": mithril_cycle,
        "fencekit, with a token": fencekit_cycle,
        "two PINGs by redis-py": pings,
    }


def _behind_sentinel(server: Valkey, stack: ExitStack) -> dict[str, Callable[[], object]]:
    """The same server, found by asking Sentinels."""
    if DebianRedis.available() is not None:
        CONSOLE.print(f"Sentinel: skipped, {DebianRedis.available()}")
        return {}
    watchers = [stack.enter_context(SentinelOf(server.port)) for _ in range(3)]
    ours = RedisLocks("sentinel://" + ",".join(f"127.0.0.1:{w.port}" for w in watchers) + "/shop")
    theirs = Sentinel([("127.0.0.1", watcher.port) for watcher in watchers])
    lock = theirs.master_for("shop").lock("redis-py", timeout=30)

    def taskguard_cycle() -> None:
        owner = new_owner("message")
        ours.acquire(("order:42",), owner, ttl_s=30, with_fence=True, wait_s=0)
        ours.release(("order:42",), owner)

    def redis_py_cycle() -> None:
        lock.acquire()
        lock.release()

    return {
        "taskguard behind Sentinel, with a token": taskguard_cycle,
        f"{PEER} of master_for()": redis_py_cycle,
    }


def _round_trips(server: Valkey, case: Callable[[], object]) -> int:
    """Commands that arrived from outside during one cycle; those within scripts cost no trip."""
    case()
    with redis.Redis.from_url(server.url) as client:
        clients = client.client_list()
    sentinels = {each["addr"] for each in clients if each["name"].startswith("sentinel-")}
    with redis.Redis.from_url(server.url) as client, client.monitor() as monitor:
        case()
        with redis.Redis.from_url(server.url) as end:
            end.echo("the end")
        seen = 0
        for command in monitor.listen():
            if command["command"].startswith("ECHO"):
                return seen
            setup = command["command"].split()[0] in {"CLIENT", "HELLO", "SELECT"}
            sender = f"{command['client_address']}:{command['client_port']}"
            theirs = command["client_type"] == "lua" or sender in sentinels
            seen += not theirs and not setup
    raise AssertionError("unreachable: the monitor sees the end")
