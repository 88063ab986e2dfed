"""The database's processes are frozen: connections stay, and no answer comes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa

from support.guarded_shop import GuardedShop, NotingQueue, write
from support.needs import need
from support.waiting import patience_s, wait_until
from taskguard.errors import LeaseLostError, LedgerUnavailableError
from taskguard.run.guard import Guard
from taskguard_sandbox.servers import MariaDB, Postgres

pytestmark = pytest.mark.once

TTL_S = 5.0


@pytest.fixture(params=[Postgres, pytest.param(MariaDB, marks=pytest.mark.debian)])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start a server of the test's own, which it freezes."""
    need(request.param)
    monkeypatch.setenv("SSL_CERT_FILE", os.devnull)
    with request.param() as made:
        try:
            yield made
        finally:
            made.resume()


def url_of(server: Any) -> str:
    if isinstance(server, MariaDB):
        return str(server.create_database("shop"))
    server.create_database("shop")
    return str(server.url_of("shop"))


@pytest.mark.parametrize("own", [True, False])
def test_a_lease_is_lost_by_the_local_clock(server: Any, make_shop: Any, own: bool) -> None:
    """If the database freezes, a lease is lost when it has expired by the local clock, and not when
    its renewal gets an answer."""
    url = url_of(server)
    shop: GuardedShop = make_shop(url, None if own else sa.create_engine(url))
    lost_after_s: list[float] = []

    @shop.tg.guarded(key="order:1", ttl_s=TTL_S)
    def outlast(guard: Guard) -> None:
        wait_until(lambda: "renewed" in shop.happened)
        server.pause()
        frozen_at_s = time.monotonic()
        assert guard.lost.wait(patience_s())
        lost_after_s.append(time.monotonic() - frozen_at_s)
        with pytest.raises(LeaseLostError):
            guard.check()
        server.resume()

    outlast()
    assert lost_after_s[0] < 4 * TTL_S
    assert "lost" in shop.happened


def test_a_claim_fails_within_seconds(server: Any, make_shop: Any) -> None:
    """A claim on a frozen database raises within seconds, and its body does not run.

    That holds on an open connection and on a new one, and for a read.
    """
    shop: GuardedShop = make_shop(url_of(server))

    @shop.tg.guarded(key="order:<order>")
    def ship(order: int, guard: Guard) -> None:
        with guard.transaction() as db:
            write(db, str(order))

    ship(1)
    server.pause()
    asks = (lambda: ship(2), lambda: ship(3), lambda: shop.ledger.view("anything"))
    requested_at_s = time.monotonic()
    with ThreadPoolExecutor(len(asks)) as threads:
        for asked in [threads.submit(ask) for ask in asks]:
            with pytest.raises(LedgerUnavailableError):
                asked.result()
    # One answer, one connection, and a slow machine; without a limit none would ever come.
    assert time.monotonic() - requested_at_s < 60.0
    server.resume()
    wait_until(lambda: tried(lambda: ship(4)))
    assert shop.effects == ["1", "4"]


def tried(function: Callable[[], Any]) -> bool:
    try:
        function()
    except LedgerUnavailableError:
        return False
    return True


def test_a_deferral_is_published_all_the_same(server: Any, make_shop: Any) -> None:
    """If the database freezes, a delivery is still deferred."""
    shop: GuardedShop = make_shop(url_of(server))
    shop.deliver(lambda guard: None)
    server.pause()
    requested_at_s = time.monotonic()
    queue = NotingQueue()
    shop.deliver(lambda guard: None, queue)
    assert queue.deferrals == [1]
    assert time.monotonic() - requested_at_s < 40.0
