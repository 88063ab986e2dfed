"""Check a lock table and its database: read the facts once, then judge them.

Guarantees: reads by statements that change nothing, so that they also work on a standby and for a
user without rights. It skips what the server does not tell this user.
"""

from __future__ import annotations

from collections.abc import Iterator

import sqlalchemy as sa

from taskguard.findings import Finding
from taskguard.ledger.connections.database import Database
from taskguard.lock_table import findings
from taskguard.values import value

__all__ = ["check"]

_POSTGRESQL = """\
select
    pg_is_in_recovery() or current_setting('transaction_read_only') = 'on' as read_only,
    t.oid is not null and to_regproc('taskguard_locks_take_1') is not null as is_there,
    coalesce(
        has_table_privilege(t.oid, 'select') and has_table_privilege(t.oid, 'insert')
            and has_table_privilege(t.oid, 'update') and has_table_privilege(t.oid, 'delete'),
        false
    ) as allowed,
    coalesce((select relpersistence = 'u' from pg_class where oid = t.oid), false) as unlogged
from (select to_regclass('taskguard_locks')::oid) t (oid)"""
_MYSQL = """\
select
    @@global.read_only as read_only,
    (
        select count(*) from information_schema.tables
        where table_schema = database() and table_name = 'taskguard_locks'
    ) as is_there"""
# Each uses one privilege and changes nothing.
_TRIALS_OF_MYSQL = (
    "select count(*) from taskguard_locks where 1 = 0",
    "insert into taskguard_locks select * from taskguard_locks where 1 = 0",
    "update taskguard_locks set owner = owner where 1 = 0",
    "delete from taskguard_locks where 1 = 0",
)
_DENIED = {1142, 1143}


@value
class LockTableFacts:
    """The table and its database.

    Attributes:
        read_only: whether the database accepts no writes.
        is_there: whether the table and its functions exist.
        allowed: whether this user has all privileges that locks need.
        unlogged: whether a crash empties the table.
    """

    read_only: bool
    is_there: bool
    allowed: bool = True
    unlogged: bool = False


def check(database: Database) -> list[Finding]:
    """Return what is wrong."""
    read = _read_postgresql if database.engine.dialect.name == "postgresql" else _read_mysql
    with database.transaction() as db:
        facts = read(db)
    return list(judge(facts, where=f"the locks in {database.place}"))


def judge(facts: LockTableFacts, *, where: str) -> Iterator[Finding]:
    """Judge the table and its database."""
    if facts.read_only:
        yield findings.LOCKS_READ_ONLY.at(where)
    if not facts.is_there:
        yield findings.LOCKS_TABLE_MISSING.at(where)
        return
    if not facts.allowed:
        yield findings.LOCKS_PRIVILEGES.at(where)
    if facts.unlogged:
        yield findings.LOCKS_UNLOGGED.at(where)


def _read_postgresql(db: sa.Connection) -> LockTableFacts:
    return LockTableFacts(*db.exec_driver_sql(_POSTGRESQL).one())


def _read_mysql(db: sa.Connection) -> LockTableFacts:
    read_only, is_there = map(bool, db.exec_driver_sql(_MYSQL).one())
    return LockTableFacts(read_only, is_there, allowed=not is_there or _may_write(db))


def _may_write(db: sa.Connection) -> bool:
    try:
        for statement in _TRIALS_OF_MYSQL:
            db.exec_driver_sql(statement)
    except sa.exc.DBAPIError as error:
        if error.orig is None or error.orig.args[0] not in _DENIED:
            raise
        return False
    return True
