"""Acquire and release of one free lock on one server, beside other libraries and two PINGs.

And in a table of PostgreSQL, beside what people write there by hand: an advisory lock, and a row
that says who has it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from typing import Any

import psycopg
import redis
import redis_lock
import structlog
from fencekit import DistributedLock
from mithril import Lock as MithrilLock
from mithril.backends._redis import RedisBackend

from benchmarks.measure import in_turns, show
from taskguard.lease import new_owner
from taskguard.lock_table import TableLocks
from taskguard.locks.redis import RedisLocks
from taskguard_sandbox.servers import Postgres, Valkey

PEER = "redis-py Lock"
BY_HAND = "an advisory lock, and a row with its holder"


def main(*, quick: bool) -> None:
    """Print the table."""
    # By default mithril-locks prints two lines a cycle, which would be measured as well.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with Valkey() as server, redis.Redis.from_url(server.url) as client:
        cases = _cases(server.url, client)
        trips = {name: f"{_round_trips(server, case)} round trips" for name, case in cases.items()}
        found = in_turns(
            cases, reference=PEER, rounds=5 if quick else 25, repeats=100 if quick else 300
        )
    show("Lock cycle: acquire and release, nobody else there", "µs", found, notes=trips)
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
        ours.acquire(("order:42",), owner, ttl_s=30, with_fence=with_fence, wait_s=0)
        ours.release(("order:42",), owner)

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
    }


def _round_trips(server: Valkey, case: Callable[[], object]) -> int:
    """Commands that arrived from outside during one cycle; those within scripts cost no trip."""
    case()
    with redis.Redis.from_url(server.url) as client, client.monitor() as monitor:
        case()
        with redis.Redis.from_url(server.url) as end:
            end.echo("the end")
        seen = 0
        for command in monitor.listen():
            if command["command"].startswith("ECHO"):
                return seen
            setup = command["command"].split()[0] in {"CLIENT", "HELLO", "SELECT"}
            seen += command["client_type"] != "lua" and not setup
    raise AssertionError("unreachable: the monitor sees the end")
