"""Sentinel promotes a replica that lacks the last writes: the master is dead, or only cut off.

The replica and Sentinel reach the master through a proxy. While the proxy lets no data through,
they are on one side of the network. The master and a client of its own are on the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis
from redis.sentinel import MasterNotFoundError, Sentinel

from support.needs import need
from support.proxy import Mode, Proxy
from support.rivals import expect_one_effect
from support.waiting import wait_until
from taskguard import Guard
from taskguard.errors import KeyBusyError
from taskguard.locks.base import Granted, Held
from taskguard.locks.redis import RedisLocks
from taskguard.model.lease import new_owner
from taskguard_sandbox.servers import DebianRedis, SentinelOf

pytestmark = pytest.mark.debian

KEY = ("order:1",)
LOCK = "taskguard:{order:1}"


def take(locks: RedisLocks, owner: Any = None) -> Any:
    return locks.acquire(KEY, owner or new_owner("m"), ttl_s=600.0, with_fence=True, wait_s=0.0)


@dataclass
class Network:
    """A master, its replica and a Sentinel, and the way between them."""

    master: DebianRedis
    replica: DebianRedis
    way: Proxy
    sentinel: Sentinel

    def near_the_master(self) -> RedisLocks:
        return RedisLocks(self.master.url)

    def by_sentinel(self) -> RedisLocks:
        return RedisLocks(self.sentinel.master_for("shop"))

    def cut(self) -> None:
        """Packets vanish; nothing is closed."""
        self.way.mode = Mode.BLACK_HOLE

    def wait_for_promotion(self) -> None:
        with redis.Redis(port=self.replica.port) as client:
            wait_until(
                lambda: client.info("replication")["role"] == "master",
                message="the replica is promoted",
            )
        wait_until(self._is_announced, message="Sentinel names the new master")

    def _is_announced(self) -> bool:
        with contextlib.suppress(MasterNotFoundError):
            return bool(self.sentinel.discover_master("shop")[1] == self.replica.port)
        return False

    def heal(self) -> None:
        """The way is open again; Sentinel makes the old master a replica of the new one."""
        self.way.mode = Mode.PASS
        self.way.cut()
        with redis.Redis(port=self.master.port) as client:
            wait_until(
                lambda: client.info("replication")["role"] == "slave",
                message="the old master is a replica",
            )


@pytest.fixture
def network() -> Iterator[Network]:
    need(DebianRedis)
    with (
        DebianRedis(repl_diskless_sync_delay=0) as master,
        Proxy(master.port) as way,
        DebianRedis(replicaof=f"127.0.0.1 {way.port}") as replica,
        SentinelOf(way.port) as watcher,
    ):
        sentinel = Sentinel([("127.0.0.1", watcher.port)], socket_timeout=5)
        made = Network(master, replica, way, sentinel)
        # An earlier lease, which the replica knows.
        locks, owner = made.near_the_master(), new_owner("m")
        take(locks, owner)
        locks.release(KEY, owner)
        with redis.Redis(port=replica.port) as client:
            fence = f"{LOCK}:fence"
            wait_until(lambda: client.exists(fence) and not client.exists(LOCK))
        wait_until(lambda: sentinel.discover_slaves("shop"))
        yield made


class TestStaleReplica:
    """Fault 14."""

    def test_the_ledger_keeps_the_key(self, network: Network, make_rivals: Any) -> None:
        """If the new master lacks the lease, the ledger refuses a rival."""
        rivals = make_rivals(locks=network.near_the_master, second_locks=network.by_sentinel)

        def during(guard: Guard) -> None:
            with redis.Redis(port=network.replica.port) as client:
                assert not client.exists(LOCK)
            network.master.kill()
            network.wait_for_promotion()
            with pytest.raises(KeyBusyError):
                rivals.ship_too()
            assert "lock_unavailable" not in rivals.second.happened
            guard.check()

        network.cut()
        assert rivals.ship(during) == "first"
        assert rivals.ship_too() == "first"
        assert rivals.shipped() == ["first"]

    def test_fences_grow_over_it(self, network: Network) -> None:
        """The next token is higher than the one that only the dead master knew."""
        network.cut()
        before = take(network.near_the_master())
        network.master.kill()
        network.wait_for_promotion()
        after = take(network.by_sentinel())
        assert isinstance(after, Granted)
        assert after.fence > before.fence


class TestSplitBrain:
    """Fault 15."""

    def test_two_masters_one_effect(self, network: Network, make_rivals: Any) -> None:
        """Each side's lock server grants its own client, and the ledger lets one of them in."""
        rivals = make_rivals(locks=network.near_the_master, second_locks=network.by_sentinel)

        def fault() -> None:
            network.cut()
            network.wait_for_promotion()
            sides = [network.near_the_master(), network.by_sentinel()]
            elsewhere = [
                locks.acquire(("other",), new_owner(), ttl_s=1.0, with_fence=True, wait_s=0.0)
                for locks in sides
            ]
            assert [type(answer) for answer in elsewhere] == [Granted, Granted]

        expect_one_effect(rivals, fault)

    def test_after_it_heals_no_owner_ends_anothers_lease(self, network: Network) -> None:
        """After the network heals, neither holder has renewed or released the other's lease, and
        the new side's lease is left."""
        network.cut()
        network.wait_for_promotion()
        old, new = new_owner("old"), new_owner("new")
        near, far = network.near_the_master(), network.by_sentinel()
        assert isinstance(take(near, old), Granted)
        granted = take(far, new)
        assert isinstance(granted, Granted)
        network.heal()
        assert far.release(KEY, old) is False
        refusal = take(far, old)
        assert isinstance(refusal, Held)
        assert refusal.owner == new
        assert take(far, new) == granted
        assert far.release(KEY, new) is True
