"""Upgrade the ledger's tables from one version to the next: each step is data.

Version 5 is the first release's. Until 0.1.0 is published, a change of `tables.py` edits version 5
in place. After that, a change raises SCHEMA_VERSION and adds a `Step` with its SQL for each kind of
database, in the order in which it runs. A test requires a step for every version and kind.

Guarantees: on PostgreSQL and SQLite a step and its version commit together, and two upgrades at
once wait for each other. On MariaDB and MySQL each statement commits by itself, and a step that
stopped halfway starts again with its first statement. So its statements have to allow that
(`IF NOT EXISTS`), or `why` says what a person does then.

Does not stop workers: a worker of another version refuses the tables when it starts, not while it
runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from taskguard.errors import LedgerSchemaError
from taskguard.ledger.connections.database import Database
from taskguard.ledger.tables import METADATA, SCHEMA, SCHEMA_VERSION
from taskguard.values import value

__all__ = [
    "STEPS",
    "Step",
    "expect_version",
    "statements_from",
    "upgrade",
    "upgrade_statements",
    "version_in",
]


@value
class Step:
    """How tables of the version before `to` become those of version `to`.

    Attributes:
        to: the version of the tables after this step.
        why: what changes, in one sentence.
        statements: SQL by kind of database: "postgresql", "mariadb", "mysql", "sqlite".
    """

    to: int
    why: str
    statements: Mapping[str, tuple[str, ...]]


# Version 5 is the first: no step leads to it. Versions 1 to 4 were never released.
STEPS: tuple[Step, ...] = ()

_NOTE = "UPDATE taskguard_schema SET version = "


def expect_version(version: int | None) -> None:
    """Raise LedgerSchemaError unless the tables have this library's version.

    The error says what to do: create, upgrade or drop the tables, or install a newer library.
    """
    if version == SCHEMA_VERSION:
        return
    if version is None:
        raise LedgerSchemaError(
            "The creation of the ledger's tables was interrupted.",
            remedy="Run `taskguard ledger create`.",
        )
    problem = (
        f"The ledger's tables have version {version}, and this library needs version "
        f"{SCHEMA_VERSION}"
    )
    if version > SCHEMA_VERSION:
        raise LedgerSchemaError(
            f"{problem}: another process has a newer library.", remedy="Install that one here, too."
        )
    if _path(version) is None:
        raise LedgerSchemaError(
            f"{problem}: a checkout from before the first release made them, and nothing upgrades "
            "them.",
            remedy=f"Drop the tables {', '.join(sorted(METADATA.tables))}, or use another database "
            "or schema. Then run `taskguard ledger create`.",
        )
    raise LedgerSchemaError(
        f"{problem}.",
        remedy="Stop the workers, then run `taskguard ledger upgrade` (`--sql` prints the SQL).",
    )


def statements_from(version: int, *, kind: str, to: int | None = None) -> list[str]:
    """Return the SQL of an upgrade, including the versions that it records.

    Raises LedgerSchemaError if no steps lead from that version to this library's.
    """
    path = _path(version)
    if path is None:
        expect_version(version)
    found: list[str] = []
    for step in path or ():
        if to is not None and step.to > to:
            break
        found += step.statements[kind]
        found.append(f"{_NOTE}{step.to}")
    return found


def upgrade_statements(url: str, *, version: int, to: int | None = None) -> list[str]:
    """Return the SQL that upgrades tables of `version`, one statement after the other.

    Args:
        url: a SQLAlchemy URL. Only the kind of database matters; for MariaDB it begins with
            `mariadb+pymysql://`.
        version: the version that the tables have.
        to: the version that they get; this library's by default.

    Raises:
        LedgerSchemaError: no upgrade exists from that version.
    """
    return statements_from(version, kind=sa.make_url(url).get_backend_name(), to=to)


def upgrade(database: Database) -> tuple[int, int]:
    """Run the missing steps, and return the versions before and after. Idempotent."""
    kind = database.engine.dialect.name
    before = version = version_in(database)
    while version < SCHEMA_VERSION:
        with database.transaction(bounded=False) as db:
            database.dialect.lock_schema(db)
            version = _read(db)  # another upgrade may have been faster
            for step in (_path(version) or ())[:1]:
                for statement in step.statements[kind]:
                    ddl: Any = sa.DDL  # SQLAlchemy has no types for it
                    db.execute(ddl(statement.replace("%", "%%")))
                db.execute(sa.update(SCHEMA).values(version=step.to))
                version = step.to
    return before, version


def version_in(database: Database) -> int:
    """Return the tables' version. Raises LedgerSchemaError if no upgrade exists from it."""
    with database.transaction(bounded=False) as db:
        version = _read(db)
    if _path(version) is None:
        expect_version(version)
    return version


def _read(db: sa.Connection) -> int:
    version: int | None = db.execute(sa.select(sa.func.max(SCHEMA.c.version))).scalar()
    if version is None:
        expect_version(None)
    return version or 0


def _path(version: int) -> tuple[Step, ...] | None:
    """Return the steps to this library's version. None: one is missing, or the version is newer."""
    if version > SCHEMA_VERSION:
        return None
    steps = {step.to: step for step in STEPS}
    wanted = range(version + 1, SCHEMA_VERSION + 1)
    return tuple(steps[to] for to in wanted) if all(to in steps for to in wanted) else None
