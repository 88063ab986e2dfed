"""Locks on a Redis Cluster beside one server, and beside redis-py's client for clusters.

Without replicas, as the one server is: what a copy costs is the server's. The last case is the
smallest that can be: one script on one node of the cluster by redis-py.
"""

from __future__ import annotations

from collections.abc import Callable

import redis
from redis.cluster import RedisCluster

from benchmarks.measure import in_turns, show
from taskguard.locks.base import Hold, LockProvider
from taskguard.locks.redis import RedisLocks
from taskguard.locks.redis.cluster import RedisClusterLocks
from taskguard.model.lease import new_owner
from taskguard_sandbox.clusters import Cluster
from taskguard_sandbox.servers import Valkey

ONE = "taskguard, one Valkey"
THREE = "taskguard, three masters"
PEER = "redis-py on three masters"
LEASES = 1_000


def main(*, quick: bool) -> None:
    """Print the tables."""
    with (
        Valkey() as server,
        Cluster() as cluster,
        RedisCluster(host="127.0.0.1", port=cluster.nodes[0].port) as client,
    ):
        one, three = RedisLocks(server.url), RedisClusterLocks(cluster.url)
        cycles = {ONE: _cycle(one), THREE: _cycle(three), PEER: _cycle_of(client)}
        found = in_turns(
            cycles, reference=ONE, rounds=5 if quick else 25, repeats=100 if quick else 300
        )
        show("Lock cycle on a Redis Cluster: acquire and release", "µs", found)
        renewals = {ONE: _renewal(one), THREE: _renewal(three), PEER: _renewal_by(client)}
        found = in_turns(
            renewals, reference=ONE, rounds=3 if quick else 9, repeats=3 if quick else 10
        )
        show(f"{LEASES:,} leases renewed", "µs", found)


def _cycle(locks: LockProvider) -> Callable[[], object]:
    def cycle() -> None:
        owner = new_owner("message")
        locks.acquire(("order:42",), owner, ttl_s=30, with_fence=True, wait_s=0)
        locks.release(("order:42",), owner)

    return cycle


def _cycle_of(client: redis.RedisCluster) -> Callable[[], object]:
    lock = client.lock("redis-py", timeout=30)

    def cycle() -> None:
        lock.acquire()
        lock.release()

    return cycle


def _renewal(locks: LockProvider) -> Callable[[], object]:
    owner = new_owner("message")
    holds = [Hold((f"lease:{number}",), owner, 600.0) for number in range(LEASES)]
    for hold in holds:
        locks.acquire(hold.keys, owner, ttl_s=600, with_fence=False, wait_s=0)
    return lambda: locks.renew(holds)


def _renewal_by(client: redis.RedisCluster) -> Callable[[], object]:
    locks = [client.lock(f"redis-py:{number}", timeout=600) for number in range(LEASES)]
    for lock in locks:
        lock.acquire()

    def renew() -> None:
        for lock in locks:
            lock.extend(600, replace_ttl=True)

    return renew
