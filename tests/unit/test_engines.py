"""Engines: what is listened to on them, and the pool of those that are made here."""

from __future__ import annotations

import gc
import itertools
import sqlite3
import sys
import threading
import types
import weakref
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from support.threads import at_once
from taskguard.ledger.connections.database import Database
from taskguard.ledger.connections.listeners import listen_once
from taskguard.ledger.connections.pools import Lifo
from taskguard.ledger.sql import SqlLedger


def test_every_engine_is_listened_to() -> None:
    """Each Engine gets the listeners, even if it has the address of a former one."""
    begun: list[int] = []

    def listener(_: sa.Connection) -> None:
        begun.append(1)

    kept: list[Any] = []  # as a traceback keeps parts of an Engine that is gone
    for _ in range(300):
        engine = sa.create_engine("sqlite://")
        listen_once(engine, "begin", listener)
        with engine.connect() as connection, connection.begin():
            kept.append(connection.dispatch)
        engine.dispose()
        del connection, engine
    assert len(begun) == 300


def test_it_is_listened_once() -> None:
    """An Engine gets each listener once, however often that is requested."""
    engine = sa.create_engine("sqlite://")
    begun: list[str] = []

    def one(_: sa.Connection) -> None:
        begun.append("one")

    def other(_: sa.Connection) -> None:
        begun.append("other")

    for listener in (one, other, one):
        listen_once(engine, "begin", listener)
    with engine.begin():
        pass
    assert begun == ["one", "other"]
    engine.dispose()


def test_an_engine_is_not_kept() -> None:
    """A closed ledger does not keep the Engine on which it listened."""
    engine = sa.create_engine("postgresql+psycopg://nobody@localhost/nothing")
    ledger = SqlLedger(engine)
    assert ledger._database.pools.renewals is not engine
    kept = weakref.ref(engine)
    ledger.close()
    del engine, ledger
    gc.collect()
    assert kept() is None


def test_another_way_to_the_same_database_leaves_no_listeners(tmp_path: Path) -> None:
    """Another Engine of the same database gets no listeners of the ledger."""
    database = SqlLedger(f"sqlite:///{tmp_path / 'ledger'}")._database
    engine = sa.create_engine("sqlite://")
    for _ in range(3):
        assert database.elsewhere(engine).pools is database.pools
    assert len(engine.dispatch.engine_disposed) == 0


class _Connection:
    """A driver's connection, which knows whether it is open."""

    def __init__(self) -> None:
        self.is_open = True

    def close(self) -> None:
        self.is_open = False

    def rollback(self) -> None: ...


def test_the_pool_gives_what_came_back_last_and_keeps_as_many_as_it_is_for() -> None:
    """If no connection is idle, a new one is made. A surplus one is closed when it comes back."""
    pool = Lifo(_Connection, pool_size=2)
    taken = [pool.take() for _ in range(3)]
    connections = [entry.dbapi_connection for entry in taken]
    for entry in taken:
        pool.put(entry)
    assert [each.is_open for each in connections] == [True, True, False]
    assert pool.take() is taken[1]
    with closing(pool.connect()) as by_engine:
        assert by_engine.dbapi_connection is connections[0]
    pool.dispose()
    assert [each.is_open for each in connections] == [False, True, False]
    pool.put(taken[1])
    assert not connections[1].is_open, "it came back after the pool's end"


def test_a_pool_that_is_made_anew_has_a_limit_no_more_than_the_first() -> None:
    """A recreated pool has no limit either: its users count their connections, so it never
    blocks."""
    pool = Lifo(_Connection, pool_size=1, max_overflow=0).recreate()
    taken = [pool.take() for _ in range(3)]
    assert len({id(entry.dbapi_connection) for entry in taken}) == 3


@pytest.mark.parametrize(
    "url",
    ["postgresql+psycopg://h/d", "postgresql+psycopg2://h/d", "mysql+pymysql://h/d"],
)
def test_no_engine_for_a_url_lets_anybody_wait(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pool of an Engine for a URL blocks, whatever its driver: connections are counted
    before."""
    unknown: Any = types.ModuleType("psycopg2")
    unknown.__version__, unknown.paramstyle, unknown.Error = "2.9.9", "pyformat", Exception
    unknown.extensions = unknown.extras = unknown
    monkeypatch.setitem(sys.modules, "psycopg2", unknown)
    with closing(Database(url, lock_timeout_s=1.0)) as database:
        pool: Any = database.engine.pool
        assert pool._max_overflow == -1


@pytest.mark.parametrize("by_engine", [False, True])
def test_no_two_have_the_same_connection(by_engine: bool) -> None:
    """Eight threads take and give back without a pause, by the pool or as an Engine does."""
    pool, doubles = Lifo(_Connection, pool_size=3), []
    holders: dict[int, int] = {}

    def use(_: int) -> None:
        me = threading.get_ident()
        for _ in itertools.repeat(None, 2_000):
            entry: Any = pool.connect() if by_engine else pool.take()
            number = id(entry.dbapi_connection)
            if holders.setdefault(number, me) != me:
                doubles.append(number)
            del holders[number]
            entry.close() if by_engine else pool.put(entry)

    at_once(8, use)
    assert not doubles
    assert pool.checkedin() <= 3 + 8


def test_a_connection_that_is_used_after_close_is_closed(tmp_path: Path) -> None:
    """A thread may use the database while it is closed, or a moment later."""
    database = Database(f"sqlite:///{tmp_path / 'a.sqlite'}", lock_timeout_s=1.0)
    with database.transaction() as db:
        database.close()
        during: Any = db.connection.dbapi_connection
        db.execute(sa.select(1))
    with database.transaction() as db:
        later: Any = db.connection.dbapi_connection
        db.execute(sa.select(1))
    for each in (during, later):
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            each.execute("select 1")
