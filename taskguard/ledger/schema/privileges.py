"""Check before a worker starts that the ledger's user has all privileges that workers need.

Guarantees: each privilege is tried by a statement that needs it and changes nothing, on every kind
of database. The error lists all refused privileges. This also finds a missing column. Privileges
that only a command needs, such as DELETE for `taskguard purge`, are not checked.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from taskguard.errors import LedgerSchemaError
from taskguard.ledger.connections.database import Database
from taskguard.ledger.own_rows.guarded_row import GuardedRow
from taskguard.ledger.tables import (
    ACTIONS,
    COUNTS,
    HAPPENINGS,
    KEYS,
    MESSAGES,
    RUNS,
    SNAPSHOT,
    WORK,
    WORKERS,
)

__all__ = ["check_privileges", "check_privileges_on_row"]

_TABLES = (KEYS, WORK, MESSAGES, RUNS, WORKERS, HAPPENINGS, ACTIONS, COUNTS, SNAPSHOT)


def check_privileges(database: Database) -> None:
    """Raise LedgerSchemaError unless the ledger's tables can be read, filled and changed."""
    # Each worker does this when it starts. One transaction takes half the time of one for each.
    every = [statement for table in _TABLES for statement in _tried(table).values()]
    if _refusal(database, *every) is None:
        return
    refused: list[str] = []
    causes: list[Exception] = []
    for table in _TABLES:
        for privilege, statement in _tried(table).items():
            error = _refusal(database, statement)
            if error is not None:
                refused.append(f"{privilege} on {table.name} ({_said(error)})")
                causes.append(error)
                break  # an INSERT with a SELECT would be refused for that reason, too
    if refused:
        raise LedgerSchemaError(
            f"The ledger's user lacks privileges in {database.place}: "
            f"{'; '.join(refused)}. GRANT it SELECT, INSERT and UPDATE on "
            f"{', '.join(each.name for each in _TABLES[:-1])} and {_TABLES[-1].name}. If a column "
            "is missing, the tables are of another version. Until then no guarded task can run."
        ) from causes[0]


def _tried(table: sa.Table) -> dict[str, Any]:
    """Return a statement for each privilege that needs it and changes nothing."""
    nothing = sa.select(table).where(sa.false())
    names = [column.name for column in table.columns]
    return {
        "SELECT": nothing,
        "INSERT": sa.insert(table).from_select(names, nothing),
        "UPDATE": sa.update(table).where(sa.false()).values(dict.fromkeys(names)),
    }


def check_privileges_on_row(database: Database, declared: GuardedRow) -> None:
    """Raise LedgerSchemaError unless the user's own table can be read and updated."""
    table, columns = declared.table, (declared.state, declared.fence)
    tried: tuple[tuple[str, Any], ...] = (
        ("SELECT", sa.select(*declared.id, *columns).where(sa.false())),
        ("UPDATE", sa.update(table).where(sa.false()).values({each: each for each in columns})),
    )
    for privilege, statement in tried:
        error = _refusal(database, statement)
        if error is not None:
            raise LedgerSchemaError(
                f"The ledger's user may not {privilege} {table.fullname} in {database.place} "
                f"({_said(error)}), whose rows row= moves. GRANT it SELECT and UPDATE on it."
            ) from error


def _refusal(database: Database, *statements: Any) -> Exception | None:
    """Return the error if the database refuses one of the statements, in one transaction."""
    try:
        with database.transaction() as db:
            for statement in statements:
                db.execute(statement)
    except LedgerSchemaError as error:
        return error
    return None


def _said(error: Exception) -> str:
    """Return the driver's message, which contains no password and no value."""
    cause: Any = error.__cause__
    origin = getattr(cause, "orig", None) or cause
    return str(origin.args[-1] if origin.args else origin).partition("\n")[0]
