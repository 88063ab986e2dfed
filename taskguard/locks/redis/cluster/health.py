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
from taskguard.locks.redis.cluster.nodes import SLOTS, ClusterLink, Place
from taskguard.locks.redis.health import facts_of, judge
from taskguard.locks.redis.link import RedisLink
from taskguard.locks.redis.protocol import pack
from taskguard.values import value

__all__ = ["findings_of"]

_LONGEST_NODE_TIMEOUT_S = 10.0
# What a failover takes once the master counts as gone: 2 s where it was measured.
_ELECTION_S = 3.0
_FAILED = {"fail", "fail?", "noaddr", "handshake"}


@value
class _Node:
    """A line of CLUSTER NODES."""

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
    places = cluster.places()
    nodes = _nodes(_said(cluster, pack(b"CLUSTER", b"NODES")))
    found = [*_state(where, _values(_said(cluster, pack(b"CLUSTER", b"INFO"))))]
    timeouts_s = []
    for place in places:
        node = nodes.get(place.id)
        if node is not None and not node.is_up:
            continue
        try:
            found += _of_node(place, nodes)
            timeouts_s.append(_node_timeout_s(place.link))
        except LockServerUnavailableError as error:
            found.append(_unreachable(place, error))
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
    served = int(info.get("cluster_slots_ok", SLOTS))
    if info.get("cluster_state", "ok") != "ok":
        yield Finding(
            "cluster_down",
            Level.ERROR,
            where=where,
            what=f"Its cluster_state is {info['cluster_state']}.",
            why="Its nodes refuse every lock.",
            fix="CLUSTER NODES tells which masters are away; redis-cli --cluster fix host:port.",
        )
    if served < SLOTS:
        yield Finding(
            "cluster_slots",
            Level.ERROR,
            where=where,
            what=f"{SLOTS - served} of its {SLOTS} slots are served by no node that is up.",
            why="Nobody gets a lock whose key is in one of them.",
            fix="redis-cli --cluster fix host:port, or CLUSTER ADDSLOTS at a node.",
        )


def _of_node(place: Place, nodes: dict[str, _Node]) -> Iterator[Finding]:
    """Of a node that answers."""
    info = _ask(place.link, pack(b"INFO"))
    facts = replace(facts_of((info or b"").decode("utf-8", "replace")), cluster=False)
    for finding in judge(
        replace(facts, replica_of=None), where=f"the lock server {place.link.address}"
    ):
        if finding.name == "eviction":  # the page says of a cluster what the others do
            yield finding
    node = nodes.get(place.id)
    if node is None or place.is_replica or not node.has_slots:
        return
    if any(each.master == place.id and each.is_up for each in nodes.values()):
        return
    # The others may not have heard of a replica yet; the master has.
    if _values(_ask(place.link, pack(b"INFO", b"replication"))).get("connected_slaves") == "0":
        yield Finding(
            "no_replica",
            Level.WARNING,
            where=f"the lock server {place.link.address}",
            what="This master has no replica.",
            why="When it dies, nobody gets a lock of its slots until it is back.",
            fix=f"CLUSTER REPLICATE {place.id} at a node without slots.",
        )


def _unreachable(place: Place, error: LockServerUnavailableError) -> Finding:
    return Finding(
        "announced_address",
        Level.ERROR,
        where=f"the lock server {place.link.address}",
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


def _nodes(said: bytes | None) -> dict[str, _Node]:
    """By id. A line: id, address, flags, master, pings, epoch, state of its link, its slots."""
    lines = (line.split() for line in (said or b"").decode("utf-8", "replace").splitlines())
    return {
        words[0]: _Node(frozenset(words[2].split(",")), words[3], len(words) > 8)
        for words in lines
        if len(words) >= 8
    }
