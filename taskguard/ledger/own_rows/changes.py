"""The user's own row: read, moved by conditional UPDATEs, and checked against the real table.

Guarantees: each change requires the old state and the old fence. `claim()` only raises the fence.
All changes happen in the caller's transaction. Every transaction locks the user's row before
taskguard's rows. A body that writes to its row before the completion has the same lock order.

Read next: `guarded_row.py` for the declaration, `states.decide_by_row()` for the decision.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

import sqlalchemy as sa

from taskguard.errors import LedgerSchemaError, RowChangedError
from taskguard.ledger.own_rows.guarded_row import GuardedRow, fits_fence, fits_state
from taskguard.model.claims import Claim, RowRef
from taskguard.model.states import RowState
from taskguard.values import value

__all__ = [
    "Found",
    "RowMovedError",
    "bury",
    "changed_by_body",
    "check",
    "claim",
    "confirm",
    "declared_of",
    "mark_done",
    "put_back",
    "read",
    "state_of",
]


class RowMovedError(Exception):
    """The row is not PROCESSING with the claim's fence. After a rollback, the cause is visible."""

    def __init__(self, found: Found | None) -> None:
        super().__init__("the row was moved")
        self.found = found


@value
class Found:
    """A row as it was read."""

    state: object
    fence: int | None


def declared_of(ref: RowRef) -> GuardedRow:
    """Return the declaration of a reference: a ledger in a database only gets GuardedRows."""
    return cast("GuardedRow", ref.declared)


def read(
    db: sa.Connection, ref: RowRef, *, lock: bool = False, skip_locked: bool = False
) -> Found | None:
    """Return the row, or None if there is no such row. `lock` locks it for the transaction.

    With `skip_locked`, also return None if another transaction has locked it.
    """
    made = _statements(declared_of(ref))
    locking = made.lock_free if skip_locked else made.lock
    row = db.execute(locking if lock else made.read, _id(ref)).first()
    if row is None:
        return None
    state, fence = row
    # A CHAR(n) is padded with blanks.
    state = state.rstrip(" ") if type(state) is str else state
    return Found(state, None if fence is None else int(fence))


def state_of(ref: RowRef, found: Found | None, work: Any) -> RowState:
    """Return the meaning of the row's state for this task. `work`: the work's record, or None."""
    declared = declared_of(ref)
    if found is None:
        return RowState.MISSING
    if found.state == declared.new:
        return RowState.NEW
    if found.state == declared.done:
        return RowState.DONE
    left = found.state == declared.processing or (
        declared.dead is not None and found.state == declared.dead
    )
    if left and work is not None and found.fence == work.fence:
        return RowState.HELD
    return RowState.OTHER


def claim(db: sa.Connection, ref: RowRef, found: Found, fence: int) -> bool:
    """Move the row from its found state to `processing`, with a higher fence.

    Return False if the row has changed since.
    """
    values = {"from_state": found.state, "to_fence": fence, **_id(ref)}
    return db.execute(_statements(declared_of(ref)).claim, values).rowcount == 1


def move_to_done(db: sa.Connection, claim: Claim) -> None:
    """`processing` -> `done`. Raises RowMovedError."""
    assert claim.row is not None  # noqa: S101
    if not _leave(db, claim.row, claim.fence, declared_of(claim.row).done):
        raise RowMovedError(read(db, claim.row))


def confirm(db: sa.Connection, claim: Claim) -> None:
    """Lock the row. Raises RowMovedError unless it is PROCESSING with this claim's fence."""
    assert claim.row is not None  # noqa: S101
    found = read(db, claim.row, lock=True)
    if found != Found(declared_of(claim.row).processing, claim.fence):
        raise RowMovedError(found)


def put_back(db: sa.Connection, claim: Claim) -> bool:
    """`processing` -> `new`. Return False if the row is not this claim's any more."""
    assert claim.row is not None  # noqa: S101
    return _leave(db, claim.row, claim.fence, declared_of(claim.row).new)


def bury(db: sa.Connection, ref: RowRef, fence: int) -> None:
    """`processing` -> `dead`, if the declaration has a state for it."""
    if declared_of(ref).dead is not None:
        _leave(db, ref, fence, declared_of(ref).dead)


def mark_done(db: sa.Connection, ref: RowRef, found: Found) -> bool:
    """Move the row from its found state to `done`. Return False if it has changed since."""
    declared = declared_of(ref)
    this = [column == value for column, value in zip(declared.id, ref.id, strict=True)]
    same = declared.state == found.state, declared.fence.is_not_distinct_from(found.fence)
    update = sa.update(declared.table).where(*this, *same).values({declared.state: declared.done})
    return db.execute(update).rowcount == 1


def _leave(db: sa.Connection, ref: RowRef, fence: int, state: object) -> bool:
    values = {"to_state": state, "held_fence": fence, **_id(ref)}
    return db.execute(_statements(declared_of(ref)).leave, values).rowcount == 1


class _Statements(NamedTuple):
    read: Any
    lock: Any
    lock_free: Any
    claim: Any
    leave: Any


@functools.lru_cache(maxsize=1_000)
def _statements(declared: GuardedRow) -> _Statements:
    """Return the statements on a declared row.

    The result is cached, because making a statement takes as long as executing it.
    """
    table, state, fence = declared.table, declared.state, declared.fence
    this = sa.and_(
        *(
            column == sa.bindparam(f"id_{number}", type_=column.type)
            for number, column in enumerate(declared.id)
        )
    )

    def bound_state(name: str) -> Any:
        return sa.bindparam(name, type_=state.type)

    def bound_fence(name: str) -> Any:
        # Without the type, SQLite would convert a NUMERIC to a float.
        return sa.bindparam(name, type_=sa.BigInteger)

    stored: Any = state
    if isinstance(state.type, sa.Enum):
        stored = sa.type_coerce(state, sa.String)  # as it is stored, not as a member
    read = sa.select(stored, sa.type_coerce(fence, sa.BigInteger)).where(this)
    lower = sa.or_(fence.is_(None), fence < bound_fence("to_fence"))
    claim = sa.update(table).where(this, state == bound_state("from_state"), lower)
    held = fence == bound_fence("held_fence")
    leave = sa.update(table).where(this, state == declared.processing, held)
    return _Statements(
        read,
        # The key does not change, so inserts of rows that refer to it do not block the lock.
        read.with_for_update(key_share=True),
        read.with_for_update(key_share=True, skip_locked=True),
        claim.values({state: declared.processing, fence: bound_fence("to_fence")}),
        leave.values({state: bound_state("to_state")}),
    )


def _id(ref: RowRef) -> dict[str, object]:
    return {f"id_{number}": value for number, value in enumerate(ref.id)}


def changed_by_body(
    db: sa.Connection, claim: Claim, moved: RowMovedError
) -> RowChangedError | None:
    """Return the error if the body itself moved the row, or None. Call it after the rollback."""
    ref = claim.row
    assert ref is not None  # noqa: S101
    declared = declared_of(ref)
    if read(db, ref) != Found(declared.processing, claim.fence):
        return None  # the application, or a newer holder, has moved it
    state = "which it deleted" if moved.found is None else f"to {moved.found.state!r}"
    return RowChangedError(
        f"The guarded body of {', '.join(claim.keys)} changed {declared.describe(ref)} itself "
        f"({declared.state.name}, {declared.fence.name}), {state}. Nothing was written. Leave both "
        f"to taskguard, which moves it to done={declared.done!r} with the body's effects; a task "
        "that may end in another state is two tasks, or writes that to another column.",
        key=", ".join(claim.keys),
        fence=claim.fence,
    )


def check(db: sa.Connection, declared: GuardedRow, *, where: str) -> None:
    """Raise LedgerSchemaError unless the real table fits the declaration.

    The error contains the SQL that fixes the table.
    """
    table = declared.table
    inspector = sa.inspect(db)
    try:
        columns = {
            column["name"]: column["type"]
            for column in inspector.get_columns(table.name, schema=table.schema)
        }
    except sa.exc.NoSuchTableError:
        raise LedgerSchemaError(
            f"The table {table.fullname} of a GuardedRow is not in the ledger's database {where}. "
            "Create it there, or give the ledger the database where it is."
        ) from None
    name = db.dialect.identifier_preparer.format_table(table)
    for column in (*declared.id, declared.state, declared.fence):
        if column.name not in columns:
            kind = "BIGINT" if column is declared.fence else column.type.compile(db.dialect)
            quoted = db.dialect.identifier_preparer.format_column(column)
            raise LedgerSchemaError(
                f"The table {table.fullname} in {where} has no column {column.name!r}: "
                f"ALTER TABLE {name} ADD COLUMN {quoted} {kind}"
            )
    _check_fence(db, declared, columns[declared.fence.name], name)
    _check_states(db, declared, columns[declared.state.name], name)


def _check_fence(db: sa.Connection, declared: GuardedRow, kind: Any, table: str) -> None:
    # SQLite's integers always have 64 bits.
    wide = db.dialect.name == "sqlite" and isinstance(kind, sa.Integer)
    if not wide and not fits_fence(kind):
        raise LedgerSchemaError(
            f"{table}.{declared.fence.name} is {kind!r}, and a fence has 64 bits: "
            + _alter(db, table, declared.fence, "BIGINT")
        )


def _check_states(db: sa.Connection, declared: GuardedRow, kind: Any, table: str) -> None:
    for state in declared.states:
        problem = None if state is None else fits_state(kind, state)
        if problem is None:
            continue
        if isinstance(kind, sa.Enum):
            advice = f"ALTER TYPE {kind.name} ADD VALUE '{state}'"
            if db.dialect.name != "postgresql":
                advice = f"add it to the column's ENUM (ALTER TABLE {table} …)"
        else:
            length = max(len(str(each)) for each in declared.states if each is not None)
            advice = _alter(db, table, declared.state, f"VARCHAR({length})")
        raise LedgerSchemaError(
            f"{table}.{declared.state.name} does not hold the state {state!r}{problem}: {advice}"
        )


def _alter(db: sa.Connection, table: str, column: sa.Column[Any], kind: str) -> str:
    quoted = db.dialect.identifier_preparer.format_column(column)
    if db.dialect.name in ("mysql", "mariadb"):
        return f"ALTER TABLE {table} MODIFY {quoted} {kind}"
    return f"ALTER TABLE {table} ALTER COLUMN {quoted} TYPE {kind}"
