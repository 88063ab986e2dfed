"""Check the ledger's database: read its facts once, then judge them.

Guarantees: `check()` leaves no transaction open, changes nothing, reads no table as a whole and
waits for no row lock. It skips what the database or the user's rights do not tell.

Read next: `facts.py`; `reading.py`, which uses one module for each kind of database; `judge.py`,
which names findings; `findings.py`, their texts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import sqlalchemy as sa

from taskguard.errors import LedgerSchemaError, LedgerUnavailableError
from taskguard.findings import Finding
from taskguard.ledger.connections.database import Database
from taskguard.ledger.connections.errors import CannotWriteError
from taskguard.ledger.health import findings
from taskguard.ledger.health.facts import Bodies
from taskguard.ledger.health.judge import (
    judge_privileges,
    judge_schema,
    judge_server,
    judge_tables,
)
from taskguard.ledger.health.reading import read_other_schemas, read_server, read_tables
from taskguard.ledger.schema.privileges import check_privileges
from taskguard.ledger.schema.upgrades import expect_version
from taskguard.ledger.tables import SCHEMA

__all__ = ["Bodies", "check", "version_of_tables"]

_NAMED = 3


def check(database: Database, *, bodies: Bodies, check_rows: Callable[[], None]) -> list[Finding]:
    """Return what is wrong. Raise LedgerUnavailableError if the database gives no answer.

    `check_rows` raises LedgerSchemaError unless the users' own tables are as declared.
    """
    where = f"the ledger {database.place}"
    found: list[Finding] = []
    try:
        server = read_server(database)
        found += judge_server(server, bodies, where=where)
        unfit = _schema(database, where=where)
        if unfit is not None:
            return [*found, unfit]
        if server.read_only is None:
            found += _writing(database, check_rows, where=where)
        # A missing right is among the findings above. An answer that takes too long is skipped.
        with contextlib.suppress(LedgerSchemaError, LedgerUnavailableError):
            found += judge_tables(read_tables(database), bodies, where=where)
    except CannotWriteError as error:
        found.append(findings.UNWRITABLE.at(where, error=error))
    return found


def _schema(database: Database, *, where: str) -> Finding | None:
    version = None
    try:
        version = version_of_tables(database)
        expect_version(version)
    except LedgerSchemaError as error:
        template = findings.TABLES_MISSING if version is None else findings.TABLES_VERSION
        return judge_schema(error, template, where=where)
    return None


def version_of_tables(database: Database) -> int | None:
    """Return the version of the tables, or None if their creation was interrupted.

    Raises LedgerSchemaError if there are none. It names other schemas that have some.
    """
    try:
        with database.transaction() as db:
            version: int | None = db.execute(sa.select(sa.func.max(SCHEMA.c.version))).scalar()
            return version
    except LedgerSchemaError as error:
        schemas = read_other_schemas(database)
        if str(error) == error.problem or not schemas:
            raise
        raise LedgerSchemaError(
            f"The ledger's tables are not in the schema that its connections to {database.place} "
            f"use, but in {_listed(schemas)}.",
            remedy="Put that schema on the search_path of the ledger's URL. If it is a tenant's "
            '(django-tenants): move "taskguard_django" from TENANT_APPS to SHARED_APPS, run '
            "`migrate_schemas --shared`, and drop the tables in the tenants' schemas.",
        ) from error


def _writing(
    database: Database, check_rows: Callable[[], None], *, where: str
) -> Iterator[Finding]:
    try:
        check_privileges(database)
    except LedgerSchemaError as error:
        yield judge_privileges(error, where=where)
        return
    try:
        check_rows()
    except LedgerSchemaError as error:
        yield judge_schema(error, findings.OWN_TABLE, where=where)


def _listed(schemas: Sequence[str]) -> str:
    """Return `the schema acme`, or `the schemas acme, globex, initech and 5 more`."""
    more = len(schemas) - _NAMED
    named = ", ".join(schemas[:_NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"the schema{'s' if len(schemas) > 1 else ''} {named}"
