"""Bodies whose transaction the database ends each time: deferred a few times, then FAILED."""

from __future__ import annotations

import time
from typing import Any

import pytest

import taskguard
from support.guarded_shop import GuardedShop, write
from taskguard.errors import TransactionFailedError, TransactionRetryError
from taskguard.ledger.sql import SqlLedger
from taskguard.model.delivery import Completed, Deferred
from taskguard.run.guard import Guard

ASK_AGAIN = "do $$ begin raise exception sqlstate '40001'; end $$"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses, because no other transaction writes here."""
    monkeypatch.setattr("taskguard.run.runner._LONGEST_PAUSE_S", 0.01)


def never(guard: Guard) -> None:
    with guard.transaction() as db:
        write(db)
        db.exec_driver_sql(ASK_AGAIN)


def test_a_work_whose_transaction_never_commits_is_failed(pg: GuardedShop) -> None:
    """After too many rounds the work is FAILED, and the record and the queue get the reason."""
    for deferrals in range(3):
        assert isinstance(pg.deliver(never, deferrals=deferrals), Deferred)
        assert pg.states == ["NEW"]
    with pytest.raises(TransactionFailedError, match=r"(?s)4 deliveries in a row.*work requeue"):
        pg.deliver(never, deferrals=3)
    assert (pg.effects, pg.states) == ([], ["FAILED"])
    view = pg.ledger.view("ship order:1")
    assert view is not None
    assert "TransactionRetryError" in (view.error or "")


def test_the_count_begins_anew_with_the_queues_own_retry(pg: GuardedShop) -> None:
    """A retry of the queue resets the count. If it commits, the work is DONE."""
    for deferrals in range(3):
        pg.deliver(never, deferrals=deferrals)
    with pytest.raises(TransactionFailedError):
        pg.deliver(never, deferrals=3)
    for deferrals in range(4, 7):
        assert isinstance(pg.deliver(never, deferrals=deferrals), Deferred)

    def ship(guard: Guard) -> None:
        with guard.transaction() as db:
            write(db)

    assert isinstance(pg.deliver(ship, deferrals=7), Completed)
    assert (pg.effects, pg.states) == (["x"], ["DONE"])


def test_a_body_that_idles_in_its_transaction_hears_of_the_limit(
    pg_url: str, make_shop: Any
) -> None:
    """The error of a body that idles in its transaction names the timeout."""
    shop = make_shop(pg_url)
    ledger = SqlLedger(pg_url, idle_in_transaction_s=0.2)
    shop.tg.close()
    shop.tg = taskguard.connect(locks=None, ledger=ledger)
    runs: list[int] = []

    def idle(guard: Guard) -> None:
        runs.append(1)
        with guard.transaction() as db:
            write(db)
            time.sleep(0.5)

    for deferrals in range(3):
        assert isinstance(shop.deliver(idle, deferrals=deferrals), Deferred)
    with pytest.raises(TransactionFailedError, match=r"idles for 0\.2 s"):
        shop.deliver(idle, deferrals=3)
    assert (shop.effects, shop.states, len(runs)) == ([], ["FAILED"], 16)
    ledger.close()


def test_a_plain_call_gets_an_error_each_time(pg: GuardedShop) -> None:
    """A plain call gets the error each time, because no queue could defer it."""

    @pg.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> None:
        never(guard)

    for _ in range(6):
        with pytest.raises(TransactionRetryError):
            ship(1)
    assert pg.states == ["NEW"]
