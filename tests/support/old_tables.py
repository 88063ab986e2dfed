"""The ledger's tables as earlier versions made them, with rows that those had written."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from taskguard.ledger.tables import MESSAGES, SCHEMA, WORK, _Exact

__all__ = ["back_to_version_1", "shape_of"]


_STATES = "taskguard_work_state check (state in ('NEW', 'PROCESSING', 'DONE', 'FAILED', 'DEAD'))"


def back_to_version_1(engine: sa.Engine) -> None:
    """Today's tables become those of version 1: a number for each message, whatever its work."""
    old = sa.Table(
        "taskguard_messages",
        sa.MetaData(),
        sa.Column("message", _Exact(key_chars=768), primary_key=True),
        sa.Column("work", _Exact(), nullable=False),
        sa.Column("retries", sa.Integer, nullable=False),
        sa.Column("copy", sa.Integer, nullable=False),
        MESSAGES.c.updated._copy(),
        **MESSAGES.dialect_kwargs,
    )
    texts = {"task": "ship", "key": "order:1", "owner": "n/m", "state": "DONE", "result": "7"}
    numbers = dict.fromkeys(("retries", "final", "lease_until", "crashes", "created"), 0)
    done = {**texts, **numbers, "fence": 1, "attempts": 1, "crashed_owner": ""}
    with engine.begin() as db:
        MESSAGES.drop(db)
        old.create(db)
        beside = " on taskguard_work" if engine.dialect.name in ("mysql", "mariadb") else ""
        for index in ("taskguard_work_parked", "taskguard_work_due"):
            db.execute(sa.text(f"drop index {index}{beside}"))
        for column in ("rounds", "parked", "`rank`" if beside else "rank", "strict", "expires"):
            db.execute(sa.text(f"alter table taskguard_work drop column {column}"))
        for column in ("slots", "next_start", "stamp"):
            db.execute(sa.text(f"alter table taskguard_keys drop column {column}"))
        partial = "" if beside else " where due is not null"
        db.execute(sa.text(f"create index taskguard_work_due on taskguard_work (due){partial}"))
        if engine.dialect.name != "sqlite":  # which adds no constraint to a table that there is
            db.execute(sa.text(f"alter table taskguard_work add constraint {_STATES}"))
        db.execute(sa.update(SCHEMA).values(version=1))
        number = {"retries": 0, "copy": 3, "updated": 1}
        db.execute(sa.insert(old).values(message="m", work="ship order:1", **number))
        for work, message in (("ship order:1", "m"), ("ship eu:message:m", "m")):
            db.execute(sa.insert(WORK).values(id=work, message=message, **done))


def shape_of(engine: sa.Engine) -> dict[str, Any]:
    """Columns, in whatever order, indexes, primary keys and checks of the ledger's tables."""
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
