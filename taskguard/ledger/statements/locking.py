"""The statements of a claim over locked rows, compiled once for each number of keys.

Guarantees: `peek` and `read` return one row even if there is no record. Nothing is decided here.
"""

from __future__ import annotations

from typing import NamedTuple

import sqlalchemy as sa

from taskguard.ledger.connections.database import Database
from taskguard.ledger.connections.prepared import Prepared
from taskguard.ledger.history import with_work
from taskguard.ledger.tables import FREE, KEYS, MESSAGES, WORK

__all__ = ["ClaimStatements", "claim_statements", "inserting"]

# The columns that decide a claim, and those that its answer contains.
_COLUMNS = (
    "id", "state", "final", "owner", "fence", "lease_until", "message", "retries", "crashes",
    "fingerprint", "attempts", "progress", "result", "error", "call", "due", "finished", "created",
    "line", "parked", "crashed_owner", "rounds", "trace",
)  # fmt: skip
_KEY_COLUMNS = tuple(
    KEYS.c[name] for name in ("key", "fence", "owner", "lease_until", "slots", "next_start")
)


class ClaimStatements(NamedTuple):
    """The statements of a claim. `peek` and `read` return one row even if there is no record."""

    peek: Prepared
    read: Prepared
    make_keys: Prepared
    lock_keys: Prepared
    take_keys: Prepared
    take_for_work: Prepared


def claim_statements(database: Database, keys: int) -> ClaimStatements:
    """Make the statements for claims of this number of keys."""
    dialect, sql = database.dialect, database.engine.dialect
    known = sa.select(MESSAGES).where(
        MESSAGES.c.message == sa.bindparam("message"), MESSAGES.c.work == sa.bindparam("work")
    )
    one = sa.select(sa.literal_column("1").label("one")).subquery("one")
    peek = sa.select(
        dialect.now().label("now_us"),
        known.with_only_columns(MESSAGES.c.retries).scalar_subquery().label("known_retries"),
        known.with_only_columns(MESSAGES.c.deferrals).scalar_subquery().label("known_deferrals"),
        *(WORK.c[name] for name in _COLUMNS),
    ).select_from(one.outerjoin(WORK, WORK.c.id == sa.bindparam("work")))
    names = [f"key_{number}" for number in range(keys)]
    these = KEYS.c.key.in_([sa.bindparam(name, type_=KEYS.c.key.type) for name in names])
    free = {"fence": 0, "owner": FREE, "lease_until": 0}
    new = [{"key": sa.bindparam(name), **free} for name in names]
    return ClaimStatements(
        peek=Prepared(peek, sql),
        read=Prepared(peek.with_for_update() if dialect.locks_joined else peek, sql),
        make_keys=Prepared(dialect.insert_missing(KEYS, new), sql),
        lock_keys=Prepared(
            sa.select(*_KEY_COLUMNS).where(these).order_by(KEYS.c.key).with_for_update(), sql
        ),
        take_keys=Prepared(
            sa.update(KEYS).where(these), sql, columns=("fence", "owner", "lease_until")
        ),
        take_for_work=Prepared(
            sa.update(KEYS)
            .where(these)
            .values(
                fence=sa.bindparam("new_fence"),
                owner=sa.bindparam("new_owner"),
                lease_until=sa.bindparam("until"),
                works=with_work(
                    sa.bindparam("line", type_=sa.Text), sa.bindparam("chars", type_=sa.Integer)
                ),
            ),
            sql,
        ),
    )


def inserting(database: Database, columns: tuple[str, ...]) -> Prepared:
    """Make the statement that inserts a work with these columns."""
    return Prepared(sa.insert(WORK), database.engine.dialect, columns=columns)
