"""Findings about a ZooKeeper that is the lock server."""

from __future__ import annotations

from taskguard.locks import FindingTemplate, Level

LOCK_SERVER_RIGHTS = FindingTemplate(
    "lock_server_rights",
    Level.ERROR,
    what="{error}",
    why="No lock can be taken.",
    fix="Name the user in the URL, zookeeper://user:password@…, or give it the rights (setAcl).",
    link="docs/how-to/zookeeper.md",
)
ZOOKEEPER_VERSION = FindingTemplate(
    "zookeeper_version",
    Level.ERROR,
    what="The server is a ZooKeeper {version}.",
    why="Versions before 3.6 do not list a session's nodes, so no lock can be renewed.",
    fix="Run ZooKeeper 3.6 or later.",
    link="docs/how-to/zookeeper.md",
)
ZOOKEEPER_SESSION = FindingTemplate(
    "zookeeper_session",
    Level.WARNING,
    what="The server keeps a silent session for {got_s:g} s, and session_s is {asked_s:g} s.",
    why="A process that is silent for {got_s:g} s loses its locks. The locks of a killed worker "
    "stay for as long.",
    fix="Set {limit}={limit_ms:.0f} in zoo.cfg, or ?session_s={got_s:g} in the URL.",
    link="docs/how-to/zookeeper.md#differences-from-redis",
)
