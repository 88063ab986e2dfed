"""Sessions of a database under test that hold locks: how to find and end them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import sqlalchemy as sa

from support.lock_servers import LockServer, connect_by_a_lock
from support.proxy import Mode, Proxy
from support.waiting import wait_until
from taskguard.advisory_locks import AdvisoryLocks
from taskguard.locks.base import LockProvider

# Queries for all locks of a server; MariaDB's plugin has to be installed.
_STANDING = {
    "postgresql+psycopg": "select classid, objid from pg_locks join pg_database d"
    " on d.oid = database where locktype = 'advisory' and d.datname = current_database()",
    "mariadb+pymysql": "select table_schema from information_schema.metadata_lock_info"
    " where lock_type = 'User lock'",
    "mysql+pymysql": "select object_name from performance_schema.metadata_locks"
    " where object_type = 'USER LEVEL LOCK'",
}


def execute(url: str, statement: str) -> list[Any]:
    """Execute a statement past everything that is tested."""
    engine = sa.create_engine(url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as db:
        result = db.exec_driver_sql(statement)
        return list(result.all()) if result.returns_rows else []


def advisory_url(url: str) -> str:
    """Return the URL of advisory locks for a database's URL."""
    kind, _, rest = url.partition("+")
    return f"{kind}+advisory://{rest.partition('://')[2]}"


def kill(url: str, session: int) -> None:
    """Kill the session as an administrator does. When this returns, the session and its locks are
    gone."""
    if url.startswith("postgresql"):
        execute(url, f"select pg_terminate_backend({session})")
        left = f"select pid from pg_stat_activity where pid = {session}"
    else:
        with contextlib.suppress(sa.exc.OperationalError):  # the session has ended already
            execute(url, f"kill {session}")
        left = f"select id from information_schema.processlist where id = {session}"
    wait_until(lambda: not execute(url, left))


def session_of(locks: LockProvider) -> int:
    """Return the server's number of the session."""
    assert isinstance(locks, AdvisoryLocks)
    assert locks._current is not None
    return locks._current.opened.number


@contextmanager
def advisory_kind(url: str) -> Iterator[LockServer]:
    """Describe it for the contract suite. Its providers are closed at the end."""
    made: list[AdvisoryLocks] = []

    def connect() -> AdvisoryLocks:
        made.append(AdvisoryLocks(advisory_url(url), answer_s=10.0))
        return made[-1]

    def sessions() -> list[int]:
        current = [each._current for each in made]
        return [each.opened.number for each in current if each is not None and not each.is_lost]

    def forget() -> None:
        for session in sessions():
            kill(url, session)

    def leftovers() -> list[str]:
        return sorted(str(row) for row in execute(url, _STANDING[sa.make_url(url).drivername]))

    if url.startswith("mariadb"):
        execute(url, "install plugin if not exists metadata_lock_info soname 'metadata_lock_info'")
    try:
        yield LockServer(
            connect,
            forget,
            leftovers,
            advisory_url(url),
            lambda: _deafened(url),
            lambda locks: kill(url, session_of(locks)),
        )
    finally:
        for each in made:
            each.close()


@contextmanager
def _deafened(url: str) -> Iterator[LockProvider]:
    behind = sa.make_url(advisory_url(url))
    assert behind.port is not None
    with (
        Proxy(behind.port) as proxy,
        closing(AdvisoryLocks(behind.set(port=proxy.port), answer_s=0.3)) as locks,
    ):
        connect_by_a_lock(locks)
        proxy.mode = Mode.SWALLOW
        yield locks
