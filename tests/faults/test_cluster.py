"""Fault 16: a Redis Cluster moves slots, fails over, and forgets what it had not copied.

A lock and the keys that belong to it are in one slot. If the slot moves, they move one by one.
Meanwhile a request that needs all of them is "unavailable", and the ledger alone decides.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest
from redis.cluster import RedisCluster

from support.needs import need
from support.proxy import Mode, Proxy
from support.rivals import expect_one_effect
from support.waiting import patience_s, wait_until
from taskguard import connect
from taskguard.errors import KeyBusyError, LockServerUnavailableError, StaleTokenError
from taskguard.fenced import FencedValue, get_value, set_value
from taskguard.locks.base import Granted, Held, Hold, Renewal
from taskguard.locks.redis import RedisLocks
from taskguard.locks.redis.cluster import RedisClusterLocks
from taskguard.model.lease import new_owner
from taskguard_sandbox.clusters import Cluster, ClusterNode
from taskguard_sandbox.servers import Valkey

KEY = ("order:1",)
LOCK = "taskguard:{order:1}"
NODE_TIMEOUT_S = 1.0


def locks_of(cluster: Cluster, timeout_s: float = 1.5) -> RedisClusterLocks:
    return RedisClusterLocks(cluster.url, socket_timeout_s=timeout_s, connect_timeout_s=timeout_s)


def take(locks: RedisLocks, owner: Any = None, keys: tuple[str, ...] = KEY) -> Any:
    # Somebody waits: so that there is a line to move as well.
    return locks.acquire(keys, owner or new_owner("m"), ttl_s=600.0, with_fence=True, wait_s=60.0)


@dataclass
class Move:
    """The lock's slot on its way from one node to the other."""

    cluster: Cluster
    source: ClusterNode
    target: ClusterNode
    slot: int

    def begin(self) -> None:
        """Both nodes know of it; no key has moved."""
        ids = {node: self.cluster.id_of(node) for node in (self.source, self.target)}
        self._set(self.target, "IMPORTING", ids[self.source])
        self._set(self.source, "MIGRATING", ids[self.target])

    def move_keys(self) -> list[str]:
        keys: list[str] = self.cluster.ask(self.source, "CLUSTER", "GETKEYSINSLOT", self.slot, 100)
        where = ("127.0.0.1", self.target.port)
        if keys:
            self.cluster.ask(self.source, "MIGRATE", *where, "", 0, 5000, "KEYS", *keys)
        return keys

    def end(self) -> None:
        to = self.cluster.id_of(self.target)
        for node in (self.target, self.source):
            self._set(node, "NODE", to)

    def _set(self, node: ClusterNode, what: str, other: str) -> None:
        self.cluster.ask(node, "CLUSTER", "SETSLOT", self.slot, what, other)


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    need(Valkey)
    with Cluster(masters=2, node_timeout_ms=60_000) as cluster:
        yield cluster


@pytest.fixture
def move(two: Cluster) -> Iterator[Move]:
    """From whichever node has the slot now."""
    for node in two.nodes:
        two.ask(node, "FLUSHALL")
    source = two.master_of(LOCK)
    target = next(node for node in two.nodes if node is not source)
    made = Move(two, source, target, two.ask(source, "CLUSTER", "KEYSLOT", LOCK))
    yield made
    made.move_keys()
    made.end()
    wait_until(lambda: all(two.master_of(LOCK, by=node) is target for node in two.nodes))


class TestSlotMoves:
    def test_a_lock_moves_with_all_that_belongs_to_it(self, two: Cluster, move: Move) -> None:
        """All entries of a lock move with its slot. At the new node its owner has the same
        lease."""
        locks, owner = locks_of(two), new_owner("m")
        granted = take(locks, owner)
        assert isinstance(granted, Granted)
        waiter = new_owner("n")
        assert isinstance(take(locks, waiter), Held)
        entries = ["", ":fence", ":line", f":waits:{waiter.nonce}"]
        move.begin()
        assert sorted(move.move_keys()) == [LOCK + entry for entry in entries]
        move.end()
        refusal = take(locks, waiter)
        assert isinstance(refusal, Held)
        assert refusal.owner == owner
        assert take(locks, owner) == granted
        assert locks.renew([Hold(KEY, owner, 60.0)]) == [Renewal.RENEWED]
        assert locks.release(KEY, owner) is True
        after = take(locks, waiter)
        assert isinstance(after, Granted)
        assert after.fence > granted.fence

    def test_one_server_is_no_cluster(self, move: Move) -> None:
        """A plain `redis://` URL of a node raises an error with the correct URL."""
        move.begin()
        with pytest.raises(LockServerUnavailableError, match=r"Write redis\+cluster://"):
            take(RedisLocks(move.source.url))

    @pytest.mark.parametrize("moved", [False, True])
    def test_holders_stay_in_the_middle(self, two: Cluster, move: Move, moved: bool) -> None:
        """While a slot moves, its lease can be renewed and released."""
        locks, owner = locks_of(two), new_owner("m")
        take(locks, owner)
        move.begin()
        if moved:
            assert move.move_keys()
        assert locks.renew([Hold(KEY, owner, 60.0)]) == [Renewal.RENEWED]
        with suppress(LockServerUnavailableError):  # no new holder while the slot moves
            assert not isinstance(take(locks), Granted)
        locks.wait(KEY[0], new_owner(), timeout_s=0.1)
        assert locks.release(KEY, owner) is True
        move.move_keys()
        move.end()
        assert isinstance(wait_until(lambda: take(locks)), Granted)

    def test_to_a_node_without_slots(self) -> None:
        """A new node gets its first slot. A holder follows, before CLUSTER SLOTS names the node."""
        need(Valkey)
        with Cluster(masters=2, node_timeout_ms=60_000) as cluster, ClusterNode() as new:
            first = cluster.nodes[0]
            cluster.ask(first, "CLUSTER", "MEET", "127.0.0.1", new.port, new.bus_port)
            name = cluster.id_of(new)
            wait_until(
                lambda: (
                    cluster.is_ok(new)
                    and all(name in str(cluster.ask(n, "CLUSTER", "NODES")) for n in cluster.nodes)
                )
            )
            locks, owner = locks_of(cluster), new_owner("m")
            take(locks, owner)
            source = cluster.master_of(LOCK)
            move = Move(cluster, source, new, cluster.ask(source, "CLUSTER", "KEYSLOT", LOCK))
            move.begin()
            assert move.move_keys()
            assert locks.renew([Hold(KEY, owner, 60.0)]) == [Renewal.RENEWED]
            move.end()
            assert locks.renew([Hold(KEY, owner, 60.0)]) == [Renewal.RENEWED]
            assert locks.release(KEY, owner) is True

    def test_several_keys_in_the_middle(self, two: Cluster, move: Move) -> None:
        """If one of several keys is on its way, none is taken."""
        locks = locks_of(two)
        move.begin()
        with pytest.raises(LockServerUnavailableError):
            take(locks, keys=("a", *KEY))
        assert isinstance(take(locks, keys=("a",)), Granted)

    @pytest.mark.parametrize("moved", [False, True])
    def test_the_ledger_decides(
        self, two: Cluster, move: Move, make_rivals: Any, moved: bool
    ) -> None:
        """While the lease moves, a rival is refused by the ledger, and no work is done twice."""
        rivals = make_rivals(locks=two.url)

        def fault() -> None:
            move.begin()
            if moved:
                move.move_keys()

        expect_one_effect(rivals, fault)

    def test_fenced_values_follow_their_slot(self, two: Cluster, move: Move) -> None:
        """Fenced values follow their slot, and still refuse an older holder."""
        with RedisCluster(host="127.0.0.1", port=two.nodes[0].port) as client:
            here = "{order:1}:stock"
            assert client.keyslot(here) == move.slot
            names = (f"stock:{number}" for number in range(1000))
            elsewhere = next(name for name in names if two.master_of(name) is not move.source)
            for key in (here, elsewhere):
                set_value(client, key, "new", fence=8)
            move.begin()
            assert move.move_keys() == [here]
            with pytest.raises(StaleTokenError):
                set_value(client, here, "late", fence=7)  # asked where it is going
            move.end()
            for key in (here, elsewhere):
                with pytest.raises(StaleTokenError):
                    set_value(client, key, "late", fence=7)
                assert get_value(client, key) == FencedValue(b"new", 8)


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    """Three masters; that of the lock has a replica."""
    need(Valkey)
    with Cluster(replicas=1, node_timeout_ms=int(NODE_TIMEOUT_S * 1000)) as cluster:
        yield cluster


@dataclass
class Pair:
    """Master and replica of a key's slot."""

    cluster: Cluster
    master: ClusterNode
    replica: ClusterNode
    key: str

    @property
    def name(self) -> str:
        return f"taskguard:{{{self.key}}}"

    def copied(self) -> None:
        """The replica has what the master has."""
        written = self._replication(self.master)["master_repl_offset"]
        wait_until(lambda: self._replication(self.replica)["slave_repl_offset"] >= written)

    def _replication(self, node: ClusterNode) -> dict[str, Any]:
        found: dict[str, Any] = self.cluster.ask(node, "INFO", "replication")
        return found

    def promoted(self) -> bool:
        return self.cluster.is_master(self.replica)

    def is_settled(self) -> bool:
        """Return True if all running nodes know that it was promoted."""
        running = [node for node in self.cluster.nodes if node.running]
        owners = (self.cluster.master_of(self.name, by=node) for node in running)
        return all(owner is self.replica for owner in owners)


@pytest.fixture
def pair(three: Cluster) -> Iterator[Pair]:
    """A healthy one, empty; made so again afterwards."""
    made = pair_of(three)
    yield made
    heal(made)


def pair_of(cluster: Cluster) -> Pair:
    """Empty the cluster. Return a master with its present replica, and a key of its slots."""
    for node in cluster.nodes:
        if cluster.is_master(node):
            cluster.ask(node, "FLUSHALL")
    replica = next(node for node in cluster.nodes if not cluster.is_master(node))
    port = cluster.ask(replica, "ROLE")[2]
    master = next(node for node in cluster.nodes if node.port == port)
    keys = (f"order:{number}" for number in range(1000))
    key = next(key for key in keys if cluster.master_of(f"taskguard:{{{key}}}") is master)
    return Pair(cluster, master, replica, key)


def heal(pair: Pair) -> None:
    pair.master.resume()
    pair.master.start()
    wait_until(lambda: healthy(pair.cluster), message="the cluster is whole")


def healthy(cluster: Cluster) -> bool:
    replicas = [node for node in cluster.nodes if not cluster.is_master(node)]
    return (
        all(map(cluster.is_ok, cluster.nodes))
        and len(replicas) == 1
        and cluster.ask(replicas[0], "INFO", "replication")["master_link_status"] == "up"
        and all("fail" not in str(cluster.ask(n, "CLUSTER", "NODES")) for n in cluster.nodes)
    )


def kill(pair: Pair) -> None:
    pair.master.kill()


def freeze(pair: Pair) -> None:
    pair.master.pause()


def hand_over(pair: Pair) -> None:
    pair.cluster.ask(pair.replica, "CLUSTER", "FAILOVER")


class TestFailover:
    @pytest.mark.parametrize("fault", [kill, freeze, hand_over])
    def test_locks_go_on(self, three: Cluster, fault: Callable[[Pair], None]) -> None:
        """The replica has the lease, and locks work within a second of its promotion."""
        # A machine that is busy may take longer at times.
        assert any(self._outage_s(pair_of(three), fault) < 1.0 for _ in range(3))

    def _outage_s(self, pair: Pair, fault: Callable[[Pair], None]) -> float:
        """From the promotion to the first renewal."""
        locks, owner = locks_of(pair.cluster), new_owner("m")
        hasty = locks_of(pair.cluster, 0.5)  # asks again soon
        granted = take(locks, owner, keys=(pair.key,))
        assert isinstance(granted, Granted)
        pair.copied()
        promoted: list[float] = []

        def watch() -> None:
            wait_until(pair.promoted, interval_s=0.005, message="promoted")
            promoted.append(time.monotonic())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            fault(pair)

            def renewed() -> bool:
                with suppress(LockServerUnavailableError):
                    answer = hasty.renew([Hold((pair.key,), owner, 600.0)])
                    return promoted != [] and answer == [Renewal.RENEWED]
                return False

            wait_until(renewed, interval_s=0.01, message="the lease is renewed")
            again = time.monotonic()
            watcher.join(patience_s())
            refusal = take(locks, keys=(pair.key,))
            assert isinstance(refusal, Held)
            assert refusal.owner == owner
            assert take(locks, owner, keys=(pair.key,)) == granted
            assert locks.release((pair.key,), owner)
        finally:
            watcher.join(patience_s())
            heal(pair)
        return again - promoted[0]

    @pytest.mark.parametrize("fault", [kill, freeze, hand_over])
    def test_one_effect(self, pair: Pair, make_rivals: Any, fault: Callable[[Pair], None]) -> None:
        """With a ledger the holder ends its work, and a rival is refused before and after the
        failover."""
        rivals = make_rivals(locks=pair.cluster.url)
        order = int(pair.key.removeprefix("order:"))

        def during(guard: Any) -> None:
            fault(pair)
            for wait in (lambda: None, lambda: wait_until(pair.promoted)):
                wait()
                with pytest.raises(KeyBusyError):
                    rivals.ship_too(order=order)
            guard.check()

        assert rivals.ship(during, order=order) == "first"
        assert rivals.ship_too(order=order) == "first"
        assert rivals.shipped(order) == ["first"]

    def test_others_are_served_meanwhile(self, two: Cluster) -> None:
        """If a master is down without a replacement, leases of other masters are renewed. Its own
        get no answer."""
        for node in two.nodes:
            two.ask(node, "FLUSHALL")  # locks that an earlier test left
        locks, owner = locks_of(two), new_owner("m")
        keys = [f"order:{number}" for number in range(30)]
        masters = {key: two.master_of(f"taskguard:{{{key}}}") for key in keys}
        away = masters["order:1"]
        other = next(key for key, node in masters.items() if node is not away)
        holds = [Hold((key,), owner, 600.0) for key in ("order:1", other)]
        for hold in holds:
            assert isinstance(take(locks, owner, keys=hold.keys), Granted)
        away.pause()
        try:
            assert locks.renew(holds) == [Renewal.UNANSWERED, Renewal.RENEWED]
        finally:
            away.resume()
        for hold in holds:
            locks.release(hold.keys, owner)


@contextmanager
def unreplicated(pair: Pair) -> Iterator[None]:
    """The replica hears nothing of what is granted meanwhile; then the master dies."""
    with Proxy(pair.master.port) as way:
        pair.cluster.announce(pair.master, way.port)
        wait_until(
            lambda: pair.cluster.ask(pair.replica, "ROLE")[2:4] == [way.port, "connected"],
            message="the replica follows by the proxy",
        )
        way.mode = Mode.BLACK_HOLE
        yield
        pair.master.kill()
        wait_until(pair.promoted, message="promoted")


class TestLostGrant:
    """A lease that the replica did not get. The holder uses the master directly, past the proxy."""

    def test_locks_only_it_is_granted_twice(self, pair: Pair) -> None:
        """Without a ledger, a lease that the replica lacks can be granted twice."""
        with unreplicated(pair):
            before = take(RedisLocks(pair.master.url), keys=(pair.key,))
            assert isinstance(before, Granted)
        second = locks_of(pair.cluster)
        after = wait_until(lambda: taken_at_last(second, pair.key))
        assert after.fence > before.fence

    def test_the_ledger_keeps_it(self, pair: Pair, make_rivals: Any) -> None:
        """With a ledger, the lock server grants the rival, and the ledger refuses it."""
        rivals = make_rivals(locks=pair.master.url, second_locks=pair.cluster.url)
        order = int(pair.key.removeprefix("order:"))
        with ExitStack() as fault:

            def during(guard: Any) -> None:
                fault.close()
                with pytest.raises(KeyBusyError):
                    rivals.ship_too(order=order)
                guard.check()

            fault.enter_context(unreplicated(pair))
            assert rivals.ship(during, order=order) == "first"
        assert rivals.ship_too(order=order) == "first"
        assert rivals.shipped(order) == ["first"]


def taken_at_last(locks: RedisLocks, key: str) -> Granted | None:
    with suppress(LockServerUnavailableError):
        answer = take(locks, keys=(key,))
        return answer if isinstance(answer, Granted) else None
    return None


def test_a_worker_goes_on_through_a_failover(pair: Pair, make_shop: Any) -> None:
    """If the master dies while a Celery worker runs bodies, each order has one effect."""
    shop = make_shop(SHOP_LOCKS=pair.cluster.url)
    order = int(pair.key.removeprefix("order:"))
    with shop.worker(concurrency=3) as worker:
        results = [shop.tasks.ship.delay(number, 3.0) for number in (order, 2001, 2002)]
        shop.wait_for_steps("began", 3)
        pair.copied()
        pair.master.kill()
        results += [shop.tasks.ship.delay(number) for number in (order, 2001, 2003)]
        wait_until(pair.promoted)
        results += [shop.tasks.ship.delay(number) for number in (order, 2004)]
        for result in results:
            result.get(timeout=patience_s())
        assert "lost after" not in worker.text()
    assert dict(shop.effects()) == dict.fromkeys(map(str, (order, 2001, 2002, 2003, 2004)), 1)


def test_locks_alone_through_a_failover(pair: Pair) -> None:
    """Without a ledger, a lease with a ttl above the failover's time is kept."""
    tg = connect(locks=pair.cluster.url, ledger=None)
    try:
        with tg.lock(pair.key, ttl_s=60.0) as lock:
            pair.copied()
            pair.master.kill()
            wait_until(pair.is_settled)
            lock.check()
        assert not pair.cluster.ask(pair.replica, "EXISTS", pair.name)
    finally:
        tg.close()
