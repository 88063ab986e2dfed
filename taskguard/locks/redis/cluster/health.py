"""Check a Redis Cluster: read the facts once, then judge them.

Guarantees: skips what this user may not read.
Does not guarantee that all nodes agree: the state of the cluster is that of the first node that
answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

from taskguard.errors import LockServerUnavailableError
from taskguard.findings import Finding
from taskguard.locks.redis.cluster import findings
from taskguard.locks.redis.cluster.nodes import ClusterLink
from taskguard.locks.redis.findings import EVICTION
from taskguard.locks.redis.health import RedisFacts, facts_of
from taskguard.locks.redis.link import RedisLink
from taskguard.locks.redis.protocol import pack
from taskguard.values import value

__all__ = ["ClusterFacts", "check", "judge"]

_SLOTS = 16_384
# Duration of a failover after the master counts as down: 2 s where it was measured.
_ELECTION_S = 3.0


@value
class ClusterFacts:
    """A cluster and the nodes that it announces.

    Attributes:
        state: cluster_state.
        slots_ok: how many slots a running node serves.
        nodes: the facts of each node that answers, by its address.
        unreachable: the error of each node that gives no answer, by its address.
    """

    state: str = "ok"
    slots_ok: int = _SLOTS
    nodes: Mapping[str, RedisFacts] = field(default_factory=dict)
    unreachable: Mapping[str, LockServerUnavailableError] = field(default_factory=dict)


def check(cluster: ClusterLink) -> list[Finding]:
    """Return what is wrong, and read how long a failover takes.

    Raises LockServerUnavailableError if no node answers.
    """
    masters, replicas = cluster.nodes()
    nodes: dict[str, RedisFacts] = {}
    unreachable: dict[str, LockServerUnavailableError] = {}
    longest_s = 0.0
    for link in (*masters, *replicas):
        try:
            nodes[link.address] = facts_of(_text(_read(link, b"INFO")))
            longest_s = max(longest_s, _node_timeout_s(link))
        except LockServerUnavailableError as error:
            unreachable[link.address] = error
    cluster.failover_s = longest_s and longest_s + _ELECTION_S
    info = _values(_text(_read(cluster, b"CLUSTER", b"INFO")))
    state, slots_ok = info.get("cluster_state", "ok"), int(info.get("cluster_slots_ok", _SLOTS))
    facts = ClusterFacts(state, slots_ok, nodes, unreachable)
    return list(judge(facts, address=cluster.address))


def judge(facts: ClusterFacts, *, address: str) -> Iterator[Finding]:
    """Judge the cluster and each of its nodes. A replica may become a master."""
    where = f"the lock server {address}"
    if facts.state != "ok":
        yield findings.CLUSTER_DOWN.at(where, state=facts.state)
    if facts.slots_ok < _SLOTS:
        yield findings.CLUSTER_SLOTS.at(where, missing=_SLOTS - facts.slots_ok, all=_SLOTS)
    for node, node_facts in facts.nodes.items():
        if node_facts.evicts:
            yield EVICTION.at(f"the lock server {node}", policy=node_facts.policy)
    for node, error in facts.unreachable.items():
        yield findings.ANNOUNCED_ADDRESS.at(f"the lock server {node}", error=error)


def _node_timeout_s(link: RedisLink) -> float:
    pair = _read(link, b"CONFIG", b"GET", b"cluster-node-timeout")
    return int(pair[1]) / 1000 if pair else 0.0


def _read(link: RedisLink | ClusterLink, *words: bytes) -> Any:
    """Return the reply, or None if this user may not read it."""
    try:
        return (
            link.ask_any(pack(*words)) if isinstance(link, ClusterLink) else link.ask(pack(*words))
        )
    except LockServerUnavailableError as error:
        if link.was_refused(error):
            return None
        raise


def _text(reply: bytes | None) -> str:
    return (reply or b"").decode("utf-8", "replace")


def _values(text: str) -> dict[str, str]:
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
