"""PostgreSQL's one statement for a change, with a row of the user's own in them.

Guarantees: the row is moved by the statement that claims, and by the one that completes, or neither
happens. They are written once for each `GuardedRow`, out of the files beside this one.

Knows only of a row that is `new` and of a holder's: all else is for the portable ones.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import sqlalchemy as sa

from taskguard.ledger.own_rows.changes import declared_of
from taskguard.ledger.own_rows.guarded_row import GuardedRow
from taskguard.ledger.protocol import RowRef

__all__ = ["TORN_STATE", "Statements", "statements", "values"]

_GRANTED = sa.table("granted", sa.column("fence", sa.BigInteger))
_CLAIMED = sa.table("claimed", sa.column("attempts", sa.Integer))

# A grant whose row, or work, was moved meanwhile must not stand: the statement fails, and nothing
# of it does. (A constant division would fail when it is planned.)
_TORN = """    case
        when granted.fence is not null and own.moved is null
            then 1 / (found.now_us - found.now_us)
    end as torn
"""
# The first: whether the row was this claim's; the second: whether all of it was.
_COMPLETED = """
)
select own.rows, finished.rows{torn}
from (select count(*) as rows from own) own, (select count(*) as rows from finished) finished
"""
# What commits by itself fails where the row would be moved alone.
_TORN_ALONE = ", case when own.rows > 0 then 1 / finished.rows end"
_SELECT = "\nselect\n    found.*,"
TORN_STATE = "22012"  # division by zero


class Statements(NamedTuple):
    """Texts for psycopg."""

    claim: str
    complete: str
    complete_alone: str


@functools.lru_cache(maxsize=1_000)
def statements(declared: GuardedRow, dialect: Any, claim: str, complete: str) -> Statements:
    """`claim.sql` and `complete.sql` with the row in them."""
    completed = _complete(declared, dialect, complete)
    return Statements(
        _claim(declared, dialect, claim),
        completed + _COMPLETED.format(torn=""),
        completed + _COMPLETED.format(torn=_TORN_ALONE),
    )


def values(ref: RowRef, dialect: Any) -> dict[str, Any]:
    """What the texts ask for, as the driver takes it."""
    declared = declared_of(ref)
    columns = [*declared.id, declared.state, declared.state, declared.state]
    found = [*ref.id, declared.new, declared.processing, declared.done]
    names = [*(f"own_id_{number}" for number in range(len(ref.id))), *_STATES]
    processed = {}
    for name, column, value in zip(names, columns, found, strict=True):
        process = column.type.dialect_impl(dialect).bind_processor(dialect)
        processed[name] = value if process is None else process(value)
    return processed


_STATES = ("own_new", "own_processing", "own_done")


def _claim(declared: GuardedRow, dialect: Any, text: str) -> str:
    table, state, fence = declared.table, declared.state, declared.fence
    is_new = sa.and_(_this(declared), state == _state(declared, "own_new"))
    moved: Any = (
        sa.update(table)
        .where(
            is_new,
            sa.or_(fence.is_(None), fence < _GRANTED.c.fence),
            _CLAIMED.c.attempts.is_not(None),
        )
        .values({state: _state(declared, "own_processing"), fence: _GRANTED.c.fence})
        .returning(sa.literal_column("1").label("moved"))
    )
    lower = sa.or_(fence.is_(None), fence < sa.literal_column("found.now_us"))
    may = sa.select(sa.exists().where(is_new, lower))
    # A record that is PROCESSING, though the row was set back, is more than a takeover.
    where = f"eligible and coalesce(state, '') <> 'PROCESSING' and ({_text(may, dialect)})"
    return _edited(
        text,
        ("from found where eligible", f"from found where {where}"),
        (_SELECT, f",\nown as (\n{_text(moved, dialect)}\n){_SELECT}"),
        ("    end as flush\n", f"    end as flush,\n{_TORN}"),
        ("left join claimed on true\n", "left join claimed on true\nleft join own on true\n"),
    )


def _complete(declared: GuardedRow, dialect: Any, text: str) -> str:
    table, state, fence = declared.table, declared.state, declared.fence
    held = sa.bindparam("fence", type_=sa.BigInteger)
    left: Any = (
        sa.update(table)
        .where(_this(declared), state == _state(declared, "own_processing"), fence == held)
        .values({state: _state(declared, "own_done")})
        .returning(sa.literal_column("1").label("moved"))
    )
    return _edited(
        text,
        ("with ended as (\n", f"with own as (\n{_text(left, dialect)}\n),\nended as (\n"),
        ("    where key =", "    from own where key ="),
        (")\nupdate taskguard_work w set", "),\nfinished as (\nupdate taskguard_work w set"),
    )


def _this(declared: GuardedRow) -> Any:
    return sa.and_(
        *(
            column == sa.bindparam(f"own_id_{number}", type_=column.type)
            for number, column in enumerate(declared.id)
        )
    )


def _state(declared: GuardedRow, name: str) -> Any:
    return sa.bindparam(name, type_=declared.state.type)


def _text(statement: Any, dialect: Any) -> str:
    return str(statement.compile(dialect=dialect))


def _edited(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        if text.count(old) != 1:
            raise AssertionError(f"the statement has {text.count(old)} times {old!r}")
        text = text.replace(old, new)
    return text
