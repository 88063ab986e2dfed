"""Connections that break in the block, and bodies that catch the first error of that."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from support.claims import end_leases
from support.guarded_shop import GuardedShop, NotingQueue, write
from taskguard.errors import TaskguardError, TransactionUsageError
from taskguard.model.delivery import Answered, Completed
from taskguard.run.guard import Guard

ENDERS = {
    "pg_url": ("select pg_backend_pid()", "select pg_terminate_backend({})"),
    "mariadb_url": ("select connection_id()", "kill {}"),
    "mysql_url": ("select connection_id()", "kill {}"),
}


@pytest.fixture(params=ENDERS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def shop(request: pytest.FixtureRequest, kind: str, make_shop: Any) -> GuardedShop:
    """Return a shop in a database whose server can end a connection."""
    return make_shop(request.getfixturevalue(kind))


def end_connection(shop: GuardedShop, kind: str, db: Any) -> None:
    """End the connection as an administrator, a failover or a timeout does."""
    who, end = ENDERS[kind]
    number = db.execute(sa.text(who)).scalar_one()
    with shop.engine.connect() as other:
        other.execute(sa.text(end.format(number)))


def caught(db: Any) -> None:
    with contextlib.suppress(sa.exc.DBAPIError):
        write(db, "lost")


def caught_in_a_savepoint(db: Any) -> None:
    try:
        with db.begin_nested():
            write(db, "lost")
    except sa.exc.SQLAlchemyError:
        pass


def caught_and_another_raised(db: Any) -> None:
    try:
        write(db, "lost")
    except sa.exc.DBAPIError as error:
        raise LookupError("the shop's own word for it") from error


WAYS: dict[str, Callable[[Any], None]] = {
    "caught": caught,
    "in a savepoint": caught_in_a_savepoint,
    "another raised": caught_and_another_raised,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_lost_connection_is_run_again_whatever_the_body_makes_of_it(
    shop: GuardedShop, kind: str, way: str
) -> None:
    """The body runs again: a later PendingRollbackError is not its own error."""
    runs: list[int] = []

    def body(guard: Guard) -> None:
        runs.append(1)
        with guard.transaction() as db:
            write(db, "before")
            if len(runs) == 1:
                end_connection(shop, kind, db)
                WAYS[way](db)
            write(db, "after")

    assert isinstance(shop.deliver(body), Completed)
    assert (len(runs), shop.effects, shop.states) == (2, ["after", "before"], ["DONE"])


def own_word(error: Exception) -> None:
    raise LookupError("the shop's own word for it") from error


def group(error: Exception) -> None:
    raise ExceptionGroup("several parts", [LookupError(), ExceptionGroup("nested", [error])])


def unrelated(_: Exception) -> None:
    """Fail with another error, as if the block had not failed."""
    {}["what the block should have found"]


ENDS: dict[str, Callable[[Exception], None]] = {
    "own word": own_word,
    "group": group,
    "unrelated": unrelated,
}


@contextlib.contextmanager
def failing(end: str) -> Iterator[None]:
    """Fail after the block with an error whose cause is the block's."""
    lost: Exception | None = None
    try:
        yield
    except TaskguardError as error:
        lost = error
    if lost is not None:
        ENDS[end](lost)


@pytest.mark.parametrize("end", ENDS)
def test_what_ended_the_block_speaks_however_the_body_ends(
    shop: GuardedShop, kind: str, end: str
) -> None:
    """If the database ended the block, the body runs again, even if it then fails by an error of
    its own."""
    runs: list[int] = []

    def body(guard: Guard) -> None:
        runs.append(1)
        with failing(end), guard.transaction() as db:
            if len(runs) == 1:
                end_connection(shop, kind, db)
            write(db)

    assert isinstance(shop.deliver(body), Completed)
    assert (len(runs), shop.effects, shop.states) == (2, ["x"], ["DONE"])


@pytest.mark.parametrize("end", ENDS)
def test_an_overtaken_body_is_answered_by_the_record_however_it_ends(
    pg: GuardedShop, end: str
) -> None:
    """If a newer holder is DONE, the delivery is answered, and is no failure."""

    def overtakes(guard: Guard) -> str:
        with guard.transaction() as db:
            write(db, "newer")
            guard.result = "by the newer one"
        return "by the newer one"

    def body(guard: Guard) -> None:
        end_leases(pg.engine)
        with ThreadPoolExecutor(1) as another:
            assert isinstance(another.submit(pg.deliver, overtakes).result(), Completed)
        with failing(end), guard.transaction() as db:
            write(db, "older")

    assert pg.deliver(body) == Answered("by the newer one")
    assert (pg.effects, pg.states) == (["newer"], ["DONE"])


def test_a_body_that_orders_its_queue_is_obeyed(pg: GuardedShop, pg_url: str) -> None:
    """Celery's Retry has sent a message already, so it is not replaced by the database's error."""

    class OrderError(Exception):
        pass

    def body(guard: Guard) -> None:
        try:
            with guard.transaction() as db:
                end_connection(pg, "pg_url", db)
                write(db)
        except TaskguardError as error:
            raise OrderError from error

    with pytest.raises(OrderError):
        pg.deliver(body, orders=(OrderError,))
    assert (pg.effects, pg.states) == ([], ["FAILED"])


def test_the_result_of_a_block_that_was_rolled_back_is_gone_with_it(pg: GuardedShop) -> None:
    """The next one commits what was set in itself, or before both."""

    def body(guard: Guard) -> None:
        guard.result = "before"
        with contextlib.suppress(LookupError), guard.transaction():
            guard.result = "rolled back"
            raise LookupError
        with guard.transaction() as db:
            write(db)

    assert pg.deliver(body) == Completed("before")


@pytest.mark.parametrize("lent", ["session", "psycopg"])
def test_a_lost_connection_of_the_users_own(pg: GuardedShop, pg_url: str, lent: str) -> None:
    """If a lent session or connection of psycopg breaks, the body runs again."""
    runs: list[int] = []
    engine = sa.create_engine(pg_url)
    plain = pg_url.replace("postgresql+psycopg", "postgresql")

    def lose(db: Any, execute: Callable[[str], Any]) -> None:
        pid = execute("select pg_backend_pid()").fetchone()[0]
        with pg.engine.connect() as other:
            other.execute(sa.text(f"select pg_terminate_backend({pid})"))
        with contextlib.suppress(Exception):
            execute("select 1")
        del db

    def body(guard: Guard) -> None:
        runs.append(1)
        with contextlib.ExitStack() as stack:
            on: Any
            if lent == "session":
                on = stack.enter_context(Session(engine))
                execute: Any = lambda text: on.execute(sa.text(text))  # noqa: E731
            else:
                on = stack.enter_context(contextlib.closing(psycopg.connect(plain)))
                execute = on.execute
            with guard.transaction(on):
                if len(runs) == 1:
                    lose(on, execute)
                execute("insert into effects values ('x')")

    assert isinstance(pg.deliver(body), Completed)
    assert (len(runs), pg.effects, pg.states) == (2, ["x"], ["DONE"])
    engine.dispose()


@pytest.mark.parametrize("sqlstate", ["40P01", "40001", "55P03"])
@pytest.mark.parametrize("fails_after", [True, False])
def test_a_swallowed_deadlock_is_run_again(
    pg: GuardedShop, sqlstate: str, fails_after: bool
) -> None:
    """If a body swallows an error after which PostgreSQL refuses the transaction, it runs again."""
    runs: list[int] = []

    def body(guard: Guard) -> None:
        runs.append(1)
        with guard.transaction() as db:
            if len(runs) == 1:
                with contextlib.suppress(sa.exc.DBAPIError):
                    db.exec_driver_sql(f"do $$ begin raise exception sqlstate '{sqlstate}'; end $$")
                if not fails_after:
                    return
            write(db)

    assert isinstance(pg.deliver(body), Completed)
    assert (len(runs), pg.effects, pg.states) == (2, ["x"], ["DONE"])


def test_a_deadlock_in_a_savepoint_is_the_bodys_to_mend(pg: GuardedShop) -> None:
    """After a deadlock in a savepoint the transaction goes on. A later error is the body's own."""

    def body(guard: Guard) -> None:
        with guard.transaction() as db:
            with contextlib.suppress(sa.exc.DBAPIError), db.begin_nested():
                db.exec_driver_sql("do $$ begin raise exception sqlstate '40P01'; end $$")
            write(db)
            raise LookupError

    with pytest.raises(LookupError):
        pg.deliver(body)
    assert (pg.effects, pg.states) == ([], ["FAILED"])


def test_a_swallowed_error_of_the_bodys_own_is_said(pg: GuardedShop) -> None:
    """If a body catches a failed statement without a savepoint, the error names that statement."""

    def body(guard: Guard) -> None:
        with guard.transaction() as db:
            write(db)
            with contextlib.suppress(sa.exc.DBAPIError):
                db.exec_driver_sql("select 1 / 0")

    with pytest.raises(TransactionUsageError, match=r"A statement .* failed"):
        pg.deliver(body)
    assert (pg.effects, pg.states) == ([], ["FAILED"])


# -- other connections --------------------------------------------------------------------------


def test_another_database_that_cannot_write_is_the_bodys_trouble(
    pg: GuardedShop, pg_url: str
) -> None:
    """If another database of the body cannot write, the work is FAILED, and the delivery is not
    deferred."""
    other = sa.create_engine(
        pg_url, connect_args={"options": "-c default_transaction_read_only=on"}
    )
    queue = NotingQueue()

    def body(guard: Guard) -> None:
        with guard.transaction(), other.begin() as elsewhere:
            write(elsewhere)

    with pytest.raises(sa.exc.DBAPIError, match="read-only"):
        pg.deliver(body, queue)
    assert (pg.states, queue.deferrals) == (["FAILED"], [])
    other.dispose()


@pytest.mark.parametrize(
    "statement",
    [
        "set transaction read only; delete from effects",
        "do $$ begin raise exception sqlstate '40P01'; end $$",
    ],
)
def test_another_connection_of_psycopg_is_the_bodys_trouble(
    pg: GuardedShop, pg_url: str, statement: str
) -> None:
    """An error of another connection of psycopg is the body's own."""
    plain = pg_url.replace("postgresql+psycopg", "postgresql")
    runs, queue = [], NotingQueue()

    def body(guard: Guard) -> None:
        runs.append(1)
        with guard.transaction(), psycopg.connect(plain) as elsewhere:
            elsewhere.execute(statement)

    with pytest.raises(psycopg.Error):
        pg.deliver(body, queue)
    assert (len(runs), pg.states, queue.deferrals) == (1, ["FAILED"], [])


# -- errors that break nothing --------------------------------------------------------------------


def test_a_statement_that_sqlite_does_not_understand_is_the_bodys(
    sqlite_url: str, make_shop: Any
) -> None:
    """A wrong statement on SQLite is the body's own error, and not an outage."""
    shop = make_shop(sqlite_url)
    runs, queue = [], NotingQueue()

    def body(guard: Guard) -> None:
        runs.append(1)
        with guard.transaction() as db:
            db.exec_driver_sql("selec 1")

    with pytest.raises(sa.exc.OperationalError):
        shop.deliver(body, queue)
    assert (len(runs), shop.states, queue.deferrals) == (1, ["FAILED"], [])


def test_a_statement_of_the_bodys_that_takes_too_long_is_the_bodys(pg: GuardedShop) -> None:
    """If a statement exceeds the body's statement_timeout, that is the body's own error."""
    runs, queue = [], NotingQueue()

    def body(guard: Guard) -> None:
        runs.append(1)
        with guard.transaction() as db:
            db.exec_driver_sql("set local statement_timeout = 50")
            db.exec_driver_sql("select pg_sleep(30)")

    with pytest.raises(sa.exc.OperationalError):
        pg.deliver(body, queue)
    assert (len(runs), pg.states, queue.deferrals) == (1, ["FAILED"], [])
