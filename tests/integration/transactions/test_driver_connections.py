"""`guard.transaction(connection)` on plain connections of psycopg and sqlite3."""

from __future__ import annotations

import signal
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from psycopg.rows import dict_row

from support.claims import overtake
from support.guarded_shop import GuardedShop, NotingQueue
from support.proxy import Mode, Proxy
from taskguard.errors import StaleTokenError, TransactionUsageError
from taskguard.run.guard import Guard

INSERT = "insert into effects values ('x')"


def connect(url: str, **options: Any) -> Any:
    """Connect as a program without SQLAlchemy does."""
    if url.startswith("sqlite"):
        return sqlite3.connect(sa.make_url(url).database or "", timeout=30, **options)
    return psycopg.connect(url.replace("+psycopg", ""), **options)


@pytest.fixture(params=["pg_url", "sqlite_url"])
def url(request: pytest.FixtureRequest) -> str:
    """Return a URL of a kind whose driver connections may be lent."""
    return str(request.getfixturevalue(request.param))


@pytest.fixture
def on(url: str, shop: GuardedShop) -> Iterator[Any]:
    del shop  # made first: its tables
    made = connect(url)
    yield made
    made.close()


def in_transaction(on: Any) -> bool:
    return bool(
        on.in_transaction if isinstance(on, sqlite3.Connection) else on.info.transaction_status
    )


def test_effects_and_done_commit_together(shop: GuardedShop, on: Any) -> None:
    """Effects and DONE commit together on a plain connection, which can be used afterwards."""

    def body(guard: Guard) -> None:
        with guard.transaction(on) as given:
            assert given is on
            on.execute(INSERT)
            assert shop.effects == [] or shop.engine.dialect.name == "sqlite"
            guard.result = "shipped"

    for _ in range(2):
        outcome: Any = shop.deliver(body)
        assert outcome.value == "shipped"
    assert (shop.effects, shop.states) == (["x"], ["DONE"])
    assert not in_transaction(on)
    on.execute(INSERT)
    on.commit()
    assert shop.effects == ["x", "x"]


def test_a_part_commits_with_its_progress(shop: GuardedShop, on: Any) -> None:
    """`checkpoint()` commits a part with its progress, and the rest commits with DONE."""

    def body(guard: Guard) -> None:
        with guard.checkpoint(1, on):
            on.execute(INSERT)
        with guard.transaction(on):
            on.execute(INSERT)

    shop.deliver(body)
    assert (shop.effects, shop.states) == (["x", "x"], ["DONE"])


def test_a_body_that_fails_writes_nothing(shop: GuardedShop, on: Any) -> None:
    """The connection is rolled back."""

    def body(guard: Guard) -> None:
        with guard.transaction(on):
            on.execute(INSERT)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        shop.deliver(body)
    assert (shop.effects, shop.states, in_transaction(on)) == ([], ["FAILED"], False)


def test_a_holder_that_was_overtaken_writes_nothing(shop: GuardedShop, on: Any) -> None:
    """Its effects are rolled back with its DONE."""

    def body(guard: Guard) -> None:
        is_sqlite = shop.engine.dialect.name == "sqlite"  # one writer at a time
        if is_sqlite:
            overtake(shop)
        with pytest.raises(StaleTokenError), guard.transaction(on):
            on.execute(INSERT)
            overtake(shop)

    shop.deliver(body, NotingQueue())
    assert (shop.effects, shop.states, in_transaction(on)) == ([], ["PROCESSING"], False)


ENDS: dict[str, Callable[[Any], Any]] = {
    "commit": lambda on: on.commit(),
    "rollback": lambda on: on.rollback(),
    "a statement": lambda on: on.execute("commit"),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_body_that_ends_the_transaction_gets_an_error(
    shop: GuardedShop, on: Any, end: str, goes_on: bool
) -> None:
    """After the body has ended the transaction, nothing is written, and the work is not DONE."""

    def body(guard: Guard) -> None:
        with guard.transaction(on):
            ENDS[end](on)
            if goes_on:
                on.execute("insert into effects values ('after')")

    with pytest.raises(TransactionUsageError, match="was ended"):
        shop.deliver(body)
    assert (shop.effects, shop.states) == ([], ["FAILED"])


def test_one_that_has_begun_is_refused(shop: GuardedShop, on: Any) -> None:
    """A connection with an open transaction is refused, because its earlier writes would commit
    with this DONE."""

    def body(guard: Guard) -> None:
        on.execute(INSERT)
        with guard.transaction(on):
            pass

    with pytest.raises(TransactionUsageError, match="has begun"):
        shop.deliver(body)
    assert in_transaction(on)  # the transaction belongs to its owner


def test_one_of_another_database_is_refused(
    shop: GuardedShop, tmp_path: Any, postgres: Any
) -> None:
    """A connection to another database is refused, because the two could not commit together."""
    if shop.engine.dialect.name == "sqlite":
        other = sqlite3.connect(tmp_path / "other.sqlite")
    else:
        other = connect(postgres.create_database("other_than_the_ledgers"))
    shop.refuses(other, "not of the ledger's database")
    other.close()


def test_one_of_another_kind_is_refused(pg_url: str) -> None:
    """A connection of sqlite3 is refused by a ledger on PostgreSQL."""
    shop, other = GuardedShop(pg_url), sqlite3.connect(":memory:")
    shop.refuses(other, "not of the ledger's database")
    other.close()
    shop.close()


def test_one_that_commits_each_statement_is_refused(pg_url: str) -> None:
    """A connection with autocommit is refused."""
    shop, on = GuardedShop(pg_url), connect(pg_url, autocommit=True)
    shop.refuses(on, "commits each statement")
    on.close()
    shop.close()


def test_rows_of_the_users_own_kind_stay_theirs(shop: GuardedShop, on: Any) -> None:
    """A row factory of the user's applies in the body, and not to the ledger's statements."""
    on.row_factory = sqlite3.Row if isinstance(on, sqlite3.Connection) else dict_row

    def body(guard: Guard) -> int:
        with guard.transaction(on):
            return int(on.execute("select 7 as seven").fetchone()["seven"])

    outcome: Any = shop.deliver(body)
    assert (outcome.value, shop.states) == (7, ["DONE"])


class TookTooLongError(Exception):
    """The exception of a queue's time limit."""


def test_a_time_limit_in_a_statement_comes_through(pg_url: str) -> None:
    """A time limit in a statement reaches the body. Nothing is written, and the unusable connection
    is closed."""
    shop = GuardedShop(pg_url)
    on = connect(pg_url)

    def interrupt(_signal: int, _frame: Any) -> None:
        raise TookTooLongError

    def body(guard: Guard) -> None:
        with guard.transaction(on):
            on.execute(INSERT)
            signal.setitimer(signal.ITIMER_REAL, 1.0)
            on.execute("select pg_sleep(60)")

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(TookTooLongError):
            shop.deliver(body)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert (shop.effects, shop.states, on.closed) == ([], ["FAILED"], True)
    shop.close()


def test_a_commit_without_an_answer_is_resolved(postgres: Any, pg_url: str) -> None:
    """If COMMIT gets no answer, the ledger's own connection finds that it is DONE, and the body
    does not run again."""
    shop = GuardedShop(pg_url)
    with Proxy(postgres.port) as proxy:
        on = connect(pg_url.replace(f":{postgres.port}/", f":{proxy.port}/"))

        def body(guard: Guard) -> None:
            with guard.transaction(on):
                on.execute(INSERT)
                proxy.lose_reply_to(b"COMMIT", then=Mode.CUT)

        shop.deliver(body)
        on.close()
    assert (shop.effects, shop.states) == (["x"], ["DONE"])
    shop.close()
