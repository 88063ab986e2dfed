"""Findings about an etcd cluster that is the lock server."""

from __future__ import annotations

from taskguard.locks import FindingTemplate, Level

LOCK_SERVER_RIGHTS = FindingTemplate(
    "lock_server_rights",
    Level.ERROR,
    what="{error}",
    why="No lock can be taken.",
    fix="Correct the URL, or the rights that `etcdctl user get NAME` prints.",
    link="docs/how-to/etcd.md#users-and-tls",
)
ETCD_ALARM = FindingTemplate(
    "etcd_alarm",
    Level.ERROR,
    what="The cluster raised the alarm {alarm}.",
    why="With NOSPACE it accepts no writes, so no lock can be taken. With CORRUPT, data of a "
    "member is damaged.",
    fix="NOSPACE: compact and defragment, run `etcdctl alarm disarm`, and set "
    "--auto-compaction-retention. CORRUPT: replace the member that `etcdctl alarm list` names.",
    link="docs/how-to/etcd.md",
)
