"""What is wrong with a Redis Cluster as a lock server, as its nodes tell.

Guarantees: what this user may not ask is left out; a node that does not answer is a finding where
the cluster itself thinks that it is up, and is left to the cluster where not.
Does not guarantee that all nodes are of one mind: one is asked, the first that answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from taskguard.errors import LockServerUnavailableError
from taskguard.findings import Finding, Level
from taskguard.locks.redis.cluster.nodes import ClusterLink
from taskguard.locks.redis.health import facts_of, judge
from taskguard.locks.redis.link import RedisLink
from taskguard.locks.redis.protocol import pack
from taskguard.values import value

__all__ = ["findings_of"]

_SLOTS = 16_384
_LONGEST_NODE_TIMEOUT_S = 10.0
# What a failover takes once the master counts as gone: 2 s where it was measured.
_ELECTION_S = 3.0
_FAILED = {"fail", "fail?", "noaddr", "handshake"}


@value
class _Node:
    """A line of CLUSTER NODES."""

    id: str
    flags: frozenset[str]
    master: str
    has_slots: bool

    @property
    def is_up(self) -> bool:
        return not self.flags & _FAILED


def findings_of(cluster: ClusterLink) -> list[Finding]:
    """All that is found; raises LockServerUnavailableError where no node answers.

    The cluster's link then knows how long a failover takes.
    """
    where = f"the lock server {cluster.address}"
    masters, replicas = cluster.nodes()
    nodes = _nodes(_said(cluster, pack(b"CLUSTER", b"NODES")))
    found = [*_state(where, _values(_said(cluster, pack(b"CLUSTER", b"INFO"))))]
    timeouts_s = []
    for link in (*masters, *replicas):
        node = nodes.get(link.at)
        if node is not None and not node.is_up:
            continue
        try:
            found += _of_node(link)
            if link in masters and node is not None and node.has_slots:
                found += _without_replica(link, node, list(nodes.values()))
            timeouts_s.append(_node_timeout_s(link))
        except LockServerUnavailableError as error:
            found.append(_unreachable(link, error))
    longest_s = max(timeouts_s, default=0.0)
    cluster.failover_s = longest_s and longest_s + _ELECTION_S
    if longest_s >= _LONGEST_NODE_TIMEOUT_S:
        found.append(
            Finding(
                "cluster_node_timeout",
                Level.WARNING,
                where=where,
                what=f"Its cluster-node-timeout is {longest_s:g} s.",
                why="When a master dies, nobody gets a lock of its slots for longer than that.",
                fix="CONFIG SET cluster-node-timeout 5000 at every node, and in its file.",
            )
        )
    return found


def _state(where: str, info: dict[str, str]) -> Iterator[Finding]:
    """By CLUSTER INFO."""
    served = int(info.get("cluster_slots_ok", _SLOTS))
    if info.get("cluster_state", "ok") != "ok":
        yield Finding(
            "cluster_down",
            Level.ERROR,
            where=where,
            what=f"Its cluster_state is {info['cluster_state']}.",
            why="Its nodes refuse every lock.",
            fix="CLUSTER NODES tells which masters are away; redis-cli --cluster fix host:port.",
        )
    if served < _SLOTS:
        yield Finding(
            "cluster_slots",
            Level.ERROR,
            where=where,
            what=f"{_SLOTS - served} of its {_SLOTS} slots are served by no node that is up.",
            why="Nobody gets a lock whose key is in one of them.",
            fix="redis-cli --cluster fix host:port, or CLUSTER ADDSLOTS at a node.",
        )


def _of_node(link: RedisLink) -> Iterator[Finding]:
    """Yield what is wrong with one node. The page of a cluster says the rest."""
    info = _ask(link, pack(b"INFO"))
    facts = replace(facts_of((info or b"").decode("utf-8", "replace")), cluster=False)
    where = f"the lock server {link.address}"
    for finding in judge(replace(facts, replica_of=None), where=where):
        if finding.name == "eviction":
            yield finding


def _without_replica(link: RedisLink, node: _Node, nodes: list[_Node]) -> Iterator[Finding]:
    if any(each.master == node.id and each.is_up for each in nodes):
        return
    # The others may not have heard of a replica yet; the master has.
    if _values(_ask(link, pack(b"INFO", b"replication"))).get("connected_slaves") == "0":
        yield Finding(
            "no_replica",
            Level.WARNING,
            where=f"the lock server {link.address}",
            what="This master has no replica.",
            why="When it dies, nobody gets a lock of its slots until it is back.",
            fix=f"CLUSTER REPLICATE {node.id} at a node without slots.",
        )


def _unreachable(link: RedisLink, error: LockServerUnavailableError) -> Finding:
    return Finding(
        "announced_address",
        Level.ERROR,
        where=f"the lock server {link.address}",
        what=f"The cluster announces this address, and it cannot be used from here: {error}",
        why="Locks of its slots cannot be taken, now or after a failover.",
        fix="cluster-announce-ip, -port and -hostname in the node's file, or a way through.",
    )


def _node_timeout_s(link: RedisLink) -> float:
    pair = _ask(link, pack(b"CONFIG", b"GET", b"cluster-node-timeout"))
    return int(pair[1]) / 1000 if pair else 0.0


def _said(cluster: ClusterLink, command: bytes) -> Any:
    """What the first node says that answers; None where this user may not ask."""
    try:
        return cluster.ask_any(command)
    except LockServerUnavailableError as error:
        if cluster.was_refused(error):
            return None
        raise


def _ask(link: RedisLink, command: bytes) -> Any:
    try:
        return link.ask(command)
    except LockServerUnavailableError as error:
        if link.was_refused(error):
            return None
        raise


def _values(said: bytes | None) -> dict[str, str]:
    lines = (said or b"").decode("utf-8", "replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _nodes(said: bytes | None) -> dict[tuple[str, int], _Node]:
    """Return the nodes by their addresses and by their host names.

    A line has the id, `ip:port@bus,host name`, flags, master, pings, epoch, the state of its link,
    and its slots.
    """
    found: dict[tuple[str, int], _Node] = {}
    for line in (said or b"").decode("utf-8", "replace").splitlines():
        words = line.split()
        if len(words) < 8:
            continue
        node = _Node(words[0], frozenset(words[2].split(",")), words[3], len(words) > 8)
        address, _, name = words[1].partition(",")
        host, _, port = address.partition("@")[0].rpartition(":")
        for each in filter(None, (host, name.partition(",")[0])):
            found[each, int(port)] = node
    return found
