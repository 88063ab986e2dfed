"""Findings about a Consul that is the lock server."""

from __future__ import annotations

from taskguard.locks import FindingTemplate, Level

LOCK_SERVER_RIGHTS = FindingTemplate(
    "lock_server_rights",
    Level.ERROR,
    what="{error}",
    why="No lock can be taken.",
    fix='Give the token `key_prefix "taskguard/"` and `session_prefix ""` with write.',
    link="docs/how-to/consul.md",
)
