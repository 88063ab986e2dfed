"""Fault 16: a slot of a Redis Cluster moves to another node while a lock in it is held.

A lock and all that belongs to it stand in one slot and move together. A cluster is not supported as
a lock server: what a node answers in the middle is "unavailable", and the ledger alone decides. It
is for fenced values, by a cluster's own client.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import redis
from redis.cluster import RedisCluster

from support.rivals import expect_one_effect
from support.waiting import wait_until
from taskguard.errors import LockServerUnavailableError, StaleTokenError
from taskguard.fenced import FencedValue, get_value, set_value
from taskguard.lease import new_owner
from taskguard.locks.base import Granted, Held
from taskguard.locks.redis import RedisLocks
from taskguard_sandbox.servers import Valkey

KEY = ("order:1",)
LOCK = "taskguard:{order:1}"
LAST_SLOT = 16_383


def take(locks: RedisLocks, owner: Any) -> Any:
    # Somebody waits: so that there is a flag to move as well.
    return locks.acquire(KEY, owner, ttl_s=600.0, with_fence=True, wait_s=60.0)


@dataclass
class Cluster:
    """Two nodes. The lock's slot is the first one's, until it is moved."""

    nodes: list[Valkey]
    clients: list[Any]

    @property
    def slot(self) -> int:
        return int(self.clients[0].execute_command("CLUSTER", "KEYSLOT", LOCK))

    def ask(self, node: int, *words: object) -> Any:
        return self.clients[node].execute_command("CLUSTER", *words)

    def begin_move(self) -> None:
        """Both nodes know of it; no key has moved."""
        ids = [self.ask(node, "MYID") for node in (0, 1)]
        self.ask(1, "SETSLOT", self.slot, "IMPORTING", ids[0])
        self.ask(0, "SETSLOT", self.slot, "MIGRATING", ids[1])

    def move_keys(self) -> list[str]:
        keys: list[str] = self.ask(0, "GETKEYSINSLOT", self.slot, 100)
        host, port = "127.0.0.1", self.nodes[1].port
        self.clients[0].execute_command("MIGRATE", host, port, "", 0, 5000, "KEYS", *keys)
        return keys

    def end_move(self) -> None:
        to = self.ask(1, "MYID")
        for node in (1, 0):
            self.ask(node, "SETSLOT", self.slot, "NODE", to)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(Valkey(cluster_enabled="yes", cluster_node_timeout=60_000))
            for _ in range(2)
        ]
        clients = [
            stack.enter_context(redis.Redis(port=node.port, decode_responses=True))
            for node in nodes
        ]
        made = Cluster(nodes, clients)
        # The lock's slot to the first node.
        half = [(0, made.slot), (made.slot + 1, LAST_SLOT)]
        for node, (first, last) in enumerate(half):
            made.ask(node, "ADDSLOTSRANGE", first, last)
        made.ask(0, "MEET", "127.0.0.1", nodes[1].port)
        for node in (0, 1):
            wait_until(lambda n=node: _ready(made.clients[n]), timeout_s=60, message="a cluster")
        yield made


def _ready(client: Any) -> bool:
    info = client.cluster("info")
    return bool(info["cluster_state"] == "ok" and info["cluster_known_nodes"] == "2")


def test_a_lock_moves_with_all_that_belongs_to_it(cluster: Cluster) -> None:
    """One slot holds all of its entries; at the new node the same owner holds the same lease."""
    old, new = (RedisLocks(node.url) for node in cluster.nodes)
    owner = new_owner("m")
    granted = take(old, owner)
    assert isinstance(granted, Granted)
    assert isinstance(take(old, new_owner("n")), Held)
    cluster.begin_move()
    assert sorted(cluster.move_keys()) == [LOCK, f"{LOCK}:fence", f"{LOCK}:waiters"]
    cluster.end_move()
    with pytest.raises(LockServerUnavailableError, match="is a Redis Cluster"):
        take(old, owner)
    told = take(new, new_owner("n"))
    assert isinstance(told, Held)
    assert told.owner == owner
    assert take(new, owner) == granted
    assert new.release(KEY, owner) is True


def test_in_the_middle_the_ledger_decides(cluster: Cluster, make_rivals: Any) -> None:
    """The lease is on its way: the old node knows no answer, a rival is refused all the same."""
    rivals = make_rivals(locks=cluster.nodes[0].url)

    def fault() -> None:
        cluster.begin_move()
        cluster.move_keys()

    expect_one_effect(rivals, fault)
    assert "lock_unavailable" in rivals.second.happened
    cluster.end_move()


def test_fenced_values_follow_their_slot(cluster: Cluster) -> None:
    """A cluster's client sets them wherever they are; moved, they still refuse an older holder."""
    with RedisCluster(host="127.0.0.1", port=cluster.nodes[0].port) as client:
        here = "{order:1}:stock"
        assert client.keyslot(here) == cluster.slot
        names = (f"stock:{number}" for number in range(1000))
        elsewhere = next(name for name in names if client.keyslot(name) > cluster.slot)
        for key in (here, elsewhere):
            set_value(client, key, "new", fence=8)
        cluster.begin_move()
        assert cluster.move_keys() == [here]
        with pytest.raises(StaleTokenError):
            set_value(client, here, "late", fence=7)  # asked where it is going
        cluster.end_move()
        for key in (here, elsewhere):
            with pytest.raises(StaleTokenError):
                set_value(client, key, "late", fence=7)
            assert get_value(client, key) == FencedValue(b"new", 8)
