"""Connecting to a Redis Cluster: addresses, moved slots, silent nodes, round trips.

The contract suite checks the locks there, and `faults/test_cluster.py` the work.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import pytest
import redis
from redis.exceptions import ClusterDownError

from support.certificates import Certificates
from support.needs import need
from support.proxy import Mode, Proxy
from support.waiting import patience_s, wait_until
from taskguard.doctor import GuardedTask
from taskguard.doctor.locks import check_locks
from taskguard.errors import ConfigurationError, LockServerUnavailableError
from taskguard.locks.base import Granted, Held, Hold, Renewal
from taskguard.locks.redis import RedisLocks
from taskguard.locks.redis.cluster import RedisClusterLocks
from taskguard.locks.redis.protocol import Script
from taskguard.model.lease import new_owner
from taskguard.model.policy import Policy
from taskguard.settings import make_locks
from taskguard_sandbox.clusters import Cluster
from taskguard_sandbox.process import free_port
from taskguard_sandbox.servers import DebianRedis, Valkey

KEY = ("order:42",)
MANY = tuple(f"order:{number}" for number in range(1_000))


def connect(url: str, **options: Any) -> RedisClusterLocks:
    return RedisClusterLocks(url, **{"socket_timeout_s": 3.0, "connect_timeout_s": 3.0} | options)


def take(
    locks: RedisLocks, keys: tuple[str, ...] = KEY, owner: Any = None, ttl_s: float = 60.0
) -> Granted | Held:
    return locks.acquire(keys, owner or new_owner("m"), ttl_s=ttl_s, with_fence=True, wait_s=0.0)


def is_answered(locks: RedisLocks) -> bool:
    try:
        take(locks)
    except LockServerUnavailableError:
        return False
    return True


def taken(locks: RedisLocks, keys: tuple[str, ...]) -> list[Hold]:
    owner = new_owner("m")
    for key in keys:
        assert isinstance(take(locks, (key,), owner), Granted)
    return [Hold((key,), owner, 60.0) for key in keys]


def asked(cluster: Cluster, command: str = "cluster|slots") -> int:
    """Return how often all nodes got this command so far."""
    calls = 0
    for node in cluster.nodes:
        if node.running:
            said = cluster.ask(node, "INFO", "commandstats")
            calls += said.get(f"cmdstat_{command}", {}).get("calls", 0)
    return calls


@contextmanager
def trips(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[None]]:
    """Yield a list with one element for each write to a server."""
    made: list[None] = []
    by_redis_py = redis.Connection.send_packed_command

    def sending(self: Any, command: Any, check_health: bool = True) -> Any:
        made.append(None)
        return by_redis_py(self, command, check_health)

    with monkeypatch.context() as patch:
        patch.setattr(redis.Connection, "send_packed_command", sending)
        yield made


@pytest.fixture(autouse=True)
def empty(request: pytest.FixtureRequest) -> None:
    if "cluster" in request.fixturenames:
        cluster: Cluster = request.getfixturevalue("cluster")
        for node in cluster.nodes:
            if cluster.is_master(node):
                cluster.ask(node, "FLUSHALL")


class TestAddresses:
    @pytest.mark.parametrize(
        "url",
        [
            "redis+cluster://",
            "redis+cluster://h:x",
            "redis+cluster://h:1,",
            "redis+cluster://h:99999999",
            "redis+cluster://h:1/3",
            "redis+cluster://u:sec/ret@h:1",
            "redis+cluster://u:sec#ret@h:1",
            "redis+cluster://u:sec?ret@h:1",
            "rediss+cluster://:secret@h:1/x",
        ],
    )
    def test_unreadable(self, url: str) -> None:
        """An invalid URL is refused at once, with an example and without its password."""
        with pytest.raises(ConfigurationError, match=r"\[user:password@\]host:port,host:port") as e:
            make_locks(url)
        assert not any(word in str(e.value) for word in ("sec", "ret"))
        assert e.value.__cause__ is None

    def test_option(self) -> None:
        """An option that redis-py does not have is named."""
        with pytest.raises(ConfigurationError, match="does not accept the option socket_timeoutt"):
            make_locks("redis+cluster://h:1?socket_timeoutt=3")

    def test_client(self, cluster: Cluster) -> None:
        """A client of redis-py for clusters is refused: its URL does it."""
        with (
            redis.RedisCluster(host="127.0.0.1", port=cluster.nodes[0].port) as client,
            pytest.raises(ConfigurationError, match=r"redis\+cluster://host:port"),
        ):
            make_locks(client)
        with pytest.raises(ConfigurationError, match="need its URL"):
            RedisClusterLocks(redis.Redis())

    def test_any_node_will_do(self, cluster: Cluster) -> None:
        """One address is enough, even of a replica. Addresses without a server are skipped."""
        nobody = f"127.0.0.1:{free_port()}"
        for node in cluster.nodes:
            locks = make_locks(f"redis+cluster://{nobody},127.0.0.1:{node.port}")
            assert isinstance(locks, RedisClusterLocks)
            for hold in taken(locks, MANY[:20]):
                assert locks.release(hold.keys, hold.owner)
            locks.close()

    def test_no_address_has_a_server(self) -> None:
        """If no address has a server, the error names the address and the lock server."""
        url = f"redis+cluster://127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
        for _ in range(2):
            with pytest.raises(
                LockServerUnavailableError, match=r"127\.0\.0\.1:\d+ of the cluster"
            ):
                take(connect(url))

    def test_silent_addresses(self, cluster: Cluster) -> None:
        """However many addresses are silent, a search ends in time. The next call begins with the
        addresses that were not silent, and finds the cluster."""
        with ExitStack() as stack:
            proxies = [stack.enter_context(Proxy(cluster.nodes[0].port)) for _ in range(12)]
            for proxy in proxies:
                proxy.mode = Mode.BLACK_HOLE
            hosts = ",".join(f"127.0.0.1:{proxy.port}" for proxy in proxies)
            url = f"redis+cluster://{hosts},127.0.0.1:{cluster.nodes[0].port}"
            locks = connect(url, socket_timeout_s=0.3, connect_timeout_s=0.3)

            def search_s() -> float:
                began_s = time.monotonic()
                with pytest.raises(LockServerUnavailableError, match="gave no answer"):
                    take(locks)
                return time.monotonic() - began_s

            # 12 timeouts of 0.3 s take 3.6 s; a search has 1.2 s, and ends with a node's timeout.
            assert search_s() < 2.5
            wait_until(lambda: is_answered(locks))

    def test_one_server(self, redis_url: str) -> None:
        """A server that is no cluster raises an error with the correct URL."""
        with pytest.raises(LockServerUnavailableError, match="write redis://"):
            take(connect(redis_url.replace("redis://", "redis+cluster://")))

    def test_plain_url(self, cluster: Cluster) -> None:
        """With `redis://` to a node of a cluster, the error has the correct URL."""
        locks = RedisLocks(cluster.nodes[0].url)
        with pytest.raises(LockServerUnavailableError, match=r"redis\+cluster://127\.0\.0\.1:"):
            for key in MANY[:50]:
                take(locks, (key,))

    def test_escaped(self, cluster: Cluster) -> None:
        """Keys that would have no hash tag are escaped, and have different names."""
        locks = connect(cluster.url)
        for key in ("", "}", "\\", "\\}", "\\\\}", "}}", "}x", "%7Dx"):
            assert isinstance(take(locks, (key,)), Granted)


class TestUsers:
    PASSWORD = "p@ss:/w,ör#d"
    QUOTED = "p%40ss%3A%2Fw%2C%C3%B6r%23d"

    def test_password(self) -> None:
        """A user with the rights of the page can do everything. Its password may be
        percent-encoded."""
        rights = (
            "~taskguard:* -@all +evalsha +eval +get +set +del +exists +pexpire +pttl +time +lpush"
            " +blpop +zadd +zcard +zrange +zrem +zscore +cluster|slots +asking"
        )
        users = ["default on nopass ~* &* +@all", f"tasks on >{self.PASSWORD} {rights}"]
        with Cluster(masters=1, user=users) as cluster:
            url = cluster.url_of(user="tasks", password=self.QUOTED)
            locks = connect(url)
            for hold in taken(locks, MANY[:20]):
                assert locks.renew([hold]) == [Renewal.RENEWED]
                assert locks.release(hold.keys, hold.owner)
            locks.wait("a", new_owner(), timeout_s=0.05)
            assert locks.check() == []
            assert self.PASSWORD not in repr(locks)
            wrong = connect(cluster.url_of(user="tasks", password="wrong"))
            with pytest.raises(LockServerUnavailableError, match="refuses user or password"):
                take(wrong)


class TestSlots:
    def test_no_polling(self, cluster: Cluster) -> None:
        """A provider reads the slots once."""
        locks = connect(cluster.url)
        before = asked(cluster)
        for _ in range(3):
            for hold in taken(locks, MANY[:200]):
                locks.release(hold.keys, hold.owner)
        assert asked(cluster) == before + 1

    def test_one_trip(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        """A single key is acquired in one round trip, and released in one."""
        locks, owner = connect(cluster.url), new_owner("m")
        take(locks, owner=owner)
        locks.release(KEY, owner)
        with trips(monkeypatch) as made:
            take(locks, owner=owner)
            locks.release(KEY, owner)
        assert len(made) == 2

    def test_a_thousand_renewals(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        """A thousand leases are renewed in a round trip for each master."""
        locks = connect(cluster.url)
        holds = taken(locks, MANY)
        locks.renew(holds[:50])
        with trips(monkeypatch) as made:
            assert set(locks.renew(holds)) == {Renewal.RENEWED}
        assert len(made) == 3

    def test_more_than_a_write(self, cluster: Cluster) -> None:
        """Renewals beyond what one write takes get their own answers, in order."""
        locks, owner = connect(cluster.url), new_owner("m")
        take(locks, KEY, owner)
        holds = [Hold((f"k{n}",), owner, 60.0) for n in range(4_000)]
        holds[3_500:3_500] = [Hold(KEY, owner, 60.0)]
        answers = locks.renew(holds)
        assert [n for n, answer in enumerate(answers) if answer == Renewal.RENEWED] == [3_500]

    def test_unknown_scripts(self, cluster: Cluster) -> None:
        """Nodes that have forgotten all scripts cost one more round trip."""
        locks = connect(cluster.url)
        holds = taken(locks, MANY[:60])
        for node in cluster.nodes:
            cluster.ask(node, "SCRIPT", "FLUSH")
        assert set(locks.renew(holds)) == {Renewal.RENEWED}
        for node in cluster.nodes:
            cluster.ask(node, "SCRIPT", "FLUSH")
        for hold in holds:
            assert locks.release(hold.keys, hold.owner)


@contextmanager
def behind_proxies(cluster: Cluster) -> Iterator[dict[int, Proxy]]:
    """Let clients reach the masters through proxies."""
    with ExitStack() as stack:
        masters = [node for node in cluster.nodes if cluster.is_master(node)]
        proxies = {node: stack.enter_context(Proxy(node.port)) for node in masters}
        stack.enter_context(
            cluster.announcing({node: proxy.port for node, proxy in proxies.items()})
        )
        yield {node.port: proxy for node, proxy in proxies.items()}


def apart(cluster: Cluster) -> tuple[str, ...]:
    """Return a key for each master, in their order."""
    found: dict[Any, str] = {}
    for key in MANY:
        found.setdefault(cluster.master_of(f"taskguard:{{{key}}}"), key)
        if len(found) == 3:
            break
    return tuple(sorted(found.values()))


class TestSilentNode:
    @pytest.mark.parametrize("mode", [Mode.BLACK_HOLE, Mode.CUT])
    def test_others_are_renewed(self, cluster: Cluster, mode: Mode) -> None:
        """If one node is silent, the leases of the other nodes are renewed, and its own get no
        answer."""
        ports = {key: cluster.master_of(f"taskguard:{{{key}}}").port for key in MANY[:90]}
        with behind_proxies(cluster) as proxies:
            locks = connect(cluster.url)
            holds = taken(locks, MANY[:90])
            both = Hold((*holds[0].keys, *holds[1].keys, *holds[2].keys), holds[0].owner, 60.0)
            silent = ports[MANY[0]]
            assert len({ports[key] for key in both.keys}) > 1
            proxies[silent].mode = mode
            answers = dict(zip(MANY, locks.renew(holds), strict=False))
            for key, answer in answers.items():
                expected = Renewal.UNANSWERED if ports[key] == silent else Renewal.RENEWED
                assert answer == expected
            assert locks.renew([holds[0], both])[1] == Renewal.UNANSWERED
            proxies[silent].mode = Mode.PASS
            assert set(locks.renew(holds)) == {Renewal.RENEWED}

    def test_several_silent_nodes(self, cluster: Cluster) -> None:
        """Two of three nodes are silent: the renewal takes the time of one, and a search that asks
        the third node first."""
        keys = apart(cluster)
        ports = {key: cluster.master_of(f"taskguard:{{{key}}}").port for key in keys}
        with behind_proxies(cluster) as proxies:
            locks = connect(cluster.url, socket_timeout_s=2.0, connect_timeout_s=2.0)
            owner = new_owner("m")
            holds = [Hold((key,), owner, 60.0) for key in keys]
            for hold in holds:
                assert isinstance(take(locks, hold.keys, owner), Granted)
            for key in keys[:2]:
                proxies[ports[key]].mode = Mode.BLACK_HOLE
            began_s = time.monotonic()
            answers = locks.renew(holds)
            assert answers == [Renewal.UNANSWERED, Renewal.UNANSWERED, Renewal.RENEWED]
            assert time.monotonic() - began_s < 3.5  # two timeouts of 2 s take 4 s

    def test_no_server_answers(self, cluster: Cluster) -> None:
        """If all nodes are silent, the renewal raises instead of answering for single leases."""
        with behind_proxies(cluster) as proxies:
            locks = connect(cluster.url)
            holds = taken(locks, MANY[:20])
            for proxy in proxies.values():
                proxy.mode = Mode.CUT
            with pytest.raises(LockServerUnavailableError):
                locks.renew(holds)

    def test_what_was_taken_is_given_back(self, cluster: Cluster) -> None:
        """If a node is silent, keys of the same request that were already taken are released."""
        ports = {key: cluster.master_of(f"taskguard:{{{key}}}").port for key in MANY[:20]}
        first = MANY[0]
        last = next(key for key in MANY[:20] if ports[key] != ports[first])
        with behind_proxies(cluster) as proxies:
            locks = connect(cluster.url)
            proxies[ports[last]].mode = Mode.CUT
            with pytest.raises(LockServerUnavailableError):
                take(locks, (first, last))
            assert isinstance(take(locks, (first,)), Granted)

    def test_a_release_that_may_arrive_late(self, cluster: Cluster) -> None:
        """If keys were given back without a reply, the error does not tell the owner to ask again:
        the lost request could free the keys after a later grant."""
        first, last = apart(cluster)[:2]
        port = cluster.master_of(f"taskguard:{{{first}}}").port
        with behind_proxies(cluster) as proxies:
            locks, owner, other = connect(cluster.url), new_owner("m"), new_owner("n")
            assert isinstance(take(locks, (last,), other), Granted)
            assert isinstance(take(locks, (first, last), new_owner("o")), Held)
            proxies[port].delay(Script("release", after="line").sha)
            with pytest.raises(LockServerUnavailableError, match="after a refusal"):
                take(locks, (first, last), owner)
            assert isinstance(take(locks, (first,), new_owner("p")), Granted)
            proxies[port].deliver()

    def test_a_lost_reply_to_one_of_several(self, cluster: Cluster) -> None:
        """If a step gets no reply, it is repeated: one grant, one token. If a later key is
        another's, nothing is left."""
        keys = apart(cluster)
        ports = {key: cluster.master_of(f"taskguard:{{{key}}}").port for key in keys}
        with behind_proxies(cluster) as proxies:
            locks = connect(cluster.url)
            owner = new_owner("m")
            granted = take(locks, keys, owner)
            assert isinstance(granted, Granted)
            locks.release(keys, owner)
            for key in keys:
                owner = new_owner("m")
                proxies[ports[key]].lose_reply_to(b"EVALSHA", then=Mode.CUT)
                again = take(locks, keys, owner)
                assert not proxies[ports[key]].armed
                assert isinstance(again, Granted)
                assert again.fence > granted.fence
                assert take(locks, keys, owner) == again
                assert locks.release(keys, owner)
                granted = again
            other = new_owner("n")
            take(locks, keys[-1:], other)
            proxies[ports[keys[0]]].lose_reply_to(b"EVALSHA", then=Mode.CUT)
            assert isinstance(take(locks, keys), Held)
            assert isinstance(take(locks, keys[:1]), Granted)

    def test_an_interrupted_search(self, cluster: Cluster) -> None:
        """If a signal interrupts a call that has just begun to read the slots, others read them."""
        locks = connect(cluster.url, socket_timeout_s=0.3, connect_timeout_s=0.3)
        assert locks._link._turn.acquire(False)
        wait_until(lambda: is_answered(locks))

    def test_no_herd(self, cluster: Cluster) -> None:
        """If many threads meet one silent node, they do not all request the slots from the other
        nodes."""
        port = cluster.master_of("taskguard:{order:42}").port
        with behind_proxies(cluster) as proxies:
            locks = connect(cluster.url, socket_timeout_s=0.3)
            wait_until(lambda: is_answered(locks))
            before, began_s = asked(cluster), time.monotonic()
            proxies[port].mode = Mode.BLACK_HOLE
            failed: list[None] = []

            def run() -> None:
                with pytest.raises(LockServerUnavailableError, match=r"gave no answer"):
                    take(locks)
                failed.append(None)

            threads = [threading.Thread(target=run) for _ in range(200)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(patience_s())
            assert len(failed) == 200
            # Requests may repeat after a tenth of a second: the longer they take, the more of them.
            took_s = time.monotonic() - began_s
            assert asked(cluster) - before <= min(40 + 20 * took_s, 150)

    def test_it_says_which(self, cluster: Cluster) -> None:
        """The error and a finding name an announced address that cannot be reached."""
        node, nobody = cluster.master_of("taskguard:{order:42}"), free_port()
        with cluster.announcing({node: nobody}):
            locks = connect(cluster.url)
            with pytest.raises(LockServerUnavailableError, match=f"127.0.0.1:{nobody} of the clus"):
                take(locks)
            (finding,) = [each for each in locks.check() if each.name == "announced_address"]
            assert f"127.0.0.1:{nobody}" in finding.where


class TestMoved:
    """All slots that a provider knows are wrong."""

    @staticmethod
    def mislead(locks: RedisClusterLocks) -> None:
        link = locks._link
        assert link._topology is not None
        slots = link._topology.nodes_manager.slots_cache
        masters = list({nodes[0].name: nodes[0] for nodes in slots.values()}.values())
        after = {a.name: b for a, b in zip(masters, masters[1:] + masters[:1], strict=True)}
        for slot, (node, *_) in slots.items():
            slots[slot] = [after[node.name]]
        link._read_at_s = float("-inf")

    def test_one_by_one(self, cluster: Cluster) -> None:
        """After the first refusal the provider reads the slots once, and uses them for all keys."""
        locks = connect(cluster.url)
        holds = taken(locks, MANY[:60])
        before = asked(cluster)
        self.mislead(locks)
        for hold in holds:
            assert locks.release(hold.keys, hold.owner) is True
        assert asked(cluster) <= before + 1

    def test_in_a_batch(self, cluster: Cluster) -> None:
        """Renewals that went to wrong nodes are repeated at the right ones."""
        locks = connect(cluster.url)
        holds = taken(locks, MANY[:300])
        locks.renew(holds)
        before = asked(cluster)
        self.mislead(locks)
        assert set(locks.renew(holds)) == {Renewal.RENEWED}
        assert asked(cluster) <= before + 1

    def test_to_another_side_of_the_network(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A node on the minority's side says that the cluster is down. The provider uses the
        others."""
        locks = connect(cluster.url)
        take(locks)
        self.mislead(locks)
        link = locks._link._link_of(b"{order:42}")

        def down(*words: Any, **options: Any) -> Any:
            raise LockServerUnavailableError("down") from ClusterDownError("down")

        monkeypatch.setattr(link, "call", down)
        assert isinstance(take(locks), Held)

    def test_while_waiting(self, cluster: Cluster) -> None:
        """A waiter at the wrong node continues to wait at the right one."""
        locks = connect(cluster.url)
        owner = new_owner("m")
        take(locks, owner=owner)
        waiter = new_owner("n")
        answer = locks.acquire(KEY, waiter, ttl_s=60, with_fence=False, wait_s=30)
        assert isinstance(answer, Held)
        self.mislead(locks)
        locks.wait(KEY[0], waiter, timeout_s=0.2)
        locks.release(KEY, owner)
        assert cluster.ask(cluster.master_of("taskguard:{order:42}"), "DBSIZE") >= 1


@pytest.fixture(scope="module")
def small() -> Iterator[Cluster]:
    """Start a cluster of one master and its replica, for wrong settings."""
    need(Valkey)
    with Cluster(masters=1, replicas=1) as cluster:
        yield cluster


class TestFindings:
    @staticmethod
    def names(cluster: Cluster) -> list[str]:
        return [finding.name for finding in connect(cluster.url).check()]

    @contextmanager
    def changed(self, cluster: Cluster, **settings: str) -> Iterator[None]:
        """Settings of every node."""
        words = {name.replace("_", "-"): value for name, value in settings.items()}
        before = [{name: cluster.config(node, name) for name in words} for node in cluster.nodes]
        for node in cluster.nodes:
            cluster.ask(node, "CONFIG", "SET", *chain.from_iterable(words.items()))
        yield
        for node, values in zip(cluster.nodes, before, strict=True):
            cluster.ask(node, "CONFIG", "SET", *chain.from_iterable(values.items()))

    def test_nothing(self, small: Cluster) -> None:
        """A cluster has no findings, even right after its start, before the first write."""
        assert self.names(small) == []

    def test_state_and_slots(self, small: Cluster) -> None:
        """A slot without a node is found, and so is the state of the cluster."""
        for node in small.nodes:
            small.ask(node, "CLUSTER", "DELSLOTS", 7, 8)
        try:
            wait_until(lambda: self.names(small) == ["cluster_down", "cluster_slots"])
            said = " ".join(map(str, connect(small.url).check()))
            assert "2 of 16384" in said
        finally:
            small.ask(small.nodes[0], "CLUSTER", "ADDSLOTS", 7, 8)
        wait_until(lambda: self.names(small) == [])

    def test_eviction(self, small: Cluster) -> None:
        """Each node that may evict locks is a finding. So is a replica, which may become a
        master."""
        with self.changed(small, maxmemory="100mb", maxmemory_policy="allkeys-lru"):
            found = connect(small.url).check()
        assert [finding.name for finding in found] == ["eviction", "eviction"]
        assert {finding.where.split()[3] for finding in found} == {
            f"127.0.0.1:{node.port}" for node in small.nodes
        }

    def test_leases_that_end_before_a_failover_has(self, small: Cluster) -> None:
        """2 s until a master counts as gone, and 3 s for the vote: more than 4 s of 6 s."""
        tasks = [GuardedTask("ship", Policy(ttl_s=6.0)), GuardedTask("bill", Policy())]
        with self.changed(small, cluster_node_timeout="2000"):
            (finding,), _ = check_locks(connect(small.url), tasks, has_ledger=False)
        assert (finding.name, finding.where) == ("ttl_below_failover", "the tasks ship")
        assert "about 5 s" in finding.what

    def test_no_node_answers(self) -> None:
        """If no node answers, check() raises."""
        with pytest.raises(LockServerUnavailableError):
            connect(f"redis+cluster://127.0.0.1:{free_port()}").check()


class TestTls:
    @pytest.mark.debian
    def test_encrypted(self, made_certificates: Certificates) -> None:
        """rediss+cluster:// asks every node by TLS, and knows a wrong certificate."""
        need(DebianRedis)
        port = free_port()
        clustered = {"cluster_enabled": "yes", "cluster_port": free_port(), "tls_cluster": "yes"}
        with DebianRedis(tls_port=port, **made_certificates.of_server(), **clustered) as server:
            with redis.Redis(port=server.port, decode_responses=True) as client:
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16_383)
                wait_until(lambda: client.cluster("info")["cluster_state"] == "ok")
            url = f"rediss+cluster://127.0.0.1:{port}"
            locks = connect(f"{url}?{made_certificates.of_client()}")
            for hold in taken(locks, MANY[:20]):
                assert locks.renew([hold]) == [Renewal.RENEWED]
                assert locks.release(hold.keys, hold.owner)
            with pytest.raises(LockServerUnavailableError, match="certificate verify failed"):
                take(connect(url))


class TestFork:
    def test_child(self, cluster: Cluster) -> None:
        """A child has connections of its own, and does not wait for a thread of its parent."""
        locks = connect(cluster.url)
        take(locks)
        locks._link._turn.acquire()  # as a thread of the parent would at the fork
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                child = connect(cluster.url)
                child._link._turn, child._link._pid = locks._link._turn, locks._link._pid
                if isinstance(take(locks), Held) and isinstance(take(child), Held):
                    status = 0
            finally:
                os._exit(status)
        locks._link._turn.release()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert isinstance(take(locks), Held)
