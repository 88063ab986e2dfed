"""Judges: from facts to findings, without a server. Tests on real servers show the reading."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from taskguard.advisory_locks import health as advisory
from taskguard.advisory_locks.session import Opened
from taskguard.doctor.queues import judge_queue_server
from taskguard.errors import LockServerUnavailableError
from taskguard.integration import Finding
from taskguard.ledger.health.facts import Bodies, ServerFacts, TableFacts
from taskguard.ledger.health.judge import judge_server, judge_tables
from taskguard.lock_table import health as lock_table
from taskguard.locks.redis import health as redis
from taskguard.locks.redis.cluster import health as cluster
from taskguard.locks.redis.health import RedisFacts
from taskguard.locks.redlock import health as redlock
from taskguard_consul import health as consul
from taskguard_etcd import health as etcd
from taskguard_etcd.link import RefusedError
from taskguard_zookeeper import health as zookeeper
from taskguard_zookeeper.health import ServerFacts as Server
from taskguard_zookeeper.health import SessionFacts, ZooKeeperFacts

DAY_S = 86_400.0
BODIES = Bodies(longest_s=30.0, retention_s=30 * DAY_S)
AWAY = LockServerUnavailableError("no answer.")
FULL = RedisFacts(policy="allkeys-lru", most_bytes=1)


def names(found: Iterable[Finding]) -> list[str]:
    return [each.name for each in found]


@pytest.mark.parametrize(
    ("facts", "bodies", "expected"),
    [
        (ServerFacts(), BODIES, []),
        (ServerFacts(read_only="a standby"), BODIES, ["read_only"]),
        (ServerFacts(unflushed="fsync = off"), BODIES, ["commits_unflushed"]),
        (ServerFacts(pooled=True), BODIES, []),
        (ServerFacts(prepares=True), BODIES, []),
        (ServerFacts(pooled=True, prepares=True), BODIES, ["pooled_prepares"]),
        (ServerFacts(limits_s={"wait_timeout": 30.0}), BODIES, []),
        (ServerFacts(limits_s={"a": 29.0, "b": 1.0}), BODIES, ["transaction_timeout"] * 2),
        (ServerFacts(), Bodies(longest_s=30.0, idle_s=30.0), []),
        (ServerFacts(), Bodies(longest_s=30.0, idle_s=29.0), ["idle_transactions"]),
    ],
)
def test_a_ledgers_server(facts: ServerFacts, bodies: Bodies, expected: list[str]) -> None:
    """A limit is found if it is shorter than a body may take."""
    assert names(judge_server(facts, bodies, where="x")) == expected


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (TableFacts(), []),
        (TableFacts(without_key=("a", "b")), ["primary_key_missing"] * 2),
        (TableFacts(without_index=("a",)), ["index_missing"]),
        (TableFacts(oldest_ended_s=60 * DAY_S), []),
        (TableFacts(oldest_ended_s=61 * DAY_S), ["purge_never_run"]),
        (TableFacts(overdue=1), ["overdue_work"]),
    ],
)
def test_a_ledgers_tables(facts: TableFacts, expected: list[str]) -> None:
    """Old work is found if it is twice as old as any task needs it."""
    assert names(judge_tables(facts, BODIES, where="x")) == expected


def test_how_many_messages_are_overdue() -> None:
    """No more than a thousand are counted."""
    (few,) = judge_tables(TableFacts(overdue=999), BODIES, where="x")
    (many,) = judge_tables(TableFacts(overdue=1000), BODIES, where="x")
    assert few.what.endswith(": 999.")
    assert many.what.endswith(": 1,000 or more.")


@pytest.mark.parametrize(
    ("facts", "locks", "queues"),
    [
        (RedisFacts(), [], []),
        (RedisFacts(policy="allkeys-lru"), [], []),
        (FULL, ["eviction"], ["queue_eviction"]),
        (RedisFacts(journal=False), ["no_persistence"], ["queue_no_persistence"]),
        (RedisFacts(replica_of="h:1"), ["replica"], ["queue_replica"]),
        (RedisFacts(cluster=True), ["cluster_mode"], []),
        (RedisFacts(replicas=1), ["async_replicas"], []),
        (RedisFacts(replicas=1, waits_for_replicas=True), [], []),
    ],
)
def test_a_redis(facts: RedisFacts, locks: list[str], queues: list[str]) -> None:
    """One set of facts is judged as a lock server and as a server of queues."""
    assert names(redis.judge(facts, where="x")) == locks
    assert names(judge_queue_server(facts, where="x")) == queues


def test_redlock() -> None:
    """Each server by itself, and those that are one server."""
    assert names(redlock.judge({"a": RedisFacts(), "b": RedisFacts()})) == []
    assert names(redlock.judge({"a": FULL})) == ["eviction"]
    assert names(redlock.judge({"a": RedisFacts(replica_of="h:1")})) == ["redlock_replica"]
    (found,) = redlock.judge({each: RedisFacts(run_id=each[0]) for each in ("a1", "b1", "a2")})
    assert (found.name, found.where) == ("redlock_same_server", "a2")
    assert "a1" in found.what


def test_a_redis_cluster() -> None:
    """The cluster, and each of its nodes."""
    cases = [
        (cluster.ClusterFacts(nodes={"a": RedisFacts(cluster=True, journal=False)}), []),
        (cluster.ClusterFacts(state="fail"), ["cluster_down"]),
        (cluster.ClusterFacts(slots_ok=16_383), ["cluster_slots"]),
        (cluster.ClusterFacts(nodes={"a": FULL, "b": FULL}), ["eviction"] * 2),
        (cluster.ClusterFacts(unreachable={"a": AWAY}), ["announced_address"]),
    ]
    for facts, expected in cases:
        assert names(cluster.judge(facts, address="x")) == expected


def test_locks_in_a_database() -> None:
    """Columns of a missing table are not judged."""
    cases = [
        (lock_table.LockTableFacts(read_only=False, is_there=True), []),
        (lock_table.LockTableFacts(True, True), ["locks_read_only"]),
        (lock_table.LockTableFacts(True, False), ["locks_read_only", "locks_table_missing"]),
        (lock_table.LockTableFacts(False, False, allowed=False), ["locks_table_missing"]),
        (lock_table.LockTableFacts(False, True, allowed=False), ["locks_privileges"]),
        (lock_table.LockTableFacts(False, True, unlogged=True), ["locks_unlogged"]),
    ]
    for facts, expected in cases:
        assert names(lock_table.judge(facts, where="x")) == expected


def test_advisory_locks() -> None:
    """Every reason for which advisory locks exclude no other process is found."""
    sound, pooled = Opened(1, own=True, replica=False), Opened(1, own=False, replica=True)
    assert names(advisory.judge(sound, in_galera=False, where="x")) == []
    assert names(advisory.judge(pooled, in_galera=True, where="x")) == [
        "advisory_pooled",
        "advisory_replica",
        "advisory_galera",
    ]


def test_etcd_and_consul() -> None:
    """A silent member, a missing majority and missing rights have the same names everywhere."""
    refused = RefusedError("no", code=7, said="no")
    silent, quorum = {"a": AWAY}, ["lock_server_member", "lock_server_quorum"]
    rights = ["lock_server_rights"]
    assert names(etcd.judge(etcd.EtcdFacts(), address="x")) == []
    assert names(etcd.judge(etcd.EtcdFacts(silent, undecided=AWAY), address="x")) == quorum
    assert names(etcd.judge(etcd.EtcdFacts(refused=refused), address="x")) == rights
    alarms = etcd.EtcdFacts(alarms=frozenset({"NOSPACE", "CORRUPT"}))
    assert names(etcd.judge(alarms, address="x")) == ["etcd_alarm"] * 2
    assert names(consul.judge(consul.ConsulFacts(), address="x")) == []
    leaderless = consul.ConsulFacts(silent, has_leader=False)
    assert names(consul.judge(leaderless, address="x")) == quorum
    forbidden = consul.ConsulFacts(refused=consul.RefusedError("no"))
    assert names(consul.judge(forbidden, address="x")) == rights


@pytest.mark.parametrize(
    ("servers", "session", "expected"),
    [
        ([Server(mode="leader", version="3.8.0")], SessionFacts(9.0, 9.0), []),
        ([Server()], SessionFacts(9.0, 9.0), []),
        ([Server(), Server(error=OSError("no"))], None, ["lock_server_member"]),
        ([Server(), Server(mode="read-only")], None, []),
        ([Server(mode="read-only"), Server(mode=None)], None, ["lock_server_quorum"]),
        ([Server(mode="standalone", version="3.5.9")], None, ["zookeeper_version"]),
        ([Server(version="3.10.0")], SessionFacts(9.0, 8.0), ["zookeeper_session"]),
    ],
)
def test_zookeeper(
    servers: list[Server], session: SessionFacts | None, expected: list[str]
) -> None:
    """The servers of the URL, and the session that one of them gave."""
    facts = ZooKeeperFacts({str(number): each for number, each in enumerate(servers)}, session)
    assert names(zookeeper.judge(facts, address="x")) == expected
