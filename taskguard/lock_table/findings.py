"""What is wrong with the database of a lock table, with the table, and with the way to it.

Guarantees: asks by statements that change nothing, so that a standby and a user without rights
are found, too. Does not say what the server does not tell this user.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from taskguard.findings import Finding, Level
from taskguard.ledger.connections.database import Database, driver_of

__all__ = ["findings", "is_in_galera", "is_pooled"]

_SHORT_S = 600.0

_ASK_POSTGRESQL = """\
select
    pg_is_in_recovery() or current_setting('transaction_read_only') = 'on' as read_only,
    t.oid is not null and to_regproc('taskguard_locks_take_1') is not null as there,
    has_table_privilege(t.oid, 'select') and has_table_privilege(t.oid, 'insert')
        and has_table_privilege(t.oid, 'update') and has_table_privilege(t.oid, 'delete')
        as allowed,
    (select relpersistence = 'u' from pg_class where oid = t.oid) as unlogged,
    (select setting::bigint / 1000.0 from pg_settings where name = 'idle_session_timeout')
        as idle_s
from (select to_regclass('taskguard_locks')::oid) t (oid)"""
_ASK_MYSQL = """\
select
    @@global.read_only as read_only,
    @@session.wait_timeout as idle_s,
    (
        select count(*) from information_schema.tables
        where table_schema = database() and table_name = 'taskguard_locks'
    ) as there"""
_IN_CLUSTER = "show variables like 'wsrep_on'"
# Uses each privilege, and changes nothing.
_TRY_MYSQL = (
    "select count(*) from taskguard_locks where 1 = 0",
    "insert into taskguard_locks select * from taskguard_locks where 1 = 0",
    "update taskguard_locks set owner = owner where 1 = 0",
    "delete from taskguard_locks where 1 = 0",
)


def findings(database: Database) -> list[Finding]:
    """All of it."""
    ask = _postgresql if database.engine.dialect.name == "postgresql" else _mysql
    with database.transaction() as db:
        return list(ask(db, f"the locks in {database.place}"))


def is_pooled(connection: Any) -> bool:
    """Whether a pooler gave psycopg's connection a session: its greeting had another number."""
    [pid] = connection.execute("select pg_backend_pid()").fetchone()
    return bool(pid != connection.info.backend_pid)


def is_in_galera(db: sa.Connection) -> bool:
    """Whether the server is a node of a Galera cluster."""
    found = db.exec_driver_sql(_IN_CLUSTER).first()
    return found is not None and bool(found[1] == "ON")


def _postgresql(db: sa.Connection, where: str) -> Iterator[Finding]:
    found = db.exec_driver_sql(_ASK_POSTGRESQL).one()
    if found.read_only:
        yield _read_only(where, "It is a standby, or read-only.")
    if not found.there:
        yield _missing(where)
    elif not found.allowed:
        yield _forbidden(where)
    if found.there and found.unlogged:
        yield Finding(
            "locks_unlogged",
            Level.NOTE,
            where,
            what="The table taskguard_locks is UNLOGGED.",
            why="A crash of the server empties it, which counts where there is no ledger.",
            mend="With a ledger all is well; without one: ALTER TABLE taskguard_locks SET LOGGED.",
        )
    if is_pooled(driver_of(db)):
        yield Finding(
            "locks_pooled",
            Level.NOTE,
            where,
            what="Its sessions are pooled, as by PgBouncer, so that LISTEN hears nothing.",
            why='Who waits for a key (busy="wait") looks for it up to four times a second.',
            mend="A URL past the pooler for the locks makes waiters hear of a release at once.",
        )
    if 0 < float(found.idle_s or 0) < _SHORT_S:
        yield _idle(where, "idle_session_timeout", float(found.idle_s))


def _mysql(db: sa.Connection, where: str) -> Iterator[Finding]:
    found = db.exec_driver_sql(_ASK_MYSQL).one()
    if found.read_only:
        yield _read_only(where, "It is read-only, as a replica is.")
    if not found.there:
        yield _missing(where)
    else:
        try:
            for statement in _TRY_MYSQL:
                db.exec_driver_sql(statement)
        except sa.exc.DBAPIError as error:
            if not _is_refused(error.orig):
                raise
            yield _forbidden(where)
    if is_in_galera(db):
        yield Finding(
            "locks_galera",
            Level.WARNING,
            where,
            what="It is a node of a Galera cluster.",
            why="Two nodes that take one key at once find out when they commit: one is refused "
            "and asks again, and each lock waits for all nodes.",
            mend="Send the locks of all workers to one node.",
        )
    if 0 < found.idle_s < _SHORT_S:
        yield _idle(where, "wait_timeout", float(found.idle_s))


def _is_refused(origin: Any) -> bool:
    return origin.args[:1] in [(1142,), (1143,)]


def _read_only(where: str, what: str) -> Finding:
    return Finding(
        "locks_read_only",
        Level.ERROR,
        where,
        what,
        why="No lock can be taken there.",
        mend="Give the URL of the primary.",
    )


def _missing(where: str) -> Finding:
    return Finding(
        "locks_table_missing",
        Level.ERROR,
        where,
        what="The table taskguard_locks, or a function of it, is not there.",
        why="No lock can be taken; with a ledger that decides alone, without one nothing runs.",
        mend="Run `taskguard locks create`.",
    )


def _forbidden(where: str) -> Finding:
    return Finding(
        "locks_privileges",
        Level.ERROR,
        where,
        what="Its user may not do all that locks need.",
        why="No lock can be taken; with a ledger that decides alone, without one nothing runs.",
        mend="GRANT SELECT, INSERT, UPDATE, DELETE ON taskguard_locks to it.",
    )


def _idle(where: str, setting: str, seconds: float) -> Finding:
    return Finding(
        "locks_idle_timeout",
        Level.NOTE,
        where,
        what=f"{setting} ends connections that are idle for {seconds:g} s.",
        why="The next lock connects anew, and who waits may hear late of a release.",
        mend=f"{setting} of {_SHORT_S:g} s or more, at least for the user of the locks.",
    )
