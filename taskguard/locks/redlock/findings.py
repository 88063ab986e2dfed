"""Findings about the servers of Redlock."""

from __future__ import annotations

from taskguard.findings import FindingTemplate, Level

REDLOCK_SAME_SERVER = FindingTemplate(
    "redlock_same_server",
    Level.ERROR,
    what="It is the same server as {other}.",
    why="It has several votes. If it fails or loses its data, several votes are lost at once.",
    fix="Name each server once.",
    link="docs/how-to/redlock.md",
)
REDLOCK_REPLICA = FindingTemplate(
    "redlock_replica",
    Level.ERROR,
    what="The server is a replica of {primary}.",
    why="It grants nothing. After a promotion it lacks the latest grants of its primary.",
    fix="REPLICAOF NO ONE, or name an independent server.",
    link="docs/how-to/redlock.md",
)
