"""Rules: from facts of a ledger's database to findings. Nothing here asks anybody."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from taskguard.errors import LedgerSchemaError
from taskguard.findings import Finding, Level
from taskguard.ledger.connections.database import CannotWriteError
from taskguard.ledger.health.facts import Limit, Limited, ServerFacts, TableFacts
from taskguard.model.policy import DAY_S
from taskguard.values import value

__all__ = [
    "SHARED_APPS",
    "Bodies",
    "judge_server",
    "judge_tables",
    "listed",
    "privileges_missing",
    "row_table_unfit",
    "tables_missing",
    "unwritable",
    "version_unfit",
]

# What the ledger waits at most for an answer to a statement of its own.
_LONGEST_ANSWER_S = 5.0
# `taskguard purge` is for every night: what is twice as old as it has to be was forgotten by it.
_RETENTIONS = 2
_MANY_ROWS = 10_000_000
_MANY_BYTES = 10 * 2**30
_NAMED = 3
SHARED_APPS = (
    'move "taskguard_django" from TENANT_APPS to SHARED_APPS, run `migrate_schemas --shared`, and '
    "drop the tables in the tenants' schemas."
)


@value
class Bodies:
    """What the database has to bear.

    Attributes:
        longest_s: how long a body may take.
        idle_s: how long the ledger lets a body's transaction idle; None: as long as it likes.
        retention_s: how long a record is needed.
    """

    longest_s: float = 30.0
    idle_s: float | None = None
    retention_s: float = 30 * DAY_S


def judge_server(facts: ServerFacts, bodies: Bodies, *, where: str) -> Iterator[Finding]:
    """What settings mean for the ledger."""
    if facts.read_only is not None:
        yield Finding(
            "read_only",
            Level.ERROR,
            where=where,
            what=f"It is {facts.read_only}.",
            why="Nothing can be claimed, so nothing guarded runs.",
            mend="Give the address of the primary (libpq: target_session_attrs=read-write).",
        )
    if facts.unflushed is not None:
        name, _, _ = facts.unflushed.partition(" = ")
        yield Finding(
            "commits_unflushed",
            Level.ERROR,
            where=where,
            what=f"It has {facts.unflushed}.",
            why="A crash of its machine loses effects that were committed, whose messages are "
            "acknowledged and come never again.",
            mend=_FLUSHING.get(name, f"Set {name} back to its default."),
        )
    if facts.pooled:
        yield _pooled(where, prepares=facts.prepares)
    for limit in facts.limits:
        yield from _judge_limit(limit, bodies, where=where)
    if bodies.idle_s is not None and bodies.idle_s < bodies.longest_s:
        yield Finding(
            "idle_transactions",
            Level.NOTE,
            where=where,
            what=f"A guarded transaction that idles for {bodies.idle_s:g} s is ended, and a body "
            f"may take {bodies.longest_s:g} s.",
            why="A body that computes, or calls others, for so long within its transaction is "
            "rolled back, and comes again.",
            mend="Do that before guard.transaction(), or SqlLedger(…, idle_in_transaction_s=…).",
        )


_FLUSHING = {
    "fsync": "fsync = on in postgresql.conf.",
    "synchronous_commit": "synchronous_commit = on for the ledger's role and database.",
    "innodb_flush_log_at_trx_commit": "SET GLOBAL innodb_flush_log_at_trx_commit = 1, "
    "and in my.cnf.",
    "PRAGMA synchronous": "PRAGMA synchronous = FULL when the Engine connects, or give a URL.",
}


def _pooled(where: str, *, prepares: bool) -> Finding:
    what = "There is a pooler before it (PgBouncer)."
    if prepares:
        return Finding(
            "pooled_prepares",
            Level.WARNING,
            where=where,
            what=f"{what[:-1]}, and psycopg prepares statements on this Engine.",
            why="With pool_mode = transaction a session may not have what was prepared.",
            mend='create_engine(…, connect_args={"prepare_threshold": None}), or give a URL.',
        )
    return Finding(
        "pooled",
        Level.NOTE,
        where=where,
        what=what,
        why="It works in each pool_mode but statement; a claim takes a little longer, for nothing "
        "is prepared behind it.",
        mend="Nothing; the ledger's URL may name the database itself.",
    )


def _judge_limit(limit: Limit, bodies: Bodies, *, where: str) -> Iterator[Finding]:
    what = f"It has {limit.name} = {limit.seconds:g} s."
    if limit.of is Limited.STATEMENT:
        if limit.seconds < _LONGEST_ANSWER_S:
            yield Finding(
                "statement_timeout",
                Level.WARNING,
                where=where,
                what=what,
                why="When the database is slow, claims and completions end as if it were away.",
                mend=f"{_LONGEST_ANSWER_S:g} s or more for the ledger's user.",
            )
    elif limit.seconds < bodies.longest_s and limit.of is Limited.TRANSACTION:
        yield Finding(
            "transaction_timeout",
            Level.WARNING,
            where=where,
            what=f"{what[:-1]}, and a body may take {bodies.longest_s:g} s.",
            why="A body with a longer transaction is rolled back each time, and FAILED in the end.",
            mend=f"{limit.name} above the time limits of tasks, or 0, for the ledger's user.",
        )
    elif limit.seconds < bodies.longest_s:
        yield Finding(
            "idle_timeout",
            Level.WARNING,
            where=where,
            what=f"{what[:-1]}, and a body may take {bodies.longest_s:g} s.",
            why="A body that says nothing to the database for so long within its transaction is "
            "rolled back.",
            mend=f"{limit.name} above the time limits of tasks, for the ledger's user.",
        )


def judge_tables(facts: TableFacts, bodies: Bodies, *, where: str) -> Iterator[Finding]:
    """What the tables' state means."""
    for table in facts.without_key:
        yield Finding(
            "primary_key_missing",
            Level.ERROR,
            where=where,
            what=f"{table} has no primary key.",
            why="Two claims at once may both be granted.",
            mend="Compare the table with what `taskguard ledger create --sql` prints.",
        )
    for index in facts.without_index:
        yield Finding(
            "index_missing",
            Level.WARNING,
            where=where,
            what=f"The index {index} is missing, or not valid.",
            why="A sweep reads the whole table.",
            mend="`taskguard ledger create` makes it; DROP one that is not valid first.",
        )
    if facts.other_schemas:
        yield Finding(
            "other_schemas",
            Level.NOTE,
            where=where,
            what=f"There are such tables in {listed(facts.other_schemas)} of its database, too.",
            why="A guarded transaction on a connection that finds those first is refused.",
            mend=f"Nothing if they are other applications'. If they are tenants': {SHARED_APPS}",
        )
    for table, size in facts.sizes.items():
        if size.rows >= _MANY_ROWS or size.size_bytes >= _MANY_BYTES:
            yield Finding(
                "large_table",
                Level.NOTE,
                where=where,
                what=f"{table} has about {size.rows:,} rows, in {size.size_bytes / 2**30:.1f} GiB.",
                why="Claims stay as fast; backups, upgrades and a first purge take long.",
                mend="`taskguard purge` every night, with the tasks' retention_s as --older-than.",
            )
    age_s = facts.oldest_ended_s
    if age_s is not None and age_s > _RETENTIONS * bodies.retention_s:
        yield Finding(
            "purge_never_run",
            Level.WARNING,
            where=where,
            what=f"There is work that ended {age_s / DAY_S:,.0f} days ago.",
            why=f"It is needed for {bodies.retention_s / DAY_S:,.0f} days; the tables grow for "
            "ever.",
            mend=f"`taskguard purge --older-than {_days(bodies.retention_s)}d` every night.",
        )
    if facts.overdue:
        many = "a thousand or more" if facts.overdue >= 1000 else str(facts.overdue)
        yield Finding(
            "overdue_work",
            Level.WARNING,
            where=where,
            what=f"Work whose message should have been sent long ago: {many}.",
            why="Its message is lost, or its holder was killed, and nobody sends it again.",
            mend="`taskguard sweep` every minute, or `taskguard relay`.",
        )


def _days(seconds: float) -> int:
    return max(1, -int(-seconds // DAY_S))


def unwritable(error: CannotWriteError, *, where: str) -> Finding:
    """The database refused a write as such."""
    return Finding(
        "unwritable",
        Level.ERROR,
        where=where,
        what=str(error),
        why="Nothing can be claimed, so nothing guarded runs.",
        mend="Room on its disk; or the right to write its file, and its folder's.",
    )


def tables_missing(error: LedgerSchemaError, *, where: str) -> Finding:
    """There are no tables, or not all of them; or this user may not even look."""
    if str(error) == error.problem:
        return privileges_missing(error, where=where)
    return Finding(
        "tables_missing",
        Level.ERROR,
        where=where,
        what=error.problem,
        why="Nothing guarded can run.",
        mend=str(error).removeprefix(error.problem).strip(),
    )


def version_unfit(error: LedgerSchemaError, *, where: str) -> Finding:
    """The tables are those of another version."""
    return Finding(
        "tables_version",
        Level.ERROR,
        where=where,
        what=error.problem,
        why="Nothing guarded can run.",
        mend=str(error).removeprefix(error.problem).strip(),
    )


def privileges_missing(error: LedgerSchemaError, *, where: str) -> Finding:
    """The ledger's user may not do all that workers do."""
    what = error.problem.partition(" GRANT it ")[0].partition(" Its user needs ")[0]
    return Finding(
        "privileges",
        Level.ERROR,
        where=where,
        what=what,
        why="Nothing guarded can run.",
        mend="GRANT SELECT, INSERT, UPDATE on taskguard_keys, taskguard_work and "
        "taskguard_messages, and SELECT on taskguard_schema. If a column is missing, the tables "
        "are not those of this version.",
    )


def row_table_unfit(error: LedgerSchemaError, *, where: str) -> Finding:
    """A table of the user's own is not as `row=` declares it."""
    return Finding(
        "own_table",
        Level.ERROR,
        where=where,
        what=error.problem,
        why="Tasks whose rows those are cannot run.",
        mend="Change the GuardedRow, or the table.",
    )


def listed(schemas: Sequence[str]) -> str:
    """`the schema acme`; `the schemas acme, globex, initech and 5 more`."""
    more = len(schemas) - _NAMED
    named = ", ".join(schemas[:_NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"the schema{'s' if len(schemas) > 1 else ''} {named}"
