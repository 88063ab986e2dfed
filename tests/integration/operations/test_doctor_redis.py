"""Findings about a Redis with locks or queues, on real servers that are set up that way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from support.waiting import wait_until
from taskguard import connect
from taskguard.doctor import examine
from taskguard.doctor.locks import judge_leases
from taskguard.errors import LockServerUnavailableError
from taskguard.integration import Configuration, Finding, GuardedTask, Level, Policy, Report
from taskguard.locks import Traits
from taskguard.locks.memory import MemoryLocks
from taskguard.locks.redis import RedisLocks
from taskguard_sandbox.servers import RedisServer, Valkey, free_port

SECRET = "s3cret-horse"


@pytest.fixture(
    params=["valkey", "redis62", pytest.param("debian_redis", marks=pytest.mark.debian)]
)
def server(request: pytest.FixtureRequest) -> RedisServer:
    found: RedisServer = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def client(server: RedisServer) -> Iterator[Any]:
    """A plain client of the empty server, whose settings are put back."""
    with redis.Redis(port=server.port, decode_responses=True, protocol=2) as client:
        client.flushall()
        before = client.config_get("maxmemory*") | client.config_get("appendonly")
        client.config_set("appendonly", "yes")
        yield client
        for name in ("maxmemory", "maxmemory-policy", "appendonly"):
            client.config_set(name, before[name])


def found(url: str) -> dict[str, Finding]:
    """Return the findings by name, and close the connections."""
    locks = RedisLocks(url)
    try:
        return {finding.name: finding for finding in locks.check()}
    finally:
        locks.close()


def of_part(part: str, reports: list[Report]) -> dict[str, Finding]:
    return {
        each.name: each for report in reports if report.part == part for each in report.findings
    }


def test_nothing_is_found_and_nothing_is_left(server: RedisServer, client: Any) -> None:
    """The check tries each step of a lock, has no findings, and leaves no key."""
    client.config_resetstat()
    assert found(server.url) == {}
    assert client.info("commandstats")["cmdstat_evalsha"]["calls"] >= 5
    assert client.keys() == []


def test_eviction(server: RedisServer, client: Any) -> None:
    """A server that may evict keys is a finding. Without a memory limit it is none."""
    client.config_set("maxmemory-policy", "allkeys-lru")
    assert found(server.url) == {}
    client.config_set("maxmemory", "1gb")
    (finding,) = found(server.url).values()
    assert (finding.name, finding.level) == ("eviction", Level.WARNING)
    assert "maxmemory-policy is allkeys-lru" in finding.what


def test_no_persistence(server: RedisServer, client: Any, sqlite_url: str) -> None:
    """A warning without a ledger. A ledger refuses the second effect, so it is not reported."""
    client.config_set("appendonly", "no")
    for ledger, names in ((None, {"no_persistence"}), (sqlite_url, set())):
        runtime = lambda: connect(locks=server.url, ledger=ledger)  # noqa: B023,E731
        assert set(of_part("locks", examine(Configuration(runtime)))) == names


def test_memory_full(server: RedisServer, client: Any) -> None:
    """A full server is a finding, because no lock can be taken."""
    client.config_set("maxmemory", "1")
    finding = found(server.url)["lock_server_refuses"]
    assert finding.level is Level.ERROR
    assert "maxmemory" in finding.what


def test_rights(server: RedisServer, client: Any) -> None:
    """Each missing right is found by a trial. Settings that the user may not read are left out."""
    commands = "evalsha eval get set del exists pexpire pttl time lpush blpop"
    commands += " zadd zcard zrange zrem zscore"
    every = re.findall(r"\w+", commands)
    url = server.url_of(0, user="tasks", password=SECRET)
    try:
        for missing in ("pexpire", "blpop", "evalsha", "none"):
            rights = [f"+{right}" for right in every if right != missing]
            grant = ["SETUSER", "tasks", "reset", "on", f">{SECRET}", "~taskguard:*", *rights]
            client.execute_command("ACL", *grant)
            names = found(url)
            assert set(names) == ({"lock_server_rights"} if missing != "none" else set())
            assert not any(SECRET in str(each) for each in names.values())
    finally:
        client.execute_command("ACL", "DELUSER", "tasks")


def test_wrong_password() -> None:
    """A wrong or missing password is a finding, which does not show the right one."""
    with Valkey(requirepass=SECRET, appendonly="yes") as server:
        assert found(server.url_of(0, password=SECRET)) == {}
        for url in (server.url, server.url_of(0, password="wrong-horse")):
            (finding,) = found(url).values()
            assert (finding.name, finding.level) == ("lock_server_login", Level.ERROR)
            assert "horse" not in str(finding)


def test_replicas() -> None:
    """A server that answers before its replicas have the write is a finding. So is a replica."""
    with Valkey(appendonly="yes") as master:
        with Valkey(replicaof=f"127.0.0.1 {master.port}", appendonly="yes") as replica:
            replicating = redis.Redis(port=replica.port, protocol=2)
            with replicating:
                wait_until(lambda: replicating.info()["master_link_status"] == "up")
            assert found(replica.url)["replica"].level is Level.ERROR
            assert set(found(master.url)) == {"async_replicas"}
            with redis.Redis(port=master.port, protocol=2) as client:
                client.config_set("min-replicas-to-write", 1)
                wait_until(lambda: client.info()["min_slaves_good_slaves"] == 1)
            assert found(master.url) == {}


def test_cluster_mode() -> None:
    """A node of a Redis Cluster is a finding, because it is no single server."""
    with Valkey(cluster_enabled="yes", appendonly="yes") as node:
        finding = found(node.url)["cluster_mode"]
        assert finding.level is Level.ERROR
        assert "redis+cluster://" in finding.fix


def test_a_lock_server_that_is_away_is_a_finding() -> None:
    """The provider raises. An examination has a finding instead, and checks the rest."""
    url = f"redis://:{SECRET}@127.0.0.1:{free_port()}/0"
    with pytest.raises(LockServerUnavailableError):
        RedisLocks(url).check()
    reports = examine(Configuration(lambda: connect(locks=url, ledger=None)))
    finding = of_part("locks", reports)["lock_server_away"]
    assert finding.level is Level.ERROR
    assert SECRET not in str(finding)


class TestQueueServer:
    """A Redis that has the queues."""

    @pytest.fixture
    def examined(self) -> Callable[..., dict[str, Finding]]:
        def examined(server: Any) -> dict[str, Finding]:
            runtime = lambda: connect(locks=MemoryLocks(), ledger=None)  # noqa: E731
            return of_part("queue", examine(Configuration(runtime, queue_server=server)))

        return examined

    def test_nothing_is_found(self, server: RedisServer, client: Any, examined: Any) -> None:
        """A server with persistence and without eviction has no findings."""
        assert examined(server.url) == {}

    def test_eviction_and_persistence(
        self, server: RedisServer, client: Any, examined: Any
    ) -> None:
        """A server that evicts or loses messages is a finding."""
        client.config_set("appendonly", "no")
        client.config_set("maxmemory", "1gb")
        client.config_set("maxmemory-policy", "volatile-lru")
        assert set(examined(server.url)) == {"queue_eviction", "queue_no_persistence"}

    def test_replica(self, examined: Any) -> None:
        """A replica is a finding, because it takes no messages."""
        with Valkey(replicaof=f"127.0.0.1 {free_port()}", appendonly="yes") as replica:
            assert set(examined(replica.url)) == {"queue_replica"}

    def test_away(self, examined: Any) -> None:
        """A server that is down is a finding, which does not show the password."""
        finding = examined(f"redis://:{SECRET}@127.0.0.1:{free_port()}/0")["queue_server_away"]
        assert SECRET not in str(finding)

    def test_what_is_no_redis_of_ours_is_left_out(self, examined: Any) -> None:
        """A URL that kombu knows and redis-py does not is left out."""
        assert examined("redis://a:1;redis://b:1/0") == {}


class TestLeases:
    """Rules over traits: no server here has such."""

    TASKS = (GuardedTask("ship", Policy(ttl_s=6.0)), GuardedTask("bill", Policy(ttl_s=60.0)))

    def judge(self, traits: Traits, *, has_ledger: bool = True) -> list[tuple[str, Level, str]]:
        found = judge_leases(traits, self.TASKS, has_ledger=has_ledger, where="the lock server x")
        return [(each.name, each.level, each.where) for each in found]

    def test_a_ttl_that_is_made_longer(self) -> None:
        """If a lock server makes a ttl longer, a note names the tasks."""
        assert self.judge(Traits(min_ttl_s=10.0)) == [("ttl_raised", Level.NOTE, "the tasks ship")]
        assert self.judge(Traits(min_ttl_s=5.0)) == []

    def test_a_ttl_below_the_time_of_a_fail_over(self) -> None:
        """A ttl is a finding if two thirds of it are shorter than a failover."""
        assert self.judge(Traits(failover_s=4.0)) == []
        assert self.judge(Traits(failover_s=5.0), has_ledger=True) == []
        assert self.judge(Traits(failover_s=5.0), has_ledger=False) == [
            ("ttl_below_failover", Level.WARNING, "the tasks ship")
        ]
