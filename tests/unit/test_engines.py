"""Engines: what is listened to on them."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from taskguard.ledger.connections.listeners import listen_once
from taskguard.ledger.sql import SqlLedger


def test_every_engine_is_listened_to() -> None:
    """Also one that lies where another lay: SQLAlchemy's register may still have that one."""
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
    """However often it is asked for; each listener for itself."""
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
    """By the ledger that was on it, and listened to it."""
    engine = sa.create_engine("postgresql+psycopg://nobody@localhost/nothing")
    ledger = SqlLedger(engine)
    assert ledger._database.pools.renewals is not engine
    kept = weakref.ref(engine)
    ledger.close()
    del engine, ledger
    gc.collect()
    assert kept() is None


def test_another_way_to_the_same_database_leaves_no_listeners(tmp_path: Path) -> None:
    """Each guarded transaction on a session of the user's own takes one."""
    database = SqlLedger(f"sqlite:///{tmp_path / 'ledger'}")._database
    engine = sa.create_engine("sqlite://")
    for _ in range(3):
        assert database.elsewhere(engine).pools is database.pools
    assert len(engine.dispatch.engine_disposed) == 0
