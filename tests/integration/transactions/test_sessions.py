"""The next body on a connection does not meet the settings that the last one left in its
session."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from support.guarded_shop import GuardedShop, write
from support.waiting import wait_until
from taskguard.errors import TaskguardError
from taskguard.run.guard import Guard

ON_POSTGRESQL = {
    "read-only": "set default_transaction_read_only = on",
    "after a comment": "/* mine */ SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
    "by a function": "select set_config('default_transaction_read_only', 'on', false)",
    "by a block": "do $$ begin set default_transaction_read_only = on; end $$",
    "search_path": "set search_path to nowhere",
    "a time-out": "set statement_timeout = 1",
    "another role": "set role nobody_else",
    "another user": "set session authorization nobody_else",
    "a temporary table": "create temporary table effects (item text)",
    "one that was selected": "select 'x' as item into temp effects",
    "a statement by name": "prepare mine as select 1",
    "after another": "select 1; set search_path to nowhere",
}
ON_MYSQL = {
    "read-only": "set session transaction read only",
    "autocommit": "set autocommit = 1",
    "in capitals": "SET @@SESSION.sql_mode = 'ANSI_QUOTES,NO_BACKSLASH_ESCAPES,STRICT_ALL_TABLES'",
    "isolation": "set session transaction isolation level serializable",
    "a temporary table": "create temporary table effects (item text)",
    "another database": "use information_schema",
}
ON_SQLITE = {
    "read-only": "pragma query_only = on",
    "a temporary table": "create temp table effects (item text)",
}
SERVERS = {
    "pg_url": ON_POSTGRESQL,
    "mariadb_url": ON_MYSQL,
    "mysql_url": ON_MYSQL,
    "sqlite_url": ON_SQLITE,
}
BY: dict[str, Callable[..., Any]] = {
    "SQLAlchemy": lambda db, statement: db.exec_driver_sql(statement),
    "the driver": lambda db, statement: db.connection.cursor().execute(statement),
}


def ship(shop: GuardedShop, order: int, leave: Callable[[Any], Any] = lambda db: None) -> None:
    """Write one effect, and run `leave` in the same transaction."""

    @shop.tg.guarded(key="order:<order>")
    def body(order: int, guard: Guard) -> None:
        with guard.transaction() as db:
            write(db, str(order))
            leave(db)

    body(order)


CASES = [
    pytest.param(url, statement, id=f"{url}-{name}")
    for url, statements in SERVERS.items()
    for name, statement in statements.items()
]


@pytest.mark.parametrize(("database", "statement"), CASES)
def test_what_a_body_sets_is_gone(
    request: pytest.FixtureRequest, make_shop: Any, database: str, statement: str
) -> None:
    """A body's settings do not affect later bodies on that connection."""
    shop = make_shop(request.getfixturevalue(database))
    if database == "pg_url":
        with shop.engine.begin() as db:
            db.exec_driver_sql(
                "do $$ begin if not exists (select from pg_roles where rolname = 'nobody_else') "
                "then create role nobody_else; end if; end $$"
            )
            db.exec_driver_sql(
                "grant select, insert, update on all tables in schema public to nobody_else"
            )
            db.exec_driver_sql("grant usage on schema public to nobody_else")
            db.exec_driver_sql("revoke insert on effects from nobody_else")
    order = 0
    for by in BY.values():
        # The setting may refuse its own completion.
        with contextlib.suppress(TaskguardError, sa.exc.DBAPIError):
            ship(shop, order, functools.partial(by, statement=statement))
        for _ in range(3):
            order += 1
            ship(shop, order)
            assert str(order) in shop.effects
        order += 1


@pytest.mark.parametrize("database", ["mariadb_url", "sqlite_url"])
def test_a_driver_that_commits_each_statement_is_not_used_again(
    request: pytest.FixtureRequest, make_shop: Any, database: str
) -> None:
    """If a body turns on autocommit past SQLAlchemy, its connection is not used again."""
    shop = make_shop(request.getfixturevalue(database))

    def leave(db: Any) -> None:
        driver = db.connection.driver_connection
        if database == "sqlite_url":
            driver.isolation_level = None
        else:
            driver.autocommit(True)

    with contextlib.suppress(TaskguardError):
        ship(shop, 1, leave)
    ship(shop, 2)
    ship(shop, 3)
    assert {"2", "3"} <= set(shop.effects)


def test_a_connection_in_pipeline_mode_is_not_used_again(pg: GuardedShop) -> None:
    """If a body leaves a connection of psycopg in pipeline mode, the connection is not used
    again."""
    left: list[Any] = []

    @pg.tg.guarded(key="order:<order>")
    def ship(order: int, guard: Guard) -> None:
        with guard.transaction() as db:
            write(db, str(order))
            if order == 1:
                left.append(db.connection.dbapi_connection.pipeline())
                left[0].__enter__()

    for order in range(1, 5):
        ship(order)
    assert pg.effects == ["1", "2", "3", "4"]


def test_advisory_locks_are_let_go_when_the_body_ends(pg: GuardedShop) -> None:
    """A body's advisory locks end with it, and not with its pooled connection."""

    def held() -> int:
        with pg.engine.connect() as db:
            locks = "select count(*) from pg_locks where locktype = 'advisory'"
            return int(db.exec_driver_sql(locks).scalar_one())

    ship(pg, 1, lambda db: db.exec_driver_sql("select pg_advisory_lock(5)"))
    assert held() == 0

    def lock_and_fail(db: Any) -> None:
        db.exec_driver_sql("select pg_advisory_lock(6)")
        raise LookupError

    with pytest.raises(LookupError):
        ship(pg, 2, lock_and_fail)
    assert held() == 0


@pytest.mark.parametrize("database", ["mariadb_url", "mysql_url"])
def test_named_locks_are_let_go_when_the_body_ends(
    request: pytest.FixtureRequest, make_shop: Any, database: str
) -> None:
    """Named locks of a session end with the body, as PostgreSQL's advisory locks do."""
    shop = make_shop(request.getfixturevalue(database))
    ship(shop, 1, lambda db: db.exec_driver_sql("select get_lock('mine', 1)"))

    def free() -> bool:
        with shop.engine.connect() as db:
            return bool(db.exec_driver_sql("select is_free_lock('mine')").scalar_one())

    wait_until(free)


def session_of(db: Any) -> int:
    return int(db.exec_driver_sql("select pg_backend_pid()").scalar_one())


def test_a_session_that_is_not_changed_is_used_again(pg: GuardedShop) -> None:
    """A session that a body did not change, or has reset, is used again."""
    seen: list[int] = []

    def leave(db: Any) -> None:
        db.exec_driver_sql("set local statement_timeout = '50s'")
        db.exec_driver_sql("update effects set item = item")
        db.connection.cursor().execute(psycopg.sql.SQL("select 1"))
        seen.append(session_of(db))

    def change(db: Any) -> None:
        db.exec_driver_sql("set timezone to 'Asia/Tokyo'")
        seen.append(session_of(db))

    for order, what in enumerate([leave, leave, change, leave, leave]):
        ship(pg, order, what)
    assert len(set(seen)) == 1


@pytest.mark.parametrize("database", SERVERS)
def test_bodies_that_change_nothing_have_one_connection(
    request: pytest.FixtureRequest, make_shop: Any, database: str
) -> None:
    """On each database, bodies that change nothing share one connection."""
    shop = make_shop(request.getfixturevalue(database))
    seen: list[Any] = []
    for order in range(4):
        ship(shop, order, lambda db: seen.append(db.connection.driver_connection))
    assert len(set(map(id, seen))) == 1


def test_what_was_set_when_it_was_opened_is_set_again(pg_url: str, make_shop: Any) -> None:
    """After a session was reset, the isolation level of single statements is set again."""
    shop = make_shop(pg_url)
    name = sa.make_url(pg_url).database
    with shop.engine.begin() as db:
        db.exec_driver_sql(
            f"alter database {name} set default_transaction_isolation = 'serializable'"
        )
    shop.ledger.close()
    levels: list[str] = []

    def change(db: Any) -> None:
        levels.append(db.exec_driver_sql("show default_transaction_isolation").scalar_one())
        db.exec_driver_sql("set timezone to 'Asia/Tokyo'")

    ship(shop, 1, change)
    ship(shop, 2, change)
    assert levels == ["read committed"] * 2


def test_a_session_of_the_users_that_became_read_only_is_closed(
    pg_url: str, make_shop: Any
) -> None:
    """A session of the user's Engine that became read-only is closed. Its other settings stay."""
    engine = sa.create_engine(pg_url, pool_size=1, max_overflow=0)
    shop = make_shop(pg_url, engine)
    zones: list[str] = []

    def zone(db: Any) -> None:
        zones.append(db.exec_driver_sql("show timezone").scalar_one())

    def change(db: Any) -> None:
        db.exec_driver_sql("set timezone to 'Asia/Tokyo'")

    def forbid(db: Any) -> None:
        db.exec_driver_sql("set default_transaction_read_only = on")

    for order, leave in enumerate([change, zone, forbid, zone]):
        ship(shop, order, leave)
    assert zones[0] == "Asia/Tokyo"
    assert zones[1] != "Asia/Tokyo"
    assert len(shop.effects) == 4
