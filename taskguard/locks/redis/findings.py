"""Findings about a Redis or Valkey server that has locks."""

from __future__ import annotations

from taskguard.findings import FindingTemplate, Level

LOCK_SERVER_LOGIN = FindingTemplate(
    "lock_server_login",
    Level.ERROR,
    what="{error}",
    why="No lock can be taken.",
    fix="Correct the user and password in the URL. Quote characters such as @ and / with "
    "urllib.parse.quote.",
    link="docs/reference/lock-servers.md#tls-users-unix-sockets",
)
LOCK_SERVER_RIGHTS = FindingTemplate(
    "lock_server_rights",
    Level.ERROR,
    what="{error}",
    why="No lock can be taken.",
    fix="Grant the user the listed rights with ACL SETUSER.",
    link="docs/reference/lock-servers.md#privileges-that-taskguard-needs",
)
LOCK_SERVER_REFUSES = FindingTemplate(
    "lock_server_refuses",
    Level.ERROR,
    what="{error}",
    why="No lock can be taken.",
    fix="Fix the cause that the server names: its memory, its disk, or another application's key.",
    link="docs/explanation/crashes.md#when-the-lock-server-dies",
)
REPLICA = FindingTemplate(
    "replica",
    Level.ERROR,
    what="The server is a replica of {primary}.",
    why="A replica accepts no writes, so no lock can be taken.",
    fix="Use the address of the primary, or of Sentinel.",
    link="docs/how-to/sentinel.md",
)
CLUSTER_MODE = FindingTemplate(
    "cluster_mode",
    Level.ERROR,
    what="The server is a node of a Redis Cluster.",
    why="It refuses locks of several keys, and keys of slots that are on other nodes.",
    fix="Use redis+cluster:// with the nodes of the Cluster, or a single server.",
    link="docs/how-to/redis-cluster.md",
)
EVICTION = FindingTemplate(
    "eviction",
    Level.WARNING,
    what="maxmemory-policy is {policy}.",
    why="When its memory is full, the server deletes locks that are held.",
    fix="CONFIG SET maxmemory-policy noeviction, or use a separate server for locks.",
    link="docs/how-to/production.md#before-the-first-deploy",
)
NO_PERSISTENCE = FindingTemplate(
    "no_persistence",
    Level.WARNING,
    what="The server does not write each change to its disk (appendonly no), and there is no "
    "ledger.",
    why="A crash loses locks that are held. Two processes can then hold one key.",
    fix="CONFIG SET appendonly yes, or use a ledger.",
    link="docs/how-to/sentinel.md#without-a-ledger",
)
ASYNC_REPLICAS = FindingTemplate(
    "async_replicas",
    Level.WARNING,
    what="The server grants a lock before its replicas ({count}) have it, and there is no ledger.",
    why="A failover loses the latest locks. Two processes can then hold one key.",
    fix="Use a ledger. CONFIG SET min-replicas-to-write 1 and min-replicas-max-lag 2 make a loss "
    "less likely.",
    link="docs/how-to/sentinel.md#without-a-ledger",
)
