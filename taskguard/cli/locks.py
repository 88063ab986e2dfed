"""`taskguard locks`: creates the lock table in a database.

Guarantees: a repeated call changes no row. Does not know locks on other servers.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from typing import Any

from taskguard.cli.targets import CommandError
from taskguard.drivers import extra_of, extras_named
from taskguard.locks.registry import BESIDE_LEDGER
from taskguard.settings import LEDGER_VARIABLE, LOCKS_VARIABLE, named_source

__all__ = ["add_locks", "add_unlogged", "create_locks", "forget_locks", "locks_sql"]


def add_locks(commands: Any) -> None:
    """Add `locks` with its actions."""
    locks = commands.add_parser("locks", help="the lock table in a database")
    create = locks.add_subparsers(dest="action", required=True).add_parser(
        "create", help="create the table, and on PostgreSQL its functions, if they are missing"
    )
    create.add_argument(
        "--url",
        help=f"SQLAlchemy URL; by default ${LOCKS_VARIABLE}, or ${LEDGER_VARIABLE} if that is "
        "ledger:// or not set",
    )
    create.add_argument("--sql", action="store_true", help="print the SQL instead of running it")
    add_unlogged(create)
    create.set_defaults(run_alone=_create)


def add_unlogged(parser: argparse.ArgumentParser) -> None:
    """Add `--unlogged`."""
    parser.add_argument(
        "--unlogged",
        action="store_true",
        help="create an UNLOGGED lock table: faster, and empty after a crash of PostgreSQL; "
        "recommended with a ledger",
    )


def create_locks(database: Any, *, unlogged: bool) -> None:
    """Create the lock table in the database of a URL or a ledger."""
    with extras_named("The lock table", extra_of(database)):
        from taskguard.lock_table import TableLocks

    with contextlib.closing(TableLocks(database)) as locks:
        locks.create_table(unlogged=unlogged)
        print(f"created: the lock table in {locks.place}")


def locks_sql(url: str, *, unlogged: bool) -> str:
    """Return the SQL that `create_locks()` runs."""
    with extras_named("The lock table", extra_of(url)):
        from taskguard.lock_table.table import ddl_statements

    return "".join(f"{each};\n\n" for each in ddl_statements(url, unlogged=unlogged))


def forget_locks(ledger: Any) -> int | None:
    """Delete old rows in the ledger's database. Return None if it has no lock table."""
    from taskguard.lock_table.table import is_there  # SQLAlchemy is optional

    database = getattr(ledger, "database", None)
    if database is None or not is_there(database):
        return None
    from taskguard.lock_table import TableLocks

    with contextlib.closing(TableLocks(database)) as locks:
        return locks.forget()


def _create(arguments: argparse.Namespace) -> None:
    if arguments.sql:
        with named_source("--url"):
            text = locks_sql(arguments.url or "postgresql+psycopg://", unlogged=arguments.unlogged)
        print(text)
        return
    url, source = arguments.url, "--url"
    if not url:
        url, source = os.environ.get(LOCKS_VARIABLE) or BESIDE_LEDGER, LOCKS_VARIABLE
    if url == BESIDE_LEDGER:
        url, source = os.environ.get(LEDGER_VARIABLE, ""), LEDGER_VARIABLE
    if not url:
        raise CommandError(
            f"No database is given for locks. Pass --url, or set {LOCKS_VARIABLE}, for "
            'example to "postgresql+psycopg://shop@localhost/shop".'
        )
    with named_source(source):
        create_locks(url, unlogged=arguments.unlogged)
