"""The ledger's statements through libpq: prepared in a session from their second use on."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from support.guarded_shop import GuardedShop, write
from taskguard.ledger.connections import deadlines
from taskguard.ledger.connections.database import Database
from taskguard.ledger.connections.faults import Faults
from taskguard.ledger.connections.libpq import Libpq, numbered
from taskguard.ledger.statements import postgresql
from taskguard.ledger.transactions import own
from taskguard.run.guard import Guard

VALUES = {"text": "ü%'\\ 🙂", "number": -(2**62), "yes": True, "no": False, "none": None}
STATEMENT = (
    "select %(text)s::text, %(number)s::bigint, %(yes)s::boolean, %(no)s::boolean, "
    "%(none)s::text, 100 %% 7, %(text)s::text"
)
ROW = (VALUES["text"], VALUES["number"], True, False, None, 2, VALUES["text"])
PREPARED = "select count(*) from pg_prepared_statements where name like 'taskguard%%'"


@pytest.fixture
def database(pg_url: str) -> Iterator[Database]:
    with closing(Database(pg_url, lock_timeout_s=1.0)) as made:
        yield made


def driver_of(database: Database) -> Any:
    """The one connection of the pool."""
    with database.engine.connect() as db:
        return db.connection.dbapi_connection


def count_prepared(database: Database) -> int:
    with database.engine.connect() as db:
        return int(db.exec_driver_sql(PREPARED).scalar_one())


def test_values_go_in_and_come_out_before_and_after_it_is_prepared(database: Database) -> None:
    """The first use is not prepared, later ones send only values: a worker for one job needs one
    round trip."""
    for prepared in (0, 1, 1):
        assert database.ask(STATEMENT, VALUES) == [ROW]
        assert count_prepared(database) == prepared


@pytest.mark.parametrize("value", [[1, 2], 1.5, b"bytes"])
def test_values_of_other_types_go_by_the_drivers_cursor(database: Database, value: Any) -> None:
    """Values that libpq cannot write go by the driver's cursor."""
    for _ in range(2):
        [[found]] = database.ask("select %(value)s is not null", {"value": value})
        assert found is True
    assert count_prepared(database) == 0


def test_an_error_is_that_of_the_driver_and_the_connection_goes_on(database: Database) -> None:
    """An error is the one that a cursor would raise, and leaves no transaction open."""
    wrong = "select %(number)s::bigint / 0"
    for _ in range(3):
        with pytest.raises(psycopg.errors.DivisionByZero, match="division by zero") as raised:
            database.ask(wrong, {"number": 1})
        assert raised.value.diag.sqlstate == "22012"
    driver = driver_of(database)
    assert database.ask(STATEMENT, VALUES) == [ROW]
    assert driver_of(database) is driver


def test_a_session_that_lost_what_was_prepared_answers_all_the_same(database: Database) -> None:
    """After a session lost its prepared statements, as behind an unknown pooler, nothing is
    prepared any more."""
    for _ in range(2):
        database.ask(STATEMENT, VALUES)
    driver_of(database).pgconn.exec_(b"deallocate all")  # psycopg does not notice it
    for _ in range(3):
        assert database.ask(STATEMENT, VALUES) == [ROW]
    assert count_prepared(database) == 0


def test_a_session_that_has_anothers_statement_of_the_name_answers(database: Database) -> None:
    """A session that a pooler shares may have another process's statement of this name. The query
    still succeeds."""
    database.ask(STATEMENT, VALUES)
    driver = driver_of(database)
    [name] = vars(driver)["taskguard_prepared"]
    driver.pgconn.exec_(b"prepare %b as select 1" % name)
    for _ in range(3):
        assert database.ask(STATEMENT, VALUES) == [ROW]


def test_a_body_ends_in_a_session_that_has_anothers_statement_of_the_name(
    pg_url: str, make_shop: Any
) -> None:
    """If the session has another process's statement of that name, the body runs once more. After
    that nothing is prepared."""
    shop = make_shop(pg_url)
    completing = numbered(postgresql._COMPLETE_OR_FAIL).prepared
    ran: list[int] = []

    @shop.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> None:
        ran.append(n)
        with guard.transaction() as db:
            write(db, f"{n}")
            if n == 0:  # before the statement is prepared, at its second use
                driver = db.connection.dbapi_connection
                driver.pgconn.exec_(b"prepare %b as select 1" % completing)

    for n in range(4):
        ship(n)
    assert ran == [0, 1, 1, 2, 3]
    assert Counter(shop.effects) == ONCE


def run(shop: GuardedShop, forget: Any) -> Counter[str]:
    """Run three work items with an effect each, and `forget(db)` in the second transaction."""

    @shop.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> None:
        with guard.transaction() as db:
            write(db, f"{n}")
            if n == 2 and guard.attempt == 1:
                forget(db)

    for n in range(4):
        ship(n)
    return Counter(shop.effects)


ONCE = Counter({"0": 1, "1": 1, "2": 1, "3": 1})


@pytest.mark.parametrize("statement", ["deallocate all", "discard all", "/* x */ DEALLOCATE ALL"])
def test_a_body_may_deallocate_all(pg_url: str, make_shop: Any, statement: str) -> None:
    """A body may deallocate all statements in its transaction, before the ledger's last
    statement."""
    if statement == "discard all":
        statement = "select 1; deallocate all"  # DISCARD ALL cannot be in a transaction
    shop = make_shop(pg_url)
    assert run(shop, lambda db: db.exec_driver_sql(statement)) == ONCE
    assert shop.states == ["DONE"] * 4


@pytest.mark.parametrize(
    "statement",
    [
        "discard temp",
        "discard plans",
        "discard sequences",
        "select '; deallocate this'",
        "savepoint s; deallocate nosuch; rollback to s",
    ],
)
def test_what_a_body_discarded_or_not_runs_no_other_body_twice(
    pg_url: str, make_shop: Any, statement: str
) -> None:
    """After a body discarded statements, the next body gets another session."""
    shop = make_shop(pg_url)
    ran: list[int] = []

    @shop.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> None:
        ran.append(n)
        with guard.transaction() as db:
            write(db, f"{n}")
            if n == 2:
                for each in statement.split("; ") if "savepoint" in statement else [statement]:
                    with contextlib.suppress(sa.exc.DBAPIError):
                        db.exec_driver_sql(each)

    for n in range(6):
        ship(n)
    assert ran == list(range(6))
    assert shop.ledger._database._libpq._prepares is True


@pytest.mark.parametrize("statement", ["execute nosuch", "prepare x as select 1"])
def test_a_bodys_own_prepared_statements_are_its_own(
    pg_url: str, make_shop: Any, statement: str
) -> None:
    """Errors of a body's own prepared statements are the body's errors: it runs once."""
    shop = make_shop(pg_url)
    ran: list[int] = []

    @shop.tg.guarded(key="order:1")
    def ship(guard: Guard) -> None:
        ran.append(1)
        with guard.transaction() as db:
            for _ in range(2):
                db.exec_driver_sql(statement)

    with pytest.raises(sa.exc.ProgrammingError, match="prepared statement"):
        ship()
    assert ran == [1]


def by_a_savepoint(db: sa.Connection) -> None:
    with db.begin_nested() as savepoint:
        savepoint.rollback()


def by_a_block_of_the_driver(db: sa.Connection) -> None:
    driver: Any = db.connection.dbapi_connection
    with driver.transaction():
        raise psycopg.Rollback


def by_drop(db: sa.Connection) -> None:
    db.exec_driver_sql("drop table if exists nothing")


def by_an_error(db: sa.Connection) -> None:
    raise ValueError


@pytest.mark.parametrize("end", [by_a_savepoint, by_a_block_of_the_driver, by_drop, by_an_error])
def test_a_rollback_costs_no_run(pg_url: str, make_shop: Any, end: Any) -> None:
    """psycopg deallocates all prepared statements at a rollback and after DROP, if it has prepared
    one itself. The ledger prepares its own again, and no body runs once more for that."""
    shop = make_shop(pg_url)
    ran: list[int] = []

    @shop.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> None:
        ran.append(n)
        with guard.transaction() as db:
            write(db, f"{n}")
            if n == 8 and guard.attempt == 1:
                end(db)

    for n in range(8):  # psycopg prepares an INSERT at its sixth use
        ship(n)
    with contextlib.suppress(ValueError):
        ship(8)
    for n in range(8, 12):
        ship(n)
    assert ran == [*range(8), 8, *([8] if end is by_an_error else []), *range(9, 12)]
    assert Counter(shop.effects) == dict.fromkeys(map(str, range(12)), 1)
    assert shop.ledger._database._libpq._prepares is True


def test_a_text_with_nul_is_refused_and_not_cut_off(database: Database) -> None:
    """A text with NUL is refused, because libpq would send only the part before it."""
    for _ in range(3):
        with pytest.raises(psycopg.DataError, match="NUL"):
            database.ask("select %(text)s::text", {"text": "m\0one"})


def test_a_table_that_was_changed_meanwhile_is_asked_anew(database: Database) -> None:
    """If a table's columns changed after a statement was prepared, the statement is sent again."""
    with database.engine.connect() as db:
        db.exec_driver_sql("create table changing (id integer)")
        db.exec_driver_sql("insert into changing values (1)")
    for _ in range(3):
        assert database.ask("select id from changing", {}) == [(1,)]
    with database.engine.connect() as db:
        db.exec_driver_sql("alter table changing alter id type text")
    for _ in range(3):
        assert database.ask("select id from changing", {}) == [("1",)]


def test_a_second_interrupt_leaves_no_answer_to_others(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first interrupt hits while an answer is awaited, the second while taskguard handles the
    first. No answer is left."""
    for _ in range(3):
        database.ask(STATEMENT, VALUES)

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Libpq, "_rows", interrupt)
        patched.setattr(Faults, "explain", interrupt)
        with pytest.raises(KeyboardInterrupt):
            database.ask("select pg_sleep(0.1)", {})
    for _ in range(3):
        assert database.ask(STATEMENT, VALUES) == [ROW]
    assert database.pools.ledgers.engine.pool.checkedout() == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("second", [False, True])
def test_an_interrupt_while_begin_is_on_its_way_leaves_no_answer_to_others(
    make_shop: Any, pg_url: str, monkeypatch: pytest.MonkeyPatch, second: bool
) -> None:
    """If BEGIN was sent and its answer not read, the next body gets another connection.

    That holds even if a second interrupt hits while taskguard handles the first.
    """
    shop = make_shop(pg_url)

    @shop.tg.guarded(key="order:<order>")
    def ship(order: int, guard: Guard) -> None:
        with guard.transaction() as db:
            write(db, f"order {order}")

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    ship(0)
    with monkeypatch.context() as patched:
        patched.setattr(own, "BodySession", interrupt)
        if second:
            patched.setattr(Faults, "explain", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ship(1)
    for order in range(2, 5):
        ship(order)
    assert shop.effects == [f"order {order}" for order in (0, 2, 3, 4)]


def test_without_a_thread_for_deadlines_no_connection_is_lost(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process at its limit of threads says so, and has as many connections as before.

    A list is no value of libpq's: its statement goes by a cursor, which a thread has to watch.
    """

    def start(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(deadlines, "_watch", deadlines._Watch())
        patched.setattr(deadlines, "start_thread", start)
        for _ in range(30):
            with pytest.raises(RuntimeError, match="thread"):
                database.ask("select %(several)s::int[]", {"several": [1]})
        assert database.ask(STATEMENT, VALUES) == [ROW], "no thread is needed for the others"
        assert not deadlines._watch._open
    assert database.pools.ledgers.engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    assert database.ask(STATEMENT, VALUES) == [ROW]


def test_a_transaction_in_a_session_that_lost_it_is_run_again(pg_url: str, make_shop: Any) -> None:
    """If a session lost its prepared statements in a body, nothing is committed, and the next
    attempt has one effect."""
    shop = make_shop(pg_url)

    def forget(db: sa.Connection) -> None:
        driver: Any = db.connection.dbapi_connection
        driver.pgconn.exec_(b"deallocate all")

    assert run(shop, forget) == ONCE
    assert shop.states == ["DONE"] * 4


def test_an_engine_of_the_users_own_keeps_its_setting_of_prepares(
    pg_url: str, make_shop: Any
) -> None:
    """If psycopg is set not to prepare, because of a pooler, no statement is prepared."""
    engine = sa.create_engine(pg_url, connect_args={"prepare_threshold": None})
    shop = make_shop(pg_url, engine)
    assert run(shop, lambda db: None) == ONCE
    with engine.connect() as db:
        assert db.exec_driver_sql("select count(*) from pg_prepared_statements").scalar() == 0
