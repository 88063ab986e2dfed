"""taskguard's own tables. Times and leases are µs since 1970 by the database's clock.

Texts compare byte by byte: `a`, `A`, `á` and `a ` are four keys in every database.
`schema/creation.py` adds the DDL that only one kind of database needs.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from taskguard.model.claims import Claim
from taskguard.model.states import State

__all__ = [
    "ACTIONS",
    "COUNTS",
    "FREE",
    "HAPPENINGS",
    "KEYS",
    "MESSAGES",
    "METADATA",
    "NO_POSITION",
    "RUNS",
    "SCHEMA",
    "SCHEMA_VERSION",
    "SNAPSHOT",
    "WORK",
    "WORKERS",
    "claimed_by",
    "held",
    "holding",
    "of_claim",
    "processed",
]

# The first release's. See `schema/upgrades.py` before you change a table.
SCHEMA_VERSION = 5

# The owner of a free key.
FREE = ""
# The columns of work that is in no line.
NO_POSITION: dict[str, None] = {"line": None, "parked": None, "expires": None}

METADATA = sa.MetaData()


class _Exact(sa.types.TypeDecorator[str]):
    """Text that compares byte by byte, blanks at its end included.

    Args:
        key_chars: the maximum length in characters on MariaDB and MySQL, whose indexes have a
            limit: 768 for all columns of an index together. None: no index has the column.
    """

    impl = sa.Text
    cache_ok = True

    def __init__(self, *, key_chars: int | None = None) -> None:
        super().__init__()
        self.key_chars = key_chars

    def load_dialect_impl(self, dialect: Any) -> Any:
        if dialect.name == "postgresql":
            return sa.Text(collation="C")
        if dialect.name not in ("mysql", "mariadb"):
            return sa.Text()
        from sqlalchemy.dialects import mysql  # imports every driver's dialect

        # Other binary collations of MariaDB and MySQL pad the shorter text with blanks to compare.
        collation = "utf8mb4_nopad_bin" if dialect.is_mariadb else "utf8mb4_0900_bin"
        if self.key_chars is not None:
            return mysql.VARCHAR(self.key_chars, charset="utf8mb4", collation=collation)
        return mysql.MEDIUMTEXT(charset="utf8mb4", collation=collation)


class _Large(sa.types.TypeDecorator[str]):
    """Text that may exceed 64 kB, the maximum of TEXT on MariaDB and MySQL."""

    impl = sa.Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Any) -> Any:
        if dialect.name not in ("mysql", "mariadb"):
            return sa.Text()
        from sqlalchemy.dialects import mysql

        return mysql.MEDIUMTEXT()


_KEY = _Exact(key_chars=768)
_TEXT = _Exact()
_JSON = _Large()
_LONG = sa.BigInteger()
_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")  # the type that SQLite numbers by itself

SCHEMA = sa.Table(
    "taskguard_schema",
    METADATA,
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
)

KEYS = sa.Table(
    "taskguard_keys",
    METADATA,
    sa.Column("key", _KEY, primary_key=True),
    sa.Column("fence", _LONG, nullable=False),
    sa.Column("owner", _TEXT, nullable=False),
    sa.Column("lease_until", _LONG, nullable=False),
    # With slots: their number at the last claim. With a rate: when the next start is allowed. See
    # `ledger/lines/room.py`.
    sa.Column("slots", sa.Integer),
    sa.Column("next_start", _LONG),
    # When the newest message that has begun was sent; see `ledger/lines/newest.py`.
    sa.Column("stamp", _LONG),
    # The last works of the key, the newest first, one in a line. See `ledger/history.py`.
    sa.Column("works", _TEXT),
)

WORK = sa.Table(
    "taskguard_work",
    METADATA,
    sa.Column("id", _KEY, primary_key=True),
    # Of a run: the work's id, to which `taskguard_runs` points. NULL: it is no run.
    sa.Column("base", _TEXT),
    sa.Column("task", _TEXT, nullable=False),
    sa.Column("key", _TEXT, nullable=False),
    sa.Column("message", _TEXT, nullable=False),
    sa.Column("retries", sa.Integer, nullable=False),
    # One of `states.State`. There is no CHECK, because it would take a tenth of a completion. The
    # contract suite checks what each statement writes.
    sa.Column("state", _TEXT, nullable=False),
    # 1 for FAILED work that never runs: it was revoked, or a newer message superseded it. 2 for a
    # FAILED run that has no retry left. See `model/runs.py`.
    sa.Column("final", sa.SmallInteger, nullable=False),
    sa.Column("fence", _LONG, nullable=False),
    sa.Column("owner", _TEXT, nullable=False),
    # Of FAILED work: until when a promised retry of its message is expected.
    sa.Column("lease_until", _LONG, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("crashes", sa.Integer, nullable=False),
    sa.Column("crashed_owner", _TEXT, nullable=False),
    # Number of consecutive deliveries whose transaction the database ended. NULL: none.
    sa.Column("rounds", sa.Integer),
    sa.Column("fingerprint", _TEXT),
    sa.Column("progress", _JSON),
    sa.Column("result", _JSON),
    sa.Column("error", _JSON),
    # The stored call of its message, how often it was sent again since the last claim (NULL:
    # never), and when the work is overdue. See `parts/outbox.py`.
    sa.Column("call", _JSON),
    sa.Column("sends", sa.Integer),
    sa.Column("due", _LONG),
    # One of `line_states.LineState`. NULL: it is in no line. No index has this column, so that
    # changes are cheap.
    sa.Column("line", _TEXT),
    # Its position in the line of its key (lowest rank first), and whether it keeps that until it
    # ends. NULL: it has none. See `ledger/lines/states.py`.
    sa.Column("rank", sa.Integer),
    sa.Column("parked", _LONG),
    sa.Column("strict", sa.SmallInteger),
    # When the message of work in a line expires. NULL: never.
    sa.Column("expires", _LONG),
    # What happened to it other than a claim and its completion, one happening in a line, the newest
    # last. NULL: nothing. See `model/history.py`.
    sa.Column("history", _JSON),
    # One of `model.history.Flag`, and since when. NULL: nothing is wrong. Most work never has a
    # flag, so that its changes stay cheap. No index may have `state`, not even in its condition:
    # then no completion is a HOT update on PostgreSQL.
    sa.Column("flag", sa.SmallInteger),
    sa.Column("since", _LONG),
    # The ids of all records of its last claim, one in a line. NULL: without `formerly=`.
    sa.Column("also", _TEXT),
    # The W3C traceparent of the span that claimed it. NULL: none was sampled.
    sa.Column("trace", _TEXT),
    sa.Column("created", _LONG, nullable=False),
    sa.Column("started", _LONG),
    sa.Column("finished", _LONG),
)

# The index has only work whose call is stored, so that changes of other rows are cheap. Work in a
# line is not due, but the index has it if its message expires.
_SENT_AT_A_TIME = sa.or_(WORK.c.due.is_not(None), WORK.c.expires.is_not(None))
sa.Index(
    "taskguard_work_due",
    WORK.c.due,
    WORK.c.expires,
    info={"where": _SENT_AT_A_TIME},
)

# This index has only work in a line.
sa.Index(
    "taskguard_work_parked",
    WORK.c.key,
    WORK.c.rank,
    WORK.c.parked,
    info={"where": WORK.c.parked.is_not(None), "length": {"key": 255}},
)

# This index has only work that an operator may look for.
sa.Index(
    "taskguard_work_flag",
    WORK.c.flag,
    WORK.c.since,
    info={"where": WORK.c.flag.is_not(None)},
)

# The numbers of a message of a work. Several works may have messages with one id.
MESSAGES = sa.Table(
    "taskguard_messages",
    METADATA,
    sa.Column("message", _Exact(key_chars=255), primary_key=True),
    sa.Column("work", _Exact(key_chars=512), primary_key=True),
    sa.Column("retries", sa.Integer, nullable=False),
    sa.Column("deferrals", sa.Integer, nullable=False),
    sa.Column("updated", _LONG, nullable=False),
)

# Of work with `once_per="run"`: its open run, and the one that follows. See `ledger/runs.py`.
RUNS = sa.Table(
    "taskguard_runs",
    METADATA,
    sa.Column("work", _Exact(key_chars=512), primary_key=True),
    sa.Column("open", _TEXT),
    sa.Column("follows", _TEXT),
    sa.Column("updated", _LONG, nullable=False),
)

# The first 8 characters of an owner are the number of its worker. See `model/workers.py`.
WORKERS = sa.Table(
    "taskguard_workers",
    METADATA,
    sa.Column("number", _Exact(key_chars=8), primary_key=True),
    # "celery", "rq" or "plain".
    sa.Column("kind", _TEXT, nullable=False),
    sa.Column("name", _TEXT, nullable=False),
    sa.Column("host", _TEXT, nullable=False),
    # The process that the others were forked from.
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("version", _TEXT, nullable=False),
    sa.Column("queues", _TEXT, nullable=False),
    sa.Column("started", _LONG, nullable=False),
    # A worker that takes keys changes it about three times an hour.
    sa.Column("seen", _LONG, nullable=False),
)

# What happened to keys and work without a change of their rows: duplicates, deferrals, lost leases.
# Rows are only added. Equal happenings of one process are one row, with their number.
HAPPENINGS = sa.Table(
    "taskguard_happenings",
    METADATA,
    sa.Column("id", _ID, sa.Identity(), primary_key=True),
    sa.Column("at", _LONG, nullable=False),
    sa.Column("key", _TEXT, nullable=False),
    sa.Column("task", _TEXT, nullable=False),
    sa.Column("work", _TEXT),
    # One of `model.history.Happened`.
    sa.Column("what", _TEXT, nullable=False),
    sa.Column("owner", _TEXT, nullable=False),
    sa.Column("fence", _LONG),
    sa.Column("n", sa.Integer, nullable=False),
    sa.Column("detail", _TEXT),
)
sa.Index(
    "taskguard_happenings_of_key", HAPPENINGS.c.key, HAPPENINGS.c.at, info={"length": {"key": 255}}
)

# What operators changed, and why. Rows are only added.
ACTIONS = sa.Table(
    "taskguard_actions",
    METADATA,
    sa.Column("id", _ID, sa.Identity(), primary_key=True),
    sa.Column("at", _LONG, nullable=False),
    # One of `model.history.Action`.
    sa.Column("action", _TEXT, nullable=False),
    sa.Column("actor", _TEXT, nullable=False),
    sa.Column("reason", _TEXT, nullable=False),
    sa.Column("key", _TEXT),
    sa.Column("task", _TEXT),
    sa.Column("work", _TEXT),
    sa.Column("detail", _TEXT),
)

# How many deliveries of a task had which outcome, and other counters of `metrics.py`. Bucket 0 has
# the totals. The others are minutes since 1970, and are kept for two days.
COUNTS = sa.Table(
    "taskguard_counts",
    METADATA,
    sa.Column("bucket", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("task", _Exact(key_chars=500), primary_key=True),
    sa.Column("what", _Exact(key_chars=100), primary_key=True),
    # Seconds of histograms have fractions.
    sa.Column("n", sa.Double, nullable=False),
)

# What the exporter, the page and `taskguard top` show. One row: the viewer that finds it old takes
# a new one, and all others read it. See `ledger/operations/snapshot.py`.
SNAPSHOT = sa.Table(
    "taskguard_snapshot",
    METADATA,
    sa.Column("number", sa.SmallInteger, primary_key=True, autoincrement=False),
    sa.Column("taken", _LONG, nullable=False),
    sa.Column("json", _JSON),
)


def holding(claim: Claim) -> sa.ColumnElement[bool]:
    """Return the condition that the keys still have this claim's fence and owner."""
    return held(claim.keys, claim.fence, str(claim.owner))


def claimed_by(claim: Claim) -> sa.ColumnElement[bool]:
    """Return the condition that the work, under each id, still has this claim's fence and owner."""
    if not claim.formerly:
        return processed(claim.work, claim.fence, str(claim.owner))
    return sa.and_(
        WORK.c.id.in_(claim.work_ids),
        WORK.c.state == State.PROCESSING.value,
        WORK.c.fence == claim.fence,
        WORK.c.owner == str(claim.owner),
    )


def of_claim() -> sa.ColumnElement[bool]:
    """Return `claimed_by()` with parameters for prepared statements, named as the claim does."""
    return processed(*map(sa.bindparam, ("work", "fence", "owner")))


def held(keys: Any, fence: Any, owner: Any) -> sa.ColumnElement[bool]:
    """Return the condition that the keys have this fence and owner (values or parameters)."""
    return sa.and_(KEYS.c.key.in_(keys), KEYS.c.fence == fence, KEYS.c.owner == owner)


def processed(work: Any, fence: Any, owner: Any) -> sa.ColumnElement[bool]:
    """Return the condition that the work has this fence and owner (values or parameters)."""
    return sa.and_(
        WORK.c.id == work,
        WORK.c.state == State.PROCESSING.value,
        WORK.c.fence == fence,
        WORK.c.owner == owner,
    )
