"""What may be wrong with one Redis server, by its own INFO."""

from __future__ import annotations

from collections.abc import Mapping

from taskguard.findings import Finding, Level

__all__ = ["eviction", "info_values", "persistence"]


def info_values(reply: bytes) -> dict[str, str]:
    """The lines of INFO by name."""
    lines = reply.decode("utf-8", "replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def eviction(info: Mapping[str, str], where: str) -> list[Finding]:
    """A server that throws keys away when it is full."""
    policy = info.get("maxmemory_policy", "noeviction")
    if policy == "noeviction" or info.get("maxmemory", "0") == "0":
        return []
    return [
        Finding(
            "eviction",
            Level.WARNING,
            where=where,
            what=f"It has maxmemory-policy {policy}.",
            why="When it is full it throws locks away.",
            mend="CONFIG SET maxmemory-policy noeviction, or give locks a server of their own.",
        )
    ]


def persistence(info: Mapping[str, str], where: str) -> list[Finding]:
    """A server of a group that is empty after a crash: its replicas then empty themselves."""
    if info.get("aof_enabled", "1") != "0":
        return []
    return [
        Finding(
            "persistence",
            Level.WARNING,
            where=where,
            what="It has appendonly no.",
            why="A master that crashes and is back before Sentinel holds it for down has forgotten "
            "locks, and its replicas then forget them, too.",
            mend="CONFIG SET appendonly yes, and the same in redis.conf.",
        )
    ]
