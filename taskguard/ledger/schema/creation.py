"""Create the ledger's tables, by `taskguard ledger create` or as SQL for a migration.

Guarantees: several processes can create the tables at the same time, and a repetition does nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from taskguard.errors import TransactionRetryError
from taskguard.ledger.connections.database import Database
from taskguard.ledger.connections.engine import read_url
from taskguard.ledger.schema.upgrades import expect_version
from taskguard.ledger.tables import METADATA, SCHEMA, SCHEMA_VERSION

__all__ = ["create", "ddl", "ddl_statements", "include_name"]

_OF_LOCKS = "taskguard_locks"  # taskguard/lock_table makes it
_MYSQL = ("mysql", "mariadb")
_INNODB = {"engine": "InnoDB", "default_charset": "utf8mb4"}
_TRIES = 5  # if several processes create tables at once, MySQL refuses all but one


@functools.cache
def _tables() -> tuple[sa.Table, ...]:
    """Return the tables with their options for each kind of database.

    The options are not in `tables.py`: SQLAlchemy loads the dialect of every database that an
    option names, and a process that makes no tables needs only its own.
    """
    for table in METADATA.sorted_tables:
        for name in _MYSQL:
            _set(table, name, _INNODB)
        for index in table.indexes:
            where, length = index.info.get("where"), index.info.get("length")
            for name in ("postgresql", "sqlite"):
                _set(index, name, {} if where is None else {"where": where})
            for name in _MYSQL:
                _set(index, name, {} if length is None else {"length": length})
    return tuple(METADATA.sorted_tables)


def _set(what: sa.Table | sa.Index, dialect: str, options: Mapping[str, Any]) -> None:
    for option, given in options.items():
        what.dialect_kwargs[f"{dialect}_{option}"] = given


def create(database: Database) -> None:
    """Create missing tables. Raises LedgerSchemaError if the tables have another version."""
    for _ in range(_TRIES):
        with contextlib.suppress(TransactionRetryError):
            _create(database)
            return
    _create(database)


def _create(database: Database) -> None:
    with database.transaction(bounded=False) as db:
        dialect = database.dialect
        dialect.lock_schema(db)
        tables = _tables()
        db.execute(sa.schema.CreateTable(SCHEMA, if_not_exists=True))
        version = db.execute(sa.select(sa.func.max(SCHEMA.c.version))).scalar()
        if version is not None:
            expect_version(version)  # first, because an index may need a column that is missing
        for table in tables:
            db.execute(sa.schema.CreateTable(table, if_not_exists=True))
            for index in table.indexes:
                dialect.create_index(db, index)
        if version is None:
            db.execute(dialect.insert_missing(SCHEMA, {"version": SCHEMA_VERSION}))


def ddl(url: str) -> str:
    """Return the SQL that `create()` would run, for a review or a migration."""
    return "".join(f"{each};\n\n" for each in ddl_statements(url))


def ddl_statements(url: str, *, if_not_exists: bool = False) -> list[str]:
    """Return the statements that create the ledger's tables, for a migration.

    Args:
        url: a SQLAlchemy URL. Only the kind of database and the driver matter.
        if_not_exists: skip tables that exist. By default the statements fail then.

    Raises:
        ConfigurationError: the URL cannot be read.
    """
    dialect = read_url(url).get_dialect()()
    parts: list[Any] = []
    for table in _tables():
        parts.append(sa.schema.CreateTable(table, if_not_exists=if_not_exists))
        parts += [
            sa.schema.CreateIndex(index, if_not_exists=if_not_exists) for index in table.indexes
        ]
    tables = [str(part.compile(dialect=dialect)).strip() for part in parts]
    values = sa.insert(SCHEMA).values(version=SCHEMA_VERSION)
    if if_not_exists:
        there = sa.select(SCHEMA.c.version)
        new = sa.select(sa.literal(SCHEMA_VERSION)).where(~there.exists())
        values = sa.insert(SCHEMA).from_select(["version"], new)
    version = str(values.compile(dialect=dialect, compile_kwargs={"literal_binds": True}))
    return [*tables, version]


def include_name(name: str | None, type_: str, parent_names: Mapping[str, str | None]) -> bool:
    """Return False for taskguard's tables, and True for everything else, for Alembic.

    Use it as `context.configure(include_name=taskguard.include_name)`. taskguard's tables are not
    in an application's models, so that `alembic revision --autogenerate` would drop them.
    """
    del parent_names
    return type_ != "table" or not (name in METADATA.tables or name == _OF_LOCKS)
