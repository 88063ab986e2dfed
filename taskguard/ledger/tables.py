"""taskguard's own tables. Times and leases are µs since 1970 by the database's clock.

Texts compare byte by byte: `a`, `A`, `á` and `a ` are four keys in every database. What the DDL of
one kind of database needs besides is in `schema/creation.py`.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from taskguard.model.claims import Claim
from taskguard.model.states import State

__all__ = [
    "FREE",
    "KEYS",
    "MESSAGES",
    "METADATA",
    "NO_PLACE",
    "SCHEMA",
    "SCHEMA_VERSION",
    "WORK",
    "held",
    "holding",
    "of_claim",
    "processed",
    "standing",
]

# The first release's. See `schema/upgrades.py` before you change a table.
SCHEMA_VERSION = 5

# The owner of a key that nobody holds.
FREE = ""
# The columns that say that work stands in no line.
NO_PLACE: dict[str, None] = {"line": None, "parked": None, "expires": None}

METADATA = sa.MetaData()


class _Exact(sa.types.TypeDecorator[str]):
    """Text that compares byte by byte, blanks at its end included.

    Args:
        key_chars: on MariaDB and MySQL, whose indexes have a limit, at most so many characters; all
            columns of an index together 768. None: it is in no index.
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
        from sqlalchemy.dialects import mysql  # it loads every driver's dialect

        # Other binary collations of MariaDB and MySQL pad the shorter text with blanks to compare.
        collation = "utf8mb4_nopad_bin" if dialect.is_mariadb else "utf8mb4_0900_bin"
        if self.key_chars is not None:
            return mysql.VARCHAR(self.key_chars, charset="utf8mb4", collation=collation)
        return mysql.MEDIUMTEXT(charset="utf8mb4", collation=collation)


class _Large(sa.types.TypeDecorator[str]):
    """Text of more than 64 kB, at which TEXT ends on MariaDB and MySQL."""

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
    # Of a key with slots: how many there were at the last claim. With a rate: from when on the next
    # start is allowed. See `ledger/lines/room.py`.
    sa.Column("slots", sa.Integer),
    sa.Column("next_start", _LONG),
    # When the newest message that has begun was sent; see `ledger/lines/newest.py`.
    sa.Column("stamp", _LONG),
)

WORK = sa.Table(
    "taskguard_work",
    METADATA,
    sa.Column("id", _KEY, primary_key=True),
    sa.Column("task", _TEXT, nullable=False),
    sa.Column("key", _TEXT, nullable=False),
    sa.Column("message", _TEXT, nullable=False),
    sa.Column("retries", sa.Integer, nullable=False),
    # One of `states.State`. No CHECK says so: each statement would read it anew, and a tenth of a
    # completion goes there; the contract suite looks at what every statement writes.
    sa.Column("state", _TEXT, nullable=False),
    # FAILED: for good, as it was revoked, or a newer message took its place.
    sa.Column("final", sa.SmallInteger, nullable=False),
    sa.Column("fence", _LONG, nullable=False),
    sa.Column("owner", _TEXT, nullable=False),
    sa.Column("lease_until", _LONG, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("crashes", sa.Integer, nullable=False),
    sa.Column("crashed_owner", _TEXT, nullable=False),
    # Deliveries in a row whose body ran, and whose transaction the database ended; NULL: none.
    sa.Column("rounds", sa.Integer),
    sa.Column("fingerprint", _TEXT),
    sa.Column("progress", _JSON),
    sa.Column("result", _JSON),
    sa.Column("error", _JSON),
    # How its message is sent again, how often it was sent again since the last claim (NULL: never),
    # and from when on the work is overdue; see `parts/outbox.py`.
    sa.Column("call", _JSON),
    sa.Column("sends", sa.Integer),
    sa.Column("due", _LONG),
    # One of `line_states.LineState`; NULL: it is in no line. No index has it, so that its changes
    # stay cheap.
    sa.Column("line", _TEXT),
    # Its position in the line of its key, of the lowest rank first, and whether it keeps that until
    # it ends; NULL: it has none. See `ledger/lines/states.py`.
    sa.Column("rank", sa.Integer),
    sa.Column("parked", _LONG),
    sa.Column("strict", sa.SmallInteger),
    # Of work that stands in a line: when its message expires, if it does.
    sa.Column("expires", _LONG),
    sa.Column("created", _LONG, nullable=False),
    sa.Column("started", _LONG),
    sa.Column("finished", _LONG),
)

# Only work whose call is stored is in it: for the rest, changes of a row stay cheap. What waits in
# a line is not due, and in it if it expires.
_SENT_AT_A_TIME = sa.or_(WORK.c.due.is_not(None), WORK.c.expires.is_not(None))
sa.Index(
    "taskguard_work_due",
    WORK.c.due,
    WORK.c.expires,
    info={"where": _SENT_AT_A_TIME},
)

# Nor is what stands in no line in this one.
sa.Index(
    "taskguard_work_parked",
    WORK.c.key,
    WORK.c.rank,
    WORK.c.parked,
    info={"where": WORK.c.parked.is_not(None), "length": {"key": 255}},
)

# The numbers of a message in a work: one id may have been used for messages of several.
MESSAGES = sa.Table(
    "taskguard_messages",
    METADATA,
    sa.Column("message", _Exact(key_chars=255), primary_key=True),
    sa.Column("work", _Exact(key_chars=512), primary_key=True),
    sa.Column("retries", sa.Integer, nullable=False),
    sa.Column("deferrals", sa.Integer, nullable=False),
    sa.Column("updated", _LONG, nullable=False),
)


def holding(claim: Claim) -> sa.ColumnElement[bool]:
    """Whether the keys still carry this claim's fence and owner."""
    return held(claim.keys, claim.fence, str(claim.owner))


def standing(claim: Claim) -> sa.ColumnElement[bool]:
    """Whether the work still carries this claim's state, fence and owner, under each of its ids."""
    if not claim.formerly:
        return processed(claim.work, claim.fence, str(claim.owner))
    return sa.and_(
        WORK.c.id.in_(claim.work_ids),
        WORK.c.state == State.PROCESSING.value,
        WORK.c.fence == claim.fence,
        WORK.c.owner == str(claim.owner),
    )


def of_claim() -> sa.ColumnElement[bool]:
    """`standing()` with parameters, for prepared statements; `Claim.name` gives their values."""
    return processed(*map(sa.bindparam, ("work", "fence", "owner")))


def held(keys: Any, fence: Any, owner: Any) -> sa.ColumnElement[bool]:
    """Whether the keys are this owner's by this fence; takes values, or parameters for them."""
    return sa.and_(KEYS.c.key.in_(keys), KEYS.c.fence == fence, KEYS.c.owner == owner)


def processed(work: Any, fence: Any, owner: Any) -> sa.ColumnElement[bool]:
    """Whether the work is this owner's by this fence; takes values, or parameters for them."""
    return sa.and_(
        WORK.c.id == work,
        WORK.c.state == State.PROCESSING.value,
        WORK.c.fence == fence,
        WORK.c.owner == owner,
    )
