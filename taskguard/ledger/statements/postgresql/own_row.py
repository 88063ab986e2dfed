"""The parts of PostgreSQL's statements that are about a row of the user.

Guarantees: the row is locked before the key and the work. The statement that claims or completes
also moves the row, or does neither. It handles only a row that is `new`, or that the claim's holder
has. The portable statements handle all other rows.

If a trigger silently prevents the change of the row, the claim can never be completed.
"""

from __future__ import annotations

import functools
from typing import Any

import sqlalchemy as sa

from taskguard.ledger.lines.postgresql import position
from taskguard.ledger.own_rows.changes import declared_of
from taskguard.ledger.own_rows.guarded_row import GuardedRow
from taskguard.ledger.stored import statement
from taskguard.model.claims import RowRef

__all__ = ["claiming", "completing", "fits", "values"]

_FOUND = sa.table("found", sa.column("now_us", sa.BigInteger))
_GRANTED = sa.table("granted", sa.column("fence", sa.BigInteger))
_CLAIMED = sa.table("claimed", sa.column("attempts", sa.Integer))
_FINISHED = sa.table("finished", sa.column("done", sa.Integer))
_NAMES = ("own_new", "own_processing", "own_done")
# Names of parts of the statements. They would hide a table with one of these names.
_PARTS = {"clock", "found", "own", "granted", "claimed", "moved", "ended", "finished", "holder"}


def fits(ref: RowRef) -> bool:
    """Return True if the statements can contain this row."""
    table = declared_of(ref).table
    return table.schema is not None or table.name not in _PARTS


def values(ref: RowRef, dialect: sa.Dialect) -> dict[str, Any]:
    """Return the statements' parameters for this row, as the driver expects them."""
    declared = declared_of(ref)
    columns = [*declared.id, declared.state, declared.state, declared.state]
    found = [*ref.id, declared.new, declared.processing, declared.done]
    names = [*(f"own_id_{number}" for number in range(len(ref.id))), *_NAMES]
    processed = {}
    for name, column, value in zip(names, columns, found, strict=True):
        process = column.type.dialect_impl(dialect).bind_processor(dialect)
        processed[name] = value if process is None else process(value)
    return processed


@functools.lru_cache(maxsize=1_000)
def claiming(declared: GuardedRow, dialect: sa.Dialect) -> str:
    """Return `claim.sql` for such rows. It grants nothing unless the row is `new`."""
    state, fence = declared.state, declared.fence
    is_new = sa.and_(_this(declared), state == _state(declared, "own_new"))
    # The record can be PROCESSING although the row was set back. The portable statements decide.
    may: sa.ColumnElement[bool] = sa.literal_column(
        "found.eligible and coalesce(found.state, '') <> 'PROCESSING'"
    )
    lower = sa.or_(fence.is_(None), fence < _FOUND.c.now_us)
    mine: sa.Select[Any] = sa.select(sa.literal_column("1").label("one")).where(is_new, lower, may)
    own = (
        sa.update(declared.table)
        .where(is_new, _CLAIMED.c.attempts.is_not(None))
        .values({state: _state(declared, "own_processing"), fence: _GRANTED.c.fence})
    )
    return statement(
        __package__,
        "claim",
        position=position.NONE,
        own_row_locked=f"own as materialized ({_locking(mine, declared, dialect)}),",
        and_own_row=", own",
        own_row_moved=f", moved as ({_text(own, dialect)})",
    )


@functools.lru_cache(maxsize=1_000)
def completing(declared: GuardedRow, dialect: sa.Dialect) -> str:
    """Return `complete.sql` for such rows. It completes nothing unless the row is the claim's."""
    state = declared.state
    held = declared.fence == sa.bindparam("fence", type_=sa.BigInteger)
    is_mine = sa.and_(_this(declared), state == _state(declared, "own_processing"), held)
    mine: sa.Select[Any] = sa.select(sa.literal_column("1").label("one")).where(is_mine)
    own: Any = (
        sa.update(declared.table)
        .where(is_mine, _FINISHED.c.done.is_not(None))
        .values({state: _state(declared, "own_done")})
        .returning(sa.literal_column("1").label("one"))
    )
    return statement(
        __package__,
        "complete",
        own_row_locked=f"own as materialized ({_locking(mine, declared, dialect)}),",
        from_own_row="from own",
        own_row_moved=f", moved as ({_text(own, dialect)})",
        and_moved=", moved",
    )


def _this(declared: GuardedRow) -> sa.ColumnElement[bool]:
    return sa.and_(
        *(
            column == sa.bindparam(f"own_id_{number}", type_=column.type)
            for number, column in enumerate(declared.id)
        )
    )


def _state(declared: GuardedRow, name: str) -> sa.BindParameter[Any]:
    return sa.bindparam(name, type_=declared.state.type)


def _locking(select: sa.Select[Any], declared: GuardedRow, dialect: sa.Dialect) -> str:
    # The key does not change, so inserts of rows that refer to it do not block the lock.
    return _text(select.with_for_update(key_share=True, of=declared.table), dialect)


def _text(made: sa.sql.ClauseElement, dialect: sa.Dialect) -> str:
    return str(made.compile(dialect=dialect))
