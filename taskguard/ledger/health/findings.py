"""Findings about the ledger's database."""

from __future__ import annotations

from taskguard.findings import FindingTemplate, Level

READ_ONLY = FindingTemplate(
    "read_only",
    Level.ERROR,
    what="The database is {state}.",
    why="No key can be claimed, so no guarded task runs.",
    fix="Use the address of the primary (libpq: target_session_attrs=read-write).",
    link="docs/reference/settings.md#databases",
)
UNWRITABLE = FindingTemplate(
    "unwritable",
    Level.ERROR,
    what="{error}",
    why="No key can be claimed, so no guarded task runs.",
    fix="Free space on the disk, or allow writes to the database's file and its folder.",
    link="docs/explanation/crashes.md#when-the-database-dies",
)
COMMITS_UNFLUSHED = FindingTemplate(
    "commits_unflushed",
    Level.ERROR,
    what="A commit does not wait for the disk: {setting}.",
    why="If the database's machine crashes, it loses effects whose messages are already "
    "acknowledged.",
    fix="Set {safe}.",
    link="docs/reference/settings.md#databases",
)
TABLES_MISSING = FindingTemplate(
    "tables_missing",
    Level.ERROR,
    what="{problem}",
    why="No guarded task can run.",
    fix="{remedy}",
    link="docs/how-to/production.md#before-the-first-deploy",
)
TABLES_VERSION = FindingTemplate(
    "tables_version",
    Level.ERROR,
    what="{problem}",
    why="No guarded task can run.",
    fix="{remedy}",
    link="docs/how-to/production.md#upgrading",
)
PRIVILEGES = FindingTemplate(
    "privileges",
    Level.ERROR,
    what="{problem}",
    why="No guarded task can run.",
    fix="GRANT SELECT, INSERT, UPDATE on each table taskguard_*, and SELECT on taskguard_schema. "
    "If a column is missing, the tables are of another version.",
    link="docs/how-to/production.md#before-the-first-deploy",
)
OWN_TABLE = FindingTemplate(
    "own_table",
    Level.ERROR,
    what="{problem}",
    why="Tasks that move rows of this table cannot run.",
    fix="Change the GuardedRow or the table.",
    link="docs/how-to/own-row.md",
)
PRIMARY_KEY_MISSING = FindingTemplate(
    "primary_key_missing",
    Level.ERROR,
    what="The table {table} has no primary key.",
    why="Two claims of one key at the same moment can both succeed, so work can run twice.",
    fix="Compare the table with the output of `taskguard ledger create --sql`.",
    link="docs/how-to/production.md#before-the-first-deploy",
)
INDEX_MISSING = FindingTemplate(
    "index_missing",
    Level.WARNING,
    what="The index {index} is missing or invalid.",
    why="A sweep reads the whole table.",
    fix="DROP the index if it is invalid, then run `taskguard ledger create`.",
    link="docs/how-to/production.md#before-the-first-deploy",
)
PURGE_NEVER_RUN = FindingTemplate(
    "purge_never_run",
    Level.WARNING,
    what="The oldest work ended {age_days:,.0f} days ago.",
    why="Tasks need its record for {retention_days:.0f} days. Without a purge the tables "
    "grow forever.",
    fix="Run `taskguard purge --older-than {retention_days:.0f}d` every night.",
    link="docs/how-to/production.md#before-the-first-deploy",
)
OVERDUE_WORK = FindingTemplate(
    "overdue_work",
    Level.WARNING,
    what="Messages overdue for more than 15 minutes: {count}.",
    why="Each was lost, or the process that should send it was killed. No sweep sends it again.",
    fix="Run `taskguard sweep` every minute, or `taskguard relay`.",
    link="docs/how-to/enqueue.md#when-the-broker-loses-messages",
)
TRANSACTION_TIMEOUT = FindingTemplate(
    "transaction_timeout",
    Level.WARNING,
    what="{setting} is {limit_s:g} s, and a task's body may take {body_s:g} s.",
    why="The database rolls back a guarded transaction that takes longer. The body then runs "
    "again, and repeats its calls to other services.",
    fix="Raise {setting} above the time limits of your tasks, for the ledger's user.",
    link="docs/reference/guard.md#use-a-transaction",
)
IDLE_TRANSACTIONS = FindingTemplate(
    "idle_transactions",
    Level.NOTE,
    what="A guarded transaction may idle for {limit_s:g} s, and a task's body may take "
    "{body_s:g} s.",
    why="A body that computes or calls services for longer inside its transaction is rolled back "
    "and runs again.",
    fix="Do slow work before guard.transaction(), or raise SqlLedger(…, idle_in_transaction_s=…).",
    link="docs/reference/guard.md#use-a-transaction",
)
POOLED_PREPARES = FindingTemplate(
    "pooled_prepares",
    Level.WARNING,
    what="This Engine prepares statements, and a pooler (PgBouncer) is in front of the database.",
    why="With pool_mode = transaction, a session may lack the prepared statements, and claims "
    "fail.",
    fix='Use create_engine(…, connect_args={{"prepare_threshold": None}}), or pass a URL.',
    link="docs/reference/settings.md#databases",
)
