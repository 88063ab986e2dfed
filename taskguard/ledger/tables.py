"""taskguard's own tables. Times and leases are µs since 1970 by the database's clock.

Texts compare byte by byte: `a`, `A`, `á` and `a ` are four keys in every database.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from taskguard.ledger.base import Claim
from taskguard.states import State

__all__ = [
    "FREE",
    "KEYS",
    "MESSAGES",
    "METADATA",
    "SCHEMA",
    "SCHEMA_VERSION",
    "WORKS",
    "holding",
    "standing",
]

SCHEMA_VERSION = 1

# The owner of a key that nobody holds.
FREE = ""

METADATA = sa.MetaData()

_TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
_LONG = sa.BigInteger()

SCHEMA = sa.Table(
    "taskguard_schema",
    METADATA,
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
)

KEYS = sa.Table(
    "taskguard_keys",
    METADATA,
    sa.Column("key", _TEXT, primary_key=True),
    sa.Column("fence", _LONG, nullable=False),
    sa.Column("owner", _TEXT, nullable=False),
    sa.Column("lease_until", _LONG, nullable=False),
)

WORKS = sa.Table(
    "taskguard_works",
    METADATA,
    sa.Column("id", _TEXT, primary_key=True),
    sa.Column("task", _TEXT, nullable=False),
    sa.Column("key", _TEXT, nullable=False),
    sa.Column("message", _TEXT, nullable=False),
    sa.Column("retries", sa.Integer, nullable=False),
    sa.Column("state", _TEXT, nullable=False),
    sa.Column("final", sa.SmallInteger, nullable=False),
    sa.Column("fence", _LONG, nullable=False),
    sa.Column("owner", _TEXT, nullable=False),
    sa.Column("lease_until", _LONG, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("crashes", sa.Integer, nullable=False),
    sa.Column("crashed_owner", _TEXT, nullable=False),
    sa.Column("fingerprint", _TEXT),
    sa.Column("progress", sa.Text),
    sa.Column("result", sa.Text),
    sa.Column("error", sa.Text),
    # How its message is sent again, and from when on that may be overdue; `ledger/outbox.py`.
    sa.Column("call", sa.Text),
    sa.Column("due", _LONG),
    sa.Column("created", _LONG, nullable=False),
    sa.Column("started", _LONG),
    sa.Column("finished", _LONG),
    sa.CheckConstraint(
        "state in ('NEW', 'PROCESSING', 'DONE', 'FAILED', 'DEAD')", name="taskguard_works_state"
    ),
)

# Only works whose calls are stored are in it: for the others, changes of a row stay cheap.
sa.Index(
    "taskguard_works_due",
    WORKS.c.due,
    postgresql_where=WORKS.c.due.is_not(None),
    sqlite_where=WORKS.c.due.is_not(None),
)

MESSAGES = sa.Table(
    "taskguard_messages",
    METADATA,
    sa.Column("message", _TEXT, primary_key=True),
    sa.Column("work", _TEXT, nullable=False),
    sa.Column("retries", sa.Integer, nullable=False),
    sa.Column("copy", sa.Integer, nullable=False),
    sa.Column("updated", _LONG, nullable=False),
)


def holding(claim: Claim) -> Any:
    """The keys are still this claim's: fence and owner."""
    return sa.and_(
        KEYS.c.key.in_(claim.keys),
        KEYS.c.fence == claim.fence,
        KEYS.c.owner == str(claim.owner),
    )


def standing(claim: Claim) -> Any:
    """The work is still this claim's: old state, fence and owner."""
    return sa.and_(
        WORKS.c.id == claim.work,
        WORKS.c.state == State.PROCESSING.value,
        WORKS.c.fence == claim.fence,
        WORKS.c.owner == str(claim.owner),
    )
