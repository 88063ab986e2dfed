"""Acquire and release one free lock, compared with other libraries and hand-written code.

On one server, the comparison is with other libraries and two PINGs. On five independent servers, it
is with other libraries for Redlock. In a table of PostgreSQL, it is with an advisory lock and with
a row that names the holder.

Five servers on one machine share its processors with the client and each other. So the client's own
processor time is reported in addition to the elapsed time.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from datetime import timedelta
from typing import Any

import pottery
import psycopg
import redis
import redis_lock
import redlock
import structlog
from fencekit import DistributedLock
from mithril import Lock as MithrilLock
from mithril.backends._redis import RedisBackend
from redis.sentinel import Sentinel

from benchmarks.clocks import family
from benchmarks.measure import CONSOLE, Parts, in_turns, one_round, show
from taskguard.errors import LockServerUnavailableError
from taskguard.lock_table import TableLocks
from taskguard.locks.base import LockProvider
from taskguard.locks.redis import RedisLocks
from taskguard.locks.redlock import RedlockLocks
from taskguard.locks.redlock.commands import Call, Commands
from taskguard.model.lease import new_owner
from taskguard_sandbox.servers import DebianRedis, Postgres, SentinelOf, Valkey

PEER = "redis-py Lock"
CLOCKS = [(time.perf_counter, "time"), (time.process_time, "processor time of the client")]
BY_HAND = "an advisory lock, and a row with its holder"


def main(*, quick: bool, beside_load: bool = False) -> None:
    """Print the tables."""
    # By default mithril-locks prints two lines a cycle, which would be measured as well.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with ExitStack() as stack:
        server = stack.enter_context(Valkey())
        client = stack.enter_context(redis.Redis.from_url(server.url))
        cases = _cases(server.url, client) | _behind_sentinel(server, stack)
        trips = {name: _round_trips(server, case) for name, case in cases.items()}
        cases = {f"{name}: {trips[name]} round trips": case for name, case in cases.items()}
        clocks = {
            "Redis": family(server.pid),
            "wall": time.perf_counter,
            "client": time.process_time,
        }
        one_round(cases, 0, repeats=20, clocks=clocks)  # warms up
        references = dict.fromkeys(cases, f"{PEER}: {trips[PEER]} round trips")
        title = "Lock cycle: acquire and release without contention"
        parts = Parts(title, references, beside_load=beside_load)
        # Short turns: a longer one may have a processor to itself that the next one has not.
        parts.measure(
            lambda number: one_round(cases, number, repeats=50, clocks=clocks),
            rounds=10 if quick else 100,
        )
        parts.show(with_flush=False)
    _several(quick=quick)
    for unlogged in (True, False):
        _in_a_table(unlogged=unlogged, quick=quick)


def _in_a_table(*, unlogged: bool, quick: bool) -> None:
    with Postgres() as server, closing(TableLocks(server.create_database("locks"))) as ours:
        ours.create_table(unlogged=unlogged)
        with psycopg.connect(
            f"host=127.0.0.1 port={server.port} user=postgres dbname=locks", autocommit=True
        ) as connection:
            kind = "unlogged" if unlogged else ""
            connection.execute(f"create {kind} table holders (key bigint primary key, owner text)")
            cases = _table_cases(ours, connection)
            found = in_turns(
                cases, reference=BY_HAND, rounds=5 if quick else 25, repeats=50 if quick else 200
            )
    title = "Lock cycle in a table of PostgreSQL, " + ("UNLOGGED" if unlogged else "with a log")
    show(title, "µs", found)


def _table_cases(ours: TableLocks, connection: Any) -> dict[str, Callable[[], object]]:
    cursor = connection.cursor()

    def cycle(*, with_fence: bool) -> None:
        owner = new_owner("message")
        key = (f"order:{with_fence}",)  # a row with a token stays
        ours.acquire(key, owner, ttl_s=30, with_fence=with_fence, wait_s=0)
        ours.release(key, owner)

    def by_hand() -> None:
        key, owner = 42, str(new_owner("message"))
        for statement, values in (
            ("select pg_try_advisory_lock(%s)", [key]),
            ("insert into holders values (%s, %s)", [key, owner]),
            ("delete from holders where key = %s", [key]),
            ("select pg_advisory_unlock(%s)", [key]),
        ):
            cursor.execute(statement, values, prepare=True)

    held = new_owner("holder")
    ours.acquire(("held",), held, ttl_s=3_600, with_fence=False, wait_s=0)

    def refused() -> None:
        ours.acquire(("held",), new_owner("message"), ttl_s=30, with_fence=False, wait_s=0)

    return {
        "taskguard, with a token": lambda: cycle(with_fence=True),
        "taskguard, beside a ledger": lambda: cycle(with_fence=False),
        BY_HAND: by_hand,
        "taskguard: refused": refused,
    }


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
        "the least: two scripts, by a socket": _least([client]),
    }


def _behind_sentinel(server: Valkey, stack: ExitStack) -> dict[str, Callable[[], object]]:
    """taskguard on one server that Sentinels name."""
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


ONE = "one server, taskguard"
# A server that runs for less has no vote: long leases would have to be waited for.
TTL_S = 2.0
KEY = ("order:42",)


def _several(*, quick: bool) -> None:
    with ExitStack() as stack:
        urls = [stack.enter_context(Valkey()).url for _ in range(5)]
        clients = [stack.enter_context(redis.Redis.from_url(url)) for url in urls]
        cases = _cases_of_several(urls, clients)
        for clock, what in CLOCKS:
            found = in_turns(
                cases,
                reference=ONE,
                rounds=5 if quick else 25,
                repeats=50 if quick else 200,
                clock=clock,
            )
            show(f"Redlock cycle on five servers: {what}", "µs", found)


def _cases_of_several(
    urls: Sequence[str], clients: Sequence[redis.Redis]
) -> dict[str, Callable[[], object]]:
    one, five = RedisLocks(urls[0]), RedlockLocks(urls)
    peer = redlock.Redlock(list(clients))
    theirs = pottery.Redlock(key="pottery", masters=set(clients), auto_release_time=TTL_S)

    def cycle(locks: LockProvider) -> None:
        owner = new_owner("message")
        locks.acquire(("order:42",), owner, ttl_s=TTL_S, with_fence=False, wait_s=0)
        locks.release(("order:42",), owner)

    def redlock_py_cycle() -> None:
        peer.unlock(peer.lock("redlock-py", int(TTL_S * 1000)))

    def pottery_cycle() -> None:
        theirs.acquire()
        theirs.release()

    _wait_for_votes(lambda: cycle(five))
    return {
        ONE: lambda: cycle(one),
        "taskguard": lambda: cycle(five),
        "the least: its scripts on three, by sockets": _least(clients[:3]),
        "redlock-py": redlock_py_cycle,
        "pottery": pottery_cycle,
    }


def _least(clients: Sequence[redis.Redis]) -> Callable[[], object]:
    """Return the least possible acquire and release: send each script once to each server."""
    commands = Commands("least")
    sockets = []
    for client in clients:
        port = client.connection_pool.connection_kwargs["port"]
        sockets.append(socket.create_connection(("127.0.0.1", port)))
        sockets[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        owner = new_owner()
        for call in (commands.acquire(KEY, owner, TTL_S, 0.0), commands.release(KEY, owner)):
            sockets[-1].send(call.by_source)  # it knows the script from here on
            sockets[-1].recv(1_000)

    def ask(call: Call) -> None:
        for each in sockets:
            each.send(call.packed)
        for each in sockets:
            if each.recv(1_000)[:1] not in (b"*", b":"):
                raise AssertionError("a script was refused")

    def cycle() -> None:
        owner = new_owner("message")
        ask(commands.acquire(KEY, owner, TTL_S, 0.0))
        ask(commands.release(KEY, owner))

    return cycle


def _wait_for_votes(cycle: Callable[[], object]) -> None:
    until_s = time.monotonic() + 30.0
    while True:
        try:
            cycle()
        except LockServerUnavailableError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.1)
        else:
            return
