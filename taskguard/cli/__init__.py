"""The command `taskguard`.

taskguard ledger create [--url URL] [--sql]     make the ledger's tables, or print their SQL
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence

from taskguard.errors import TaskguardError
from taskguard.settings import LEDGER_VARIABLE, UNSET, make_ledger

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="taskguard", description="taskguard's own commands")
    commands = parser.add_subparsers(dest="command", required=True)
    ledger = commands.add_parser("ledger", help="the ledger's tables")
    actions = ledger.add_subparsers(dest="action", required=True)
    create = actions.add_parser("create", help="create the tables that are missing")
    create.add_argument("--url", help=f"SQLAlchemy URL; by default ${LEDGER_VARIABLE}")
    create.add_argument("--sql", action="store_true", help="print the SQL instead of running it")
    arguments = parser.parse_args(argv)
    try:
        return _create(arguments.url, sql=arguments.sql)
    except TaskguardError as error:
        print(f"taskguard: {error}", file=sys.stderr)
        return 1


def _create(url: str | None, *, sql: bool) -> int:
    if sql:
        from taskguard.ledger.sql import ddl

        print(ddl(url or "postgresql+psycopg://"))
        return 0
    made = make_ledger(url or UNSET)
    assert made is not None  # noqa: S101  # only None makes None
    with contextlib.closing(made):
        made.create_schema()
    print(f"created: {made!r}")
    return 0
