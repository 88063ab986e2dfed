"""What can be wrong with locks of any kind."""

from __future__ import annotations

from taskguard.findings import FindingTemplate, Level

LOCKS_IN_MEMORY = FindingTemplate(
    "locks_in_memory",
    Level.WARNING,
    what="Locks are in the memory of each process (memory://).",
    why="No process sees the locks of another. Without a ledger, two can work on one key.",
    fix="Use the URL of a lock server. memory:// is for tests.",
    link="reference/lock-servers.md",
)
