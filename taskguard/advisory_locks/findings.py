"""Findings about a session that holds advisory locks, and about its server."""

from __future__ import annotations

from taskguard.findings import FindingTemplate, Level

ADVISORY_POOLED = FindingTemplate(
    "advisory_pooled",
    Level.ERROR,
    what="A pooler such as PgBouncer is in front of the database.",
    why="A lock would belong to whichever process gets the session next. No lock can be taken.",
    fix="Use a URL that bypasses the pooler, or a lock table: `taskguard locks create`.",
    link="docs/how-to/without-redis.md#advisory-locks",
)
ADVISORY_REPLICA = FindingTemplate(
    "advisory_replica",
    Level.ERROR,
    what="The database is a standby or read-only.",
    why="The primary does not know the locks of a replica. No lock can be taken.",
    fix="Use the URL of the primary.",
    link="docs/how-to/without-redis.md#advisory-locks",
)
ADVISORY_GALERA = FindingTemplate(
    "advisory_galera",
    Level.ERROR,
    what="The database is a node of a Galera cluster.",
    why="GET_LOCK is local to a node: another node grants the same key at the same time.",
    fix="Let all workers use one node for locks, or a lock table: `taskguard locks create`.",
    link="docs/how-to/without-redis.md#advisory-locks",
)
