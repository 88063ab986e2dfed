"""Findings about lock servers of any kind."""

from __future__ import annotations

from taskguard.findings import FindingTemplate, Level

LOCKS_IN_MEMORY = FindingTemplate(
    "locks_in_memory",
    Level.WARNING,
    what="Locks are in the memory of each process (memory://).",
    why="No process sees the locks of another. Without a ledger, two can work on one key.",
    fix="Use the URL of a lock server. memory:// is for tests.",
    link="docs/reference/lock-servers.md",
)
LOCK_SERVER_MEMBER = FindingTemplate(
    "lock_server_member",
    Level.WARNING,
    what="This server of the URL gives no answer, while others do: {error}",
    why="If more of them fail, no lock can be taken.",
    fix="Start it, correct its address, or remove it from the URL.",
    link="docs/reference/lock-servers.md",
)
LOCK_SERVER_QUORUM = FindingTemplate(
    "lock_server_quorum",
    Level.ERROR,
    what="No majority of its servers is available: {error}",
    why="Without a majority no lock can be taken.",
    fix="Start the missing servers. `{command}` lists the servers and their state.",
    link="docs/explanation/crashes.md#when-the-lock-server-dies",
)
