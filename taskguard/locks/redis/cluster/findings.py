"""Findings about a Redis Cluster that has locks."""

from __future__ import annotations

from taskguard.findings import FindingTemplate, Level

CLUSTER_DOWN = FindingTemplate(
    "cluster_down",
    Level.ERROR,
    what="cluster_state is {state}.",
    why="Its nodes refuse every lock.",
    fix="Start the masters that CLUSTER NODES shows as failed, or run `redis-cli --cluster fix "
    "HOST:PORT`.",
    link="docs/how-to/redis-cluster.md",
)
CLUSTER_SLOTS = FindingTemplate(
    "cluster_slots",
    Level.ERROR,
    what="Slots that no running node serves: {missing} of {all}.",
    why="No lock can be taken if its key is in one of these slots.",
    fix="Run `redis-cli --cluster fix HOST:PORT`, or CLUSTER ADDSLOTS at a node.",
    link="docs/how-to/redis-cluster.md",
)
ANNOUNCED_ADDRESS = FindingTemplate(
    "announced_address",
    Level.ERROR,
    what="The cluster announces this address, which cannot be used from here: {error}",
    why="Locks of this node's slots cannot be taken, now or after a failover.",
    fix="If the node runs, set cluster-announce-ip, -port or -hostname in its file, or open the "
    "network. Otherwise start it.",
    link="docs/how-to/redis-cluster.md",
)
