"""Findings about settings, servers and clocks that no other package reports."""

from __future__ import annotations

from taskguard.findings import FindingTemplate, Level

MISCONFIGURED = FindingTemplate(
    "misconfigured",
    Level.ERROR,
    what="{error}",
    why="No guarded task can run.",
    fix="Correct the setting.",
    link="docs/reference/settings.md",
)

# -- the lock server

LOCK_SERVER_AWAY = FindingTemplate(
    "lock_server_away",
    Level.ERROR,
    what="{error}",
    why="With a ledger, the ledger decides alone and its database has more load. Without one, no "
    "guarded task runs.",
    fix="Check that the server runs, and that this machine can reach it by that address.",
    link="docs/explanation/crashes.md#when-the-lock-server-dies",
)
NAMESPACE_SHARED = FindingTemplate(
    "namespace_shared",
    Level.WARNING,
    what="Another application, with the ledger {ledger}, uses the same names for its locks here.",
    why="A key of one application makes the other's messages wait, although the two are unrelated.",
    fix="Give each application its own namespace (TASKGUARD_NAMESPACE) or lock server. After a "
    "move to another ledger, this finding disappears within a day.",
    link="docs/how-to/changing-a-guard.md#the-applications-namespace",
)
TTL_RAISED = FindingTemplate(
    "ttl_raised",
    Level.NOTE,
    what="ttl_s is below {least_s:g} s, the shortest lease of {server}.",
    why="After a holder's death, its key stays taken for {least_s:g} s.",
    fix="Set ttl_s={least_s:g}, so that the setting states what happens.",
    link="docs/reference/lock-servers.md",
)
TTL_BELOW_FAILOVER = FindingTemplate(
    "ttl_below_failover",
    Level.WARNING,
    what="Leases can end before {server} has failed over, which takes about {failover_s:g} s, and "
    "there is no ledger.",
    why="Each failover loses all leases that are held. Two processes can then hold one key.",
    fix="Set ttl_s={least_s:g} or more, shorten the servers' timeout, or use a ledger.",
    link="docs/reference/lock-servers.md",
)

# -- the ledger

LEDGER_AWAY = FindingTemplate(
    "ledger_away",
    Level.ERROR,
    what="{error}",
    why="No guarded task runs. Deliveries are deferred, and none is lost.",
    fix="Check that the database runs, and that this machine can reach it by that URL.",
    link="docs/explanation/crashes.md#when-the-database-dies",
)
TTL_BELOW_CONNECT = FindingTemplate(
    "ttl_below_connect",
    Level.WARNING,
    what="Leases can end while a process connects to the ledger {ledger}: that takes {takes_s:g} s "
    "if only the last of its hosts answers.",
    why="The body loses its lease, and another delivery runs the work again.",
    fix="Set ttl_s={least_s:g} or more, or a shorter connect_timeout= for each host in the URL.",
    link="docs/reference/settings.md#databases",
)
STRANDED_LINES = FindingTemplate(
    "stranded_lines",
    Level.WARNING,
    what="Messages wait in lines for {queue} and no relay for it runs: {count:,}.",
    why="They wait forever if no other message uses their keys.",
    fix="Start a worker of {queue}, or run `taskguard relay --{queue} {target}`.",
    link="docs/how-to/changing-a-guard.md#lines-after-a-deploy",
)
STRANDED_NAMESPACE = FindingTemplate(
    "stranded_namespace",
    Level.WARNING,
    what="Messages wait in lines of the namespace {namespace!r} and no relay for it runs: "
    "{count:,}.",
    why="If this application used that namespace before, they wait forever.",
    fix="In that case set taskguard_formerly_namespaces = [{namespace!r}] (formerly_namespaces=, "
    "TASKGUARD_FORMERLY_NAMESPACES). If it is another application's, start its workers.",
    link="docs/how-to/changing-a-guard.md#the-applications-namespace",
)
ALEMBIC_DROPS = FindingTemplate(
    "alembic_drops",
    Level.WARNING,
    what="This env.py has neither include_name nor include_object.",
    why="`alembic revision --autogenerate` drops the ledger's tables, which are in no model.",
    fix="Call context.configure(…, include_name=taskguard.include_name).",
    link="docs/how-to/alembic.md#keep-autogenerate-away-from-taskguards-tables",
)

# -- clocks

CLOCKS_APART = FindingTemplate(
    "clocks_apart",
    Level.WARNING,
    what="The clocks are {apart_s:,.1f} s apart.",
    why="Ages of messages (retention_s), recorded times and the queue's delays are wrong by that. "
    "Without a ledger, fencing tokens can go back if the lock server is replaced.",
    fix="Synchronise all clocks with one service (chrony, systemd-timesyncd).",
    link="docs/explanation/clocks.md",
)

# -- a Redis that has the queues

QUEUE_SERVER_AWAY = FindingTemplate(
    "queue_server_away",
    Level.ERROR,
    what="{error}",
    why="No message can be sent or delivered.",
    fix="Check that the server runs, and that this machine can reach it by that address.",
    link="docs/how-to/enqueue.md#when-the-broker-loses-messages",
)
QUEUE_REPLICA = FindingTemplate(
    "queue_replica",
    Level.ERROR,
    what="The server is a replica of {primary}.",
    why="A replica accepts no messages.",
    fix="Use the address of the primary, or of Sentinel.",
    link="docs/how-to/enqueue.md#when-the-broker-loses-messages",
)
QUEUE_EVICTION = FindingTemplate(
    "queue_eviction",
    Level.WARNING,
    what="maxmemory-policy is {policy}.",
    why="When its memory is full, the server deletes messages.",
    fix="CONFIG SET maxmemory-policy noeviction, and set it in redis.conf.",
    link="docs/how-to/enqueue.md#when-the-broker-loses-messages",
)
QUEUE_NO_PERSISTENCE = FindingTemplate(
    "queue_no_persistence",
    Level.WARNING,
    what="The server does not write each change to its disk (appendonly no).",
    why="A crash loses messages. A sweep sends only those again that are recoverable=True or were "
    "enqueued in a transaction.",
    fix="CONFIG SET appendonly yes, and set it in redis.conf.",
    link="docs/how-to/enqueue.md#when-the-broker-loses-messages",
)
