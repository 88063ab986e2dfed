"""Tables as a checkout from before the first release left them, and the shape of today's."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

__all__ = ["OLD_VERSIONS", "make_old_tables", "shape_of"]

OLD_VERSIONS = (1, 2, 3, 4)


def make_old_tables(engine: sa.Engine, version: int) -> None:
    """Create two tables of that version. Columns that today's indexes need are missing."""
    metadata = sa.MetaData()
    schema = sa.Table("taskguard_schema", metadata, sa.Column("version", sa.Integer))
    sa.Table(
        "taskguard_work",
        metadata,
        sa.Column("id", sa.String(99), primary_key=True),
        sa.Column("state", sa.String(9)),
    )
    metadata.create_all(engine)
    with engine.begin() as db:
        db.execute(sa.insert(schema).values(version=version))


def shape_of(engine: sa.Engine) -> dict[str, Any]:
    """Return columns, in any order, indexes, primary keys and checks of the ledger's tables."""
    inspector = sa.inspect(engine)
    return {
        table: (
            sorted(
                (column["name"], str(column["type"]), column["nullable"])
                for column in inspector.get_columns(table)
            ),
            [index["name"] for index in inspector.get_indexes(table)],
            inspector.get_pk_constraint(table)["constrained_columns"],
            [check["name"] for check in inspector.get_check_constraints(table)],
        )
        for table in inspector.get_table_names()
        if table.startswith("taskguard_")
    }
