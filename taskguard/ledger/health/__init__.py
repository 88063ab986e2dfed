"""What is wrong with the ledger's database: asked once, and judged by rules.

Guarantees: everything is asked by transactions that are over when `check()` returns; nothing is
changed, no table is read as a whole, and no row lock is waited for. What a database, or its user's
rights, will not say is left out.

`facts.py` has what there is to know, `asking.py` and a module for each kind of database find it
out, `rules.py` judges.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import sqlalchemy as sa

from taskguard.errors import LedgerSchemaError, LedgerUnavailableError
from taskguard.findings import Finding
from taskguard.ledger.connections.database import CannotWriteError, Database
from taskguard.ledger.health.asking import ask_schemas, ask_server, ask_tables
from taskguard.ledger.health.rules import (
    SHARED_APPS,
    Bodies,
    judge_server,
    judge_tables,
    listed,
    privileges_missing,
    row_table_unfit,
    tables_missing,
    unwritable,
    version_unfit,
)
from taskguard.ledger.schema.privileges import check_privileges
from taskguard.ledger.schema.upgrades import expect_version
from taskguard.ledger.tables import SCHEMA

__all__ = ["Bodies", "check", "version_of_tables"]


def check(database: Database, *, bodies: Bodies, check_rows: Callable[[], None]) -> list[Finding]:
    """What is wrong. Raises LedgerUnavailableError where the database gives no answer.

    `check_rows` raises LedgerSchemaError unless the users' own tables are as declared.
    """
    where = f"the ledger {database.place}"
    found: list[Finding] = []
    try:
        server = ask_server(database)
        found += judge_server(server, bodies, where=where)
        schema = _schema(database, where=where)
        if schema is not None:
            return [*found, schema]
        if server.read_only is None:
            found += _writing(database, check_rows, where=where)
        # What may not be asked is among the findings above; what takes too long is not waited for.
        with contextlib.suppress(LedgerSchemaError, LedgerUnavailableError):
            found += judge_tables(ask_tables(database), bodies, where=where)
    except CannotWriteError as error:
        found.append(unwritable(error, where=where))
    return found


def _schema(database: Database, *, where: str) -> Finding | None:
    """What is wrong with the tables as such."""
    version = None
    try:
        version = version_of_tables(database)
        expect_version(version)
    except LedgerSchemaError as error:
        return (tables_missing if version is None else version_unfit)(error, where=where)
    return None


def version_of_tables(database: Database) -> int | None:
    """None if they were not made to their end.

    Raises LedgerSchemaError if there are none. It names the schemas that have some.
    """
    try:
        with database.transaction() as db:
            version: int | None = db.execute(sa.select(sa.func.max(SCHEMA.c.version))).scalar()
            return version
    except LedgerSchemaError as error:
        schemas = ask_schemas(database)
        if str(error) == error.problem or not schemas:
            raise
        raise LedgerSchemaError(
            f"The ledger's tables are not in the schema that its connections to {database.place} "
            f"use, but in {listed(schemas)}.",
            remedy="Put that schema on the search_path of the ledger's URL. If it is a tenant's "
            f"(django-tenants): {SHARED_APPS}",
        ) from error


def _writing(
    database: Database, check_rows: Callable[[], None], *, where: str
) -> Iterator[Finding]:
    """What the ledger's user may not do."""
    try:
        check_privileges(database)
    except LedgerSchemaError as error:
        yield privileges_missing(error, where=where)
        return
    try:
        check_rows()
    except LedgerSchemaError as error:
        yield row_table_unfit(error, where=where)
