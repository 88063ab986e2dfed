"""All promises hold on databases and roles whose default level is not READ COMMITTED."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from support.guarded_shop import GuardedShop, NotingQueue, write
from support.needs import need
from support.pgbouncer import PgBouncer
from support.threads import at_once
from support.waiting import wait_until
from taskguard.run.guard import Guard
from taskguard_sandbox.servers import Postgres

SNAPSHOTS = ["repeatable read", "serializable"]


def use(url: str, level: str) -> None:
    """Make it the database's default for all new connections."""
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    name = sa.make_url(url).database
    with engine.connect() as db:
        db.exec_driver_sql(f"alter database {name} set default_transaction_isolation = '{level}'")
    engine.dispose()


@pytest.fixture(params=SNAPSHOTS)
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["url", "engine"])
def shop(request: pytest.FixtureRequest, level: str, pg_url: str, make_shop: Any) -> GuardedShop:
    """Return a shop on the ledger's own connections, and one on the user's Engine."""
    use(pg_url, level)
    engine = sa.create_engine(pg_url) if request.param == "engine" else None
    made: GuardedShop = make_shop(pg_url, engine)
    return made


def test_a_body_longer_than_a_renewal_is_done(shop: GuardedShop) -> None:
    """A renewal by the watchdog causes no serialization failure of a long body, which runs once."""
    runs: list[int] = []

    @shop.tg.guarded(key="order:<n>", ttl_s=6.0)
    def ship(n: int, guard: Guard) -> None:
        runs.append(1)
        with guard.transaction() as db:
            write(db)
            wait_until(lambda: "renewed" in shop.happened)

    ship(1)
    assert (len(runs), shop.effects, shop.states) == (1, ["x"], ["DONE"])


def test_the_ledgers_own_transactions_see_the_newest_rows(
    level: str, pg_url: str, make_shop: Any
) -> None:
    """The ledger's own transactions set their isolation level, and so read the newest rows."""
    use(pg_url, level)
    shop = make_shop(pg_url)
    levels: list[str] = []

    def body(guard: Guard) -> None:
        with guard.transaction() as db:
            levels.append(db.exec_driver_sql("show transaction isolation level").scalar_one())

    shop.deliver(body)
    database = shop.ledger._database
    with database.transaction() as db:
        levels.append(db.exec_driver_sql("show transaction isolation level").scalar_one())
    alone = database.ask("select current_setting('transaction_isolation')", {})
    assert [*levels, alone[0][0]] == ["read committed"] * 3


def test_no_plain_call_is_lost(shop: GuardedShop) -> None:
    """A plain call is not lost, because no queue would repeat it."""

    @shop.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> None:
        with guard.transaction():
            pass

    def call(caller: int) -> None:
        for number in range(12):
            ship(100 * caller + number)

    at_once(6, call)
    assert shop.states == ["DONE"] * 72


@pytest.mark.debian
def test_behind_a_pooler_each_statement_says_its_level(
    level: str, postgres: Postgres, pg_url: str, make_shop: Any
) -> None:
    """Behind a pooler each statement sets its level, because there is no session to set it in."""
    need(PgBouncer)
    use(pg_url, level)
    with PgBouncer(postgres.port) as pooler:
        shop = make_shop(pg_url, pg_url.replace(f":{postgres.port}/", f":{pooler.port}/"))
        shop.deliver(lambda guard: None, NotingQueue())
        alone = shop.ledger._database.ask("select current_setting('transaction_isolation')", {})
        assert alone[0][0] == "read committed"
        assert shop.states == ["DONE"]
