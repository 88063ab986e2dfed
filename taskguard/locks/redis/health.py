"""Judge a Redis or Valkey server that has locks, by its answer to INFO. Nothing here queries it.

A fact that the server did not tell has the best value. Whether there is a ledger is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator

from taskguard.findings import Finding
from taskguard.locks.redis import findings
from taskguard.locks.redis.refusals import Refusal
from taskguard.values import value

__all__ = ["RedisFacts", "facts_of", "judge", "judge_refusal"]


@value
class RedisFacts:
    """Facts from INFO.

    Attributes:
        policy: its maxmemory-policy.
        most_bytes: its maxmemory. 0: no limit.
        journal: whether it writes each change to a file (appendonly).
        replica_of: host and port of its primary. None: it is a primary.
        replicas: how many replicas are connected.
        waits_for_replicas: whether it refuses writes without enough replicas
            (min-replicas-to-write).
        cluster: whether it is a node of a Redis Cluster.
        run_id: the id of the server's process.
    """

    policy: str = "noeviction"
    most_bytes: int = 0
    journal: bool = True
    replica_of: str | None = None
    replicas: int = 0
    waits_for_replicas: bool = False
    cluster: bool = False
    run_id: str = ""

    @property
    def is_usable(self) -> bool:
        """Return whether a single server's locks can be taken there."""
        return self.replica_of is None and not self.cluster

    @property
    def evicts(self) -> bool:
        """Return whether it deletes keys when its memory is full."""
        return self.most_bytes > 0 and self.policy != "noeviction"


def facts_of(info: str) -> RedisFacts:
    """Return the facts in a reply to INFO."""
    said = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    master = f"{said.get('master_host')}:{said.get('master_port')}"
    return RedisFacts(
        policy=said.get("maxmemory_policy", "noeviction"),
        most_bytes=int(said.get("maxmemory", 0)),
        journal=said.get("aof_enabled", "1") == "1",
        replica_of=master if said.get("role") == "slave" else None,
        replicas=int(said.get("connected_slaves", 0)),
        # The server counts them only if min-replicas-to-write is set.
        waits_for_replicas="min_slaves_good_slaves" in said,
        cluster=said.get("cluster_enabled") == "1",
        run_id=said.get("run_id", ""),
    )


def judge(facts: RedisFacts, *, where: str) -> Iterator[Finding]:
    """Judge what these facts mean for locks."""
    if facts.cluster:
        yield findings.CLUSTER_MODE.at(where)
    if facts.replica_of is not None:
        yield findings.REPLICA.at(where, primary=facts.replica_of)
    if facts.evicts:
        yield findings.EVICTION.at(where, policy=facts.policy)
    if not facts.journal:
        yield findings.NO_PERSISTENCE.at(where)
    if facts.replicas and not facts.waits_for_replicas:
        yield findings.ASYNC_REPLICAS.at(where, count=facts.replicas)


def judge_refusal(refusal: Refusal, error: Exception, *, where: str) -> Finding:
    """Return the finding for a server that refused one of a lock's own commands."""
    if refusal is Refusal.CLUSTER:
        return findings.CLUSTER_MODE.at(where)
    if refusal is Refusal.LOGIN:
        return findings.LOCK_SERVER_LOGIN.at(where, error=error)
    if refusal is Refusal.RIGHTS:
        return findings.LOCK_SERVER_RIGHTS.at(where, error=error)
    return findings.LOCK_SERVER_REFUSES.at(where, error=error)
