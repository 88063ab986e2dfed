"""How many rows and bytes the ledger's tables have, as the database estimates it. Reads no rows."""

from __future__ import annotations

import sqlalchemy as sa

from taskguard.ledger.tables import METADATA

__all__ = ["sizes"]

_Sizes = list[tuple[str, int | None, int | None]]

_POSTGRESQL = sa.text(
    "select t.name, c.reltuples, pg_total_relation_size(c.oid)"
    " from unnest(cast(:tables as text[])) t (name)"
    " join pg_class c on c.oid = to_regclass(quote_ident(t.name)) order by 1"
)
_MYSQL = sa.text(
    "select table_name, table_rows, data_length + index_length from information_schema.tables"
    " where table_schema = database() and table_name in :tables order by 1"
).bindparams(sa.bindparam("tables", expanding=True))


def sizes(db: sa.Connection) -> _Sizes:
    """Return each table with its rows and its bytes with indexes. None: the database has none.

    PostgreSQL has no estimate of rows before the first ANALYZE or VACUUM. SQLite has the highest
    number of a row, and no bytes.
    """
    tables = sorted(METADATA.tables)
    if db.dialect.name == "sqlite":
        return [(name, _highest_row(db, name), None) for name in tables]
    query = _POSTGRESQL if db.dialect.name == "postgresql" else _MYSQL
    found = db.execute(query, {"tables": tables})
    return [
        (name, None if rows is None or rows < 0 else int(rows), int(size))
        for name, rows, size in found
    ]


def _highest_row(db: sa.Connection, table: str) -> int:
    row: sa.ColumnElement[int] = sa.literal_column("rowid")
    highest = sa.select(sa.func.max(row)).select_from(sa.table(table))
    return int(db.execute(highest).scalar() or 0)
