"""What is wrong with a Redis or Valkey server that has locks: rules over what it says of itself.

Guarantees: nothing here asks a server, and what the server did not say is not found fault with.
Does not know whether there is a ledger, which makes good what a server can lose.
"""

from __future__ import annotations

from collections.abc import Iterator

from taskguard.findings import Finding, Level
from taskguard.locks.redis.link import Refusal
from taskguard.values import value

__all__ = ["RedisFacts", "facts_of", "findings_of", "refused"]

_NEARLY_FULL = 0.9


@value
class RedisFacts:
    """What INFO says.

    Attributes:
        policy: its maxmemory-policy.
        most_bytes: its maxmemory; 0: it has no limit.
        used_bytes: how much of it is used.
        journal: whether each write goes to a file (appendonly).
        replica_of: host and port of its master; None: it is one itself.
        replicas: how many are connected.
        waits_for_replicas: whether it refuses writes without enough of them
            (min-replicas-to-write).
        cluster: whether it is a node of a Redis Cluster.
    """

    policy: str = "noeviction"
    most_bytes: int = 0
    used_bytes: int = 0
    journal: bool = True
    replica_of: str | None = None
    replicas: int = 0
    waits_for_replicas: bool = False
    cluster: bool = False

    @property
    def is_usable(self) -> bool:
        """Whether a single server's locks can be taken there at all."""
        return self.replica_of is None and not self.cluster

    @property
    def evicts(self) -> bool:
        """Whether it throws keys away when it is full."""
        return self.most_bytes > 0 and self.policy != "noeviction"

    @property
    def is_nearly_full(self) -> bool:
        """Whether it will soon refuse to store anything."""
        return 0 < self.most_bytes * _NEARLY_FULL <= self.used_bytes


def facts_of(info: str) -> RedisFacts:
    """The facts in a reply to INFO."""
    said = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    master = f"{said.get('master_host')}:{said.get('master_port')}"
    return RedisFacts(
        policy=said.get("maxmemory_policy", "noeviction"),
        most_bytes=int(said.get("maxmemory", 0)),
        used_bytes=int(said.get("used_memory", 0)),
        journal=said.get("aof_enabled", "1") == "1",
        replica_of=master if said.get("role") == "slave" else None,
        replicas=int(said.get("connected_slaves", 0)),
        # The server counts them only where it is told to.
        waits_for_replicas="min_slaves_good_slaves" in said,
        cluster=said.get("cluster_enabled") == "1",
    )


def findings_of(facts: RedisFacts, *, where: str) -> Iterator[Finding]:
    """What these facts mean for locks."""
    if facts.cluster:
        yield _cluster(where, "It is a node of a Redis Cluster (cluster-enabled yes).")
    if facts.replica_of is not None:
        yield Finding(
            "replica",
            Level.ERROR,
            where=where,
            what=f"It is a replica of {facts.replica_of}.",
            why="It takes no writes, so no lock is ever given.",
            fix="Give the master's address, or Sentinel's, which knows who that is.",
        )
    if facts.evicts:
        yield Finding(
            "eviction",
            Level.WARNING,
            where=where,
            what=f"It has maxmemory-policy {facts.policy}.",
            why="When it is full it throws locks away.",
            fix="CONFIG SET maxmemory-policy noeviction, or give locks a server of their own.",
        )
    if facts.is_nearly_full and not facts.evicts:
        share = facts.used_bytes / facts.most_bytes
        yield Finding(
            "memory_full",
            Level.WARNING,
            where=where,
            what=f"{share:.0%} of its maxmemory is used.",
            why="When it is full it gives no lock.",
            fix="CONFIG SET maxmemory to more, or give locks a server of their own.",
        )
    if not facts.journal:
        yield Finding(
            "no_persistence",
            Level.WARNING,
            where=where,
            what="It does not write each change to its disk (appendonly no).",
            why="A crash forgets locks that are held: with a ledger one effect stays one, with "
            "locks alone two may work at once.",
            fix="CONFIG SET appendonly yes, if there is no ledger.",
        )
    if facts.replicas and not facts.waits_for_replicas:
        yield Finding(
            "async_replicas",
            Level.WARNING,
            where=where,
            what=f"It answers before its replicas ({facts.replicas}) know.",
            why="A fail-over forgets the latest locks: with a ledger one effect stays one, with "
            "locks alone two may work at once.",
            fix="CONFIG SET min-replicas-to-write 1 and min-replicas-max-lag 2, if there is no "
            "ledger.",
        )


def refused(refusal: Refusal, said: str, *, where: str) -> Finding:
    """What a refusal of a lock's own commands means."""
    if refusal is Refusal.CLUSTER:
        return _cluster(where, said)
    why = "No lock is ever given."
    if refusal is Refusal.LOGIN:
        return Finding(
            "lock_server_login",
            Level.ERROR,
            where=where,
            what=said,
            why=why,
            fix="Correct user and password in the URL; urllib.parse.quote for @, / and the like.",
        )
    if refusal is Refusal.RIGHTS:
        return Finding(
            "lock_server_rights",
            Level.ERROR,
            where=where,
            what=said,
            why=why,
            fix="ACL SETUSER with the rights that docs/reference/lock-servers.md lists.",
        )
    return Finding(
        "lock_server_refuses",
        Level.ERROR,
        where=where,
        what=said,
        why=why,
        fix="Mend what the server says: its memory, its disk, or a key of another application.",
    )


def _cluster(where: str, what: str) -> Finding:
    return Finding(
        "cluster_mode",
        Level.ERROR,
        where=where,
        what=what,
        why="A lock of several keys, or one whose slot is elsewhere, is refused.",
        fix="Give the Cluster's nodes (redis+cluster://), or a single server.",
    )
