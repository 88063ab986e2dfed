"""Bodies that end the transaction past SQLAlchemy and go on: it is noticed, and DONE is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from support.guarded_shop import GuardedShop, write
from taskguard.errors import TransactionUsageError
from taskguard.run.guard import Guard


def _script(db: Any) -> None:
    db.connection.dbapi_connection.executescript("insert into effects values ('script');")


def _driver_commits(db: Any) -> None:
    db.connection.dbapi_connection.commit()


def _says(statement: str) -> Callable[[Any], Any]:
    return lambda db: db.connection.dbapi_connection.execute(statement)


WAYS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "executescript": ("sqlite_url", _script),
    "commit of sqlite3": ("sqlite_url", _driver_commits),
    "commit and begin of sqlite3": (
        "sqlite_url",
        lambda db: [db.connection.dbapi_connection.execute(each) for each in ("commit", "begin")],
    ),
    "COMMIT; BEGIN": ("pg_url", _says("commit; begin")),
    "ROLLBACK; BEGIN": ("pg_url", _says("rollback; begin")),
    "COMMIT AND CHAIN": ("pg_url", _says("commit and chain")),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["own", "engine"])
def shop(request: pytest.FixtureRequest, way: str, make_shop: Any) -> Iterator[GuardedShop]:
    """On connections of the ledger's own, and on an Engine of the user's."""
    url = request.getfixturevalue(WAYS[way][0])
    engine = sa.create_engine(url)
    made: GuardedShop = make_shop(url, engine if request.param == "engine" else None)
    yield made
    engine.dispose()


@pytest.mark.parametrize("keys", [1, 2])
def test_a_raw_end_of_the_transaction_is_noticed(shop: GuardedShop, way: str, keys: int) -> None:
    """A raw COMMIT leaves earlier writes without DONE, which cannot be undone. The error
    says so."""

    @shop.tg.guarded(key=["order:<n>", "account:<n>"][:keys])
    def ship(n: int, guard: Guard) -> None:
        with guard.transaction() as db:
            write(db, "before")
            WAYS[way][1](db)
            write(db, "after")

    with pytest.raises(TransactionUsageError, match="was ended or left"):
        ship(1)
    assert "after" not in shop.effects or way.startswith(("executescript", "commit of sqlite3"))
    assert shop.states == ["FAILED"]


def test_a_raw_end_before_a_checkpoint_is_noticed(shop: GuardedShop, way: str) -> None:
    """A raw end before a checkpoint is noticed, because its progress would count the earlier writes
    as done."""

    @shop.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> None:
        with guard.checkpoint("half") as db:
            write(db, "before")
            WAYS[way][1](db)

    with pytest.raises(TransactionUsageError, match="was ended or left"):
        ship(1)
    assert shop.states == ["FAILED"]


@pytest.mark.parametrize("lent", ["session", "psycopg"])
@pytest.mark.parametrize("statement", ["commit; begin", "commit and chain"])
def test_it_is_noticed_on_the_users_own(
    pg: GuardedShop, pg_url: str, lent: str, statement: str
) -> None:
    """A raw COMMIT is noticed on a lent session, and on a plain connection of psycopg."""
    engine = sa.create_engine(pg_url)
    plain = pg_url.replace("postgresql+psycopg", "postgresql")

    @pg.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> None:
        if lent == "session":
            with Session(engine) as session, guard.transaction(session):
                connection: Any = session.connection().connection.dbapi_connection
                connection.execute(statement)
        else:
            with closing(psycopg.connect(plain)) as on, guard.transaction(on):
                on.execute(statement)

    with pytest.raises(TransactionUsageError, match="was ended"):
        ship(1)
    assert pg.states == ["FAILED"]
    engine.dispose()


def test_an_sqlite_body_on_the_users_engine_is_still_one_transaction(
    sqlite_url: str, make_shop: Any
) -> None:
    """The savepoint that detects a COMMIT does not commit: an error rolls back the whole body."""
    shop = make_shop(sqlite_url, sa.create_engine(sqlite_url))

    @shop.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> None:
        with guard.transaction() as db:
            write(db)
            if n == 1:
                raise LookupError

    with pytest.raises(LookupError):
        ship(1)
    assert shop.effects == []
    ship(2)
    assert (shop.effects, shop.states) == (["x"], ["DONE", "FAILED"])
