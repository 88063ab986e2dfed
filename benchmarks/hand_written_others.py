"""The code of `hand_written.py` on MariaDB by PyMySQL, and on SQLite by sqlite3."""

from __future__ import annotations

import itertools
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pymysql
from sqlalchemy.engine import make_url

from benchmarks.hand_written import EFFECTS, ByHand

if TYPE_CHECKING:
    from typing import LiteralString

_MARIADB_SCHEMA = """
create table if not exists hand_works (
    id varchar(768) collate utf8mb4_nopad_bin primary key, state text not null,
    fence bigint not null, owner text not null, lease_until bigint not null
)
"""
_NOW = "timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))"
_MARIADB_CLAIM = f"""
insert ignore into hand_works
values (%(id)s, 'PROCESSING', {_NOW}, %(owner)s, {_NOW} + 30000000)
returning fence
"""
# For work that is on record, and whose holder is gone.
_MARIADB_TAKE = f"""
update hand_works set
    state = 'PROCESSING', fence = greatest(fence + 1, {_NOW}), owner = %(owner)s,
    lease_until = {_NOW} + 30000000
where id = %(id)s and (state = 'NEW' or (state = 'PROCESSING' and lease_until < {_NOW}))
"""
_MARIADB_TAKEN = "select fence from hand_works where id = %(id)s and owner = %(owner)s"
_MARIADB_COMPLETE = """
update hand_works set state = 'DONE'
where id = %(id)s and state = 'PROCESSING' and fence = %(fence)s and owner = %(owner)s
"""

_SQLITE_SCHEMA = """
create table if not exists hand_works (
    id text primary key, state text not null, fence integer not null,
    owner text not null, lease_until integer not null
)
"""
_SQLITE_CLAIM = """
insert into hand_works as w (id, state, fence, owner, lease_until)
values (:id, 'PROCESSING', :now, :owner, :now + 30000000)
on conflict (id) do update set
    state = 'PROCESSING', fence = max(w.fence + 1, excluded.fence),
    owner = excluded.owner, lease_until = excluded.lease_until
where w.state = 'NEW' or (w.state = 'PROCESSING' and w.lease_until < :now)
returning fence
"""
_SQLITE_COMPLETE = """
update hand_works set state = 'DONE'
where id = :id and state = 'PROCESSING' and fence = :fence and owner = :owner
"""


class MariaDBByHand(ByHand):
    """MariaDB by PyMySQL."""

    claim = _MARIADB_CLAIM
    complete = _MARIADB_COMPLETE

    def __init__(self, redis_url: str, url: str, *, create: bool = True) -> None:
        super().__init__(redis_url)
        to = make_url(url)
        assert to.host is not None
        self.db = pymysql.connect(
            host=to.host,
            port=to.port or 0,
            user=to.username,
            database=to.database,
            client_flag=pymysql.constants.CLIENT.FOUND_ROWS,
            init_command="set session tx_isolation = 'READ-COMMITTED'",
            autocommit=True,
        )
        for each in (_MARIADB_SCHEMA, EFFECTS) if create else ():
            self.execute(each)

    def execute(self, statement: LiteralString, values: dict[str, Any] | None = None) -> Any:
        cursor = self.db.cursor()
        cursor.execute(statement, values)
        return cursor

    def first(self, statement: LiteralString, values: dict[str, Any]) -> Any:
        found = self.execute(statement, values).fetchone()
        if found is None and self.execute(_MARIADB_TAKE, values).rowcount == 1:
            found = self.execute(_MARIADB_TAKEN, values).fetchone()
        return found

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self.db.begin()
        try:
            yield
        except BaseException:
            self.db.rollback()
            raise
        self.db.commit()

    def close(self) -> None:
        self.db.close()
        self.redis.close()


class SQLiteByHand(ByHand):
    """SQLite by sqlite3, with the ledger's settings: a write-ahead log, each commit flushed."""

    claim = _SQLITE_CLAIM
    complete = _SQLITE_COMPLETE

    def __init__(self, redis_url: str, url: str, *, create: bool = True) -> None:
        super().__init__(redis_url)
        path = make_url(url).database
        assert path is not None
        self.db = sqlite3.connect(path, isolation_level=None, timeout=60.0)
        settings = ("pragma journal_mode=wal", "pragma synchronous=full")
        for each in itertools.chain(settings, (_SQLITE_SCHEMA, EFFECTS) if create else ()):
            self.execute(each)

    def execute(self, statement: LiteralString, values: dict[str, Any] | None = None) -> Any:
        return self.db.execute(statement, values or {})

    def first(self, statement: LiteralString, values: dict[str, Any]) -> Any:
        found = self.execute(statement, values | {"now": time.time_ns() // 1000}).fetchall()
        return found[0] if found else None  # all are fetched, so that the statement commits

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self.db.execute("begin immediate")
        try:
            yield
        except BaseException:
            self.db.execute("rollback")
            raise
        self.db.execute("commit")

    def close(self) -> None:
        self.db.close()
        self.redis.close()
