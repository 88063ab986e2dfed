"""From one version of the ledger's tables to the next: each step is data.

A change of `tables.py` raises SCHEMA_VERSION and adds a `Step` with its SQL for each kind of
database, in the order in which it is run; a test asks for every version and kind.

Guarantees: on PostgreSQL and SQLite a step is there as a whole, with its version, or not at all,
and two upgrades at once wait for each other. On MariaDB and MySQL each statement commits by itself,
and a step that stopped halfway begins again with its first: its statements have to bear that
(`IF NOT EXISTS`), or say in `why` what a person does then.

Does not stop workers: those of another version refuse the tables when they start, not while they
run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from taskguard.errors import LedgerSchemaError
from taskguard.ledger.connections.database import Database
from taskguard.ledger.tables import SCHEMA, SCHEMA_VERSION
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
    """How tables become those of version `to`, from those of the version before it.

    Attributes:
        to: the version that they have then.
        why: what changes, in a sentence.
        statements: SQL by kind of database: "postgresql", "mariadb", "mysql", "sqlite".
    """

    to: int
    why: str
    statements: Mapping[str, tuple[str, ...]]


_NOTE = "UPDATE taskguard_schema SET version = "

# MODIFY and the UPDATE change nothing when run again.
_MYSQL_TO_2 = (
    "DELETE FROM taskguard_messages WHERE char_length(message) > 255 OR char_length(work) > 512",
    (
        "ALTER TABLE taskguard_messages MODIFY message VARCHAR(255) CHARACTER SET utf8mb4 COLLATE "
        "{collation} NOT NULL, MODIFY work VARCHAR(512) CHARACTER SET utf8mb4 COLLATE {collation} "
        "NOT NULL, DROP PRIMARY KEY, ADD PRIMARY KEY (message, work)"
    ),
    (
        "UPDATE taskguard_work SET id = concat(id, ' ', `key`) "
        "WHERE right(id, char_length(message) + 8) = concat('message:', message)"
    ),
)
# The number has a header of another name, so messages that are on their way count from 0 again.
_BEGINS_ANEW = "UPDATE taskguard_messages SET deferrals = 0"


def _mysql_unless(table: str, column: str, statement: str) -> tuple[str, ...]:
    """The statement where the table has no such column: MySQL knows no IF [NOT] EXISTS there."""
    there = f"columns WHERE table_schema = database() AND column_name = '{column}'"
    return _mysql_if("= 0", f"{there} AND table_name = '{table}'", statement)


def _mysql_if(count: str, there: str, statement: str) -> tuple[str, ...]:
    """The statement where so many rows of the information schema are there."""
    return (
        (
            f"SET @taskguard_step = (SELECT if(count(*) {count}, '{statement}', 'DO 0') "  # noqa: S608 - ours
            f"FROM information_schema.{there})"
        ),
        "PREPARE taskguard_step FROM @taskguard_step",
        "EXECUTE taskguard_step",
        "DEALLOCATE PREPARE taskguard_step",
    )


def _lines_to_4(rank: str) -> tuple[str, ...]:
    """What has ended leaves its line, and all who wait are of one rank; `rank`, as it is quoted."""
    return (
        "UPDATE taskguard_work SET parked = NULL WHERE parked IS NOT NULL AND state <> 'NEW'",
        f"UPDATE taskguard_work SET {rank} = 0 WHERE parked IS NOT NULL",  # noqa: S608 - ours
    )


_DUE_TO_4 = (
    "CREATE INDEX taskguard_work_due ON taskguard_work (due, expires) "
    "WHERE due IS NOT NULL OR expires IS NOT NULL"
)

# Version 1 is the first.
STEPS: tuple[Step, ...] = (
    Step(
        to=2,
        why="the numbers of a message belong to its work, for an id may be used for two; work by "
        "message is named by message and key; rounds that the database ended are counted; the "
        "column `copy` is named `deferrals`, and begins at 0 again; the CHECK of states "
        "goes (not on SQLite, which drops none)",
        statements={
            "postgresql": (
                (
                    "ALTER TABLE taskguard_messages DROP CONSTRAINT taskguard_messages_pkey, "
                    "ADD PRIMARY KEY (message, work)"
                ),
                (
                    "UPDATE taskguard_work SET id = id || ' ' || key "
                    "WHERE right(id, length(message) + 8) = 'message:' || message"
                ),
                "ALTER TABLE taskguard_work ADD COLUMN IF NOT EXISTS rounds INTEGER",
                "ALTER TABLE taskguard_messages RENAME COLUMN copy TO deferrals",
                "ALTER TABLE taskguard_work DROP CONSTRAINT IF EXISTS taskguard_work_state",
                _BEGINS_ANEW,
            ),
            "mariadb": (
                *(each.format(collation="utf8mb4_nopad_bin") for each in _MYSQL_TO_2),
                "ALTER TABLE taskguard_work ADD COLUMN IF NOT EXISTS rounds INTEGER",
                "ALTER TABLE taskguard_messages RENAME COLUMN IF EXISTS `copy` TO deferrals",
                "ALTER TABLE taskguard_work DROP CONSTRAINT IF EXISTS taskguard_work_state",
                _BEGINS_ANEW,
            ),
            "mysql": (
                *(each.format(collation="utf8mb4_0900_bin") for each in _MYSQL_TO_2),
                *_mysql_unless(
                    "taskguard_work",
                    "rounds",
                    "ALTER TABLE taskguard_work ADD COLUMN rounds INTEGER",
                ),
                *_mysql_unless(
                    "taskguard_messages",
                    "deferrals",
                    "ALTER TABLE taskguard_messages RENAME COLUMN `copy` TO deferrals",
                ),
                *_mysql_if(
                    "> 0",
                    "table_constraints WHERE table_schema = database() "
                    "AND constraint_name = 'taskguard_work_state'",
                    "ALTER TABLE taskguard_work DROP CHECK taskguard_work_state",
                ),
                _BEGINS_ANEW,
            ),
            "sqlite": (
                (
                    "CREATE TABLE taskguard_messages_2 (message TEXT NOT NULL, work TEXT NOT NULL, "
                    "retries INTEGER NOT NULL, deferrals INTEGER NOT NULL, "
                    "updated BIGINT NOT NULL, PRIMARY KEY (message, work))"
                ),
                (
                    "INSERT INTO taskguard_messages_2 (message, work, retries, deferrals, updated) "
                    "SELECT message, work, retries, 0, updated FROM taskguard_messages"
                ),
                "DROP TABLE taskguard_messages",
                "ALTER TABLE taskguard_messages_2 RENAME TO taskguard_messages",
                (
                    "UPDATE taskguard_work SET id = id || ' ' || key "
                    "WHERE substr(id, -(length(message) + 8)) = 'message:' || message"
                ),
                "ALTER TABLE taskguard_work ADD COLUMN rounds INTEGER",
            ),
        },
    ),
    Step(
        to=3,
        why="work that waits for its key stands in a line: since when is in the column `parked`",
        statements={
            "postgresql": (
                "ALTER TABLE taskguard_work ADD COLUMN IF NOT EXISTS parked BIGINT",
                (
                    "CREATE INDEX IF NOT EXISTS taskguard_work_parked ON taskguard_work "
                    "(key, parked) WHERE parked IS NOT NULL"
                ),
            ),
            "mariadb": (
                "ALTER TABLE taskguard_work ADD COLUMN IF NOT EXISTS parked BIGINT",
                (
                    "CREATE INDEX IF NOT EXISTS taskguard_work_parked ON taskguard_work "
                    "(`key`(255), parked)"
                ),
            ),
            "mysql": (
                *_mysql_unless(
                    "taskguard_work",
                    "parked",
                    "ALTER TABLE taskguard_work ADD COLUMN parked BIGINT",
                ),
                *_mysql_if(
                    "= 0",
                    "statistics WHERE table_schema = database() "
                    "AND index_name = 'taskguard_work_parked'",
                    "CREATE INDEX taskguard_work_parked ON taskguard_work (`key`(255), parked)",
                ),
            ),
            "sqlite": (
                "ALTER TABLE taskguard_work ADD COLUMN parked BIGINT",
                (
                    "CREATE INDEX taskguard_work_parked ON taskguard_work (key, parked) "
                    "WHERE parked IS NOT NULL"
                ),
            ),
        },
    ),
    Step(
        to=4,
        why="a line has ranks, and work may keep its place in it: the columns `rank` and `strict`; "
        "what has ended stands in no line; several may hold a key at once, and how often it is "
        "begun may be limited: how many slots it has is in the column `slots`, when the next start "
        "is allowed in `next_start`; of messages that take each other's place it is known when the "
        "newest was sent that has begun: the column `stamp`; who waits may expire: when is in the "
        "column `expires`, by which it is found beside what is due",
        statements={
            "postgresql": (
                "ALTER TABLE taskguard_keys ADD COLUMN IF NOT EXISTS slots INTEGER",
                "ALTER TABLE taskguard_keys ADD COLUMN IF NOT EXISTS next_start BIGINT",
                "ALTER TABLE taskguard_keys ADD COLUMN IF NOT EXISTS stamp BIGINT",
                "ALTER TABLE taskguard_work ADD COLUMN IF NOT EXISTS rank INTEGER",
                "ALTER TABLE taskguard_work ADD COLUMN IF NOT EXISTS strict SMALLINT",
                "ALTER TABLE taskguard_work ADD COLUMN IF NOT EXISTS expires BIGINT",
                *_lines_to_4("rank"),
                "DROP INDEX IF EXISTS taskguard_work_due",
                _DUE_TO_4,
                "DROP INDEX IF EXISTS taskguard_work_parked",
                (
                    "CREATE INDEX taskguard_work_parked ON taskguard_work "
                    "(key, rank, parked) WHERE parked IS NOT NULL"
                ),
            ),
            "mariadb": (
                "ALTER TABLE taskguard_keys ADD COLUMN IF NOT EXISTS slots INTEGER",
                "ALTER TABLE taskguard_keys ADD COLUMN IF NOT EXISTS next_start BIGINT",
                "ALTER TABLE taskguard_keys ADD COLUMN IF NOT EXISTS stamp BIGINT",
                "ALTER TABLE taskguard_work ADD COLUMN IF NOT EXISTS `rank` INTEGER",
                "ALTER TABLE taskguard_work ADD COLUMN IF NOT EXISTS strict SMALLINT",
                "ALTER TABLE taskguard_work ADD COLUMN IF NOT EXISTS expires BIGINT",
                *_lines_to_4("`rank`"),
                "DROP INDEX IF EXISTS taskguard_work_due ON taskguard_work",
                "CREATE INDEX taskguard_work_due ON taskguard_work (due, expires)",
                "DROP INDEX IF EXISTS taskguard_work_parked ON taskguard_work",
                (
                    "CREATE INDEX taskguard_work_parked ON taskguard_work "
                    "(`key`(255), `rank`, parked)"
                ),
            ),
            "mysql": (
                *_mysql_unless(
                    "taskguard_keys",
                    "slots",
                    "ALTER TABLE taskguard_keys ADD COLUMN slots INTEGER",
                ),
                *_mysql_unless(
                    "taskguard_keys",
                    "next_start",
                    "ALTER TABLE taskguard_keys ADD COLUMN next_start BIGINT",
                ),
                *_mysql_unless(
                    "taskguard_keys",
                    "stamp",
                    "ALTER TABLE taskguard_keys ADD COLUMN stamp BIGINT",
                ),
                *_mysql_unless(
                    "taskguard_work",
                    "rank",
                    "ALTER TABLE taskguard_work ADD COLUMN `rank` INTEGER",
                ),
                *_mysql_unless(
                    "taskguard_work",
                    "strict",
                    "ALTER TABLE taskguard_work ADD COLUMN strict SMALLINT",
                ),
                *_mysql_unless(
                    "taskguard_work",
                    "expires",
                    "ALTER TABLE taskguard_work ADD COLUMN expires BIGINT",
                ),
                *_lines_to_4("`rank`"),
                *_mysql_if(
                    "> 0",
                    "statistics WHERE table_schema = database() "
                    "AND index_name = 'taskguard_work_due'",
                    "DROP INDEX taskguard_work_due ON taskguard_work",
                ),
                "CREATE INDEX taskguard_work_due ON taskguard_work (due, expires)",
                *_mysql_if(
                    "> 0",
                    "statistics WHERE table_schema = database() "
                    "AND index_name = 'taskguard_work_parked'",
                    "DROP INDEX taskguard_work_parked ON taskguard_work",
                ),
                (
                    "CREATE INDEX taskguard_work_parked ON taskguard_work "
                    "(`key`(255), `rank`, parked)"
                ),
            ),
            "sqlite": (
                "ALTER TABLE taskguard_keys ADD COLUMN slots INTEGER",
                "ALTER TABLE taskguard_keys ADD COLUMN next_start BIGINT",
                "ALTER TABLE taskguard_keys ADD COLUMN stamp BIGINT",
                "ALTER TABLE taskguard_work ADD COLUMN rank INTEGER",
                "ALTER TABLE taskguard_work ADD COLUMN strict SMALLINT",
                "ALTER TABLE taskguard_work ADD COLUMN expires BIGINT",
                *_lines_to_4("rank"),
                "DROP INDEX taskguard_work_due",
                _DUE_TO_4,
                "DROP INDEX taskguard_work_parked",
                (
                    "CREATE INDEX taskguard_work_parked ON taskguard_work (key, rank, parked) "
                    "WHERE parked IS NOT NULL"
                ),
            ),
        },
    ),
)


def expect_version(version: int | None) -> None:
    """Raise LedgerSchemaError, with the command that helps, unless tables are this library's."""
    if version == SCHEMA_VERSION:
        return
    if version is None:
        raise LedgerSchemaError(
            "The ledger's tables were not made to their end.",
            remedy="Run `taskguard ledger create`.",
        )
    problem = (
        f"The ledger's tables have version {version}, this library wants version {SCHEMA_VERSION}."
    )
    if version > SCHEMA_VERSION:
        raise LedgerSchemaError(
            problem, remedy="Another process has a newer library: install that one here, too."
        )
    if _path(version) is None:
        raise LedgerSchemaError(problem, remedy="There is no way from one to the other.")
    raise LedgerSchemaError(
        problem,
        remedy="Stop the workers, then run `taskguard ledger upgrade` (--sql prints what it does).",
    )


def statements_from(version: int, *, kind: str, to: int | None = None) -> list[str]:
    """The SQL of an upgrade, with the versions that it notes. Raises LedgerSchemaError: no path."""
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


def upgrade_statements(url: str, *, version: int = 1, to: int | None = None) -> list[str]:
    """The SQL that makes tables of `version` those of a later one, one statement after the other.

    Args:
        url: a SQLAlchemy URL, of which only the kind of database matters; for a MariaDB it begins
            with `mariadb+pymysql://`.
        version: the version that the tables have; 1 by default.
        to: the version that they get; today's by default.

    Raises:
        LedgerSchemaError: there is no way from that version.
    """
    return statements_from(version, kind=sa.make_url(url).get_backend_name(), to=to)


def upgrade(database: Database) -> tuple[int, int]:
    """Run what is missing; asked again it does nothing. The versions before and after."""
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
    """The tables' version, if there is a way from it; else raises LedgerSchemaError."""
    with database.transaction(bounded=False) as db:
        version = _read(db)
    if version > SCHEMA_VERSION or _path(version) is None:
        expect_version(version)
    return version


def _read(db: sa.Connection) -> int:
    version: int | None = db.execute(sa.select(sa.func.max(SCHEMA.c.version))).scalar()
    if version is None:
        expect_version(None)
    return version or 0


def _path(version: int) -> tuple[Step, ...] | None:
    """The steps to this library's version; None if one is missing."""
    steps = {step.to: step for step in STEPS}
    wanted = range(version + 1, SCHEMA_VERSION + 1)
    return tuple(steps[to] for to in wanted) if all(to in steps for to in wanted) else None
