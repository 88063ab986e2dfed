"""The first host of a URL accepts connections and never answers; the next one grants leases."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest
import sqlalchemy as sa

import taskguard
from support.waiting import wait_until
from taskguard.events import Acquired, Claimed, Event, Lost, Renewed
from taskguard.ledger.sql import SqlLedger
from taskguard.lock_table import TableLocks

# Psycopg's least timeout for each host.
CONNECT_S = 2.0


@pytest.fixture
def urls(pg_url: str) -> Iterator[str]:
    """Return a URL of two hosts, the first of which is silent, with tables at the second."""
    url = sa.make_url(pg_url)
    with closing(SqlLedger(pg_url)) as ledger, closing(TableLocks(pg_url)) as locks:
        ledger.create_schema()
        locks.create_table()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hosts = (f"127.0.0.1:{silent.getsockname()[1]}", f"{url.host}:{url.port}")
        both = url.set(host=None, port=None).update_query_dict({"host": hosts})
        yield both.render_as_string(hide_password=False)


@pytest.fixture(params=["ledger alone", "locks only"])
def tg(request: pytest.FixtureRequest, urls: str) -> Iterator[taskguard.TaskGuard]:
    locks, ledger = (None, urls) if request.param == "ledger alone" else (urls, None)
    made = taskguard.connect(locks=locks, ledger=ledger)
    yield made
    made.close()


def listened(tg: taskguard.TaskGuard) -> list[Event]:
    heard: list[Event] = []
    tg.events.listen(heard.append)
    return heard


def test_a_short_lease_is_kept(tg: taskguard.TaskGuard) -> None:
    """Neither the first connection nor the one for renewals takes all of a lease of five
    seconds."""
    heard = listened(tg)
    with tg.lock("a", ttl_s=5.0) as lease:
        assert lease.remaining_s > 1.0
        wait_until(lambda: any(isinstance(each, Renewed) for each in heard))
        lease.check()
    assert not [each for each in heard if isinstance(each, Lost)]


def test_a_lease_that_ran_out_on_its_way_is_asked_for_again(tg: taskguard.TaskGuard) -> None:
    """A lease that is shorter than a connection takes is requested again, and is not lost."""
    heard = listened(tg)
    with tg.lock("a", ttl_s=CONNECT_S - 0.1) as lease:
        assert lease.remaining_s > 0.0
        wait_until(lambda: any(isinstance(each, Renewed) for each in heard))
        lease.check()
    granted = [each for each in heard if isinstance(each, Acquired | Claimed)]
    assert len(granted) == 1
    assert not [each for each in heard if isinstance(each, Lost)]


def test_the_urls_own_time_out_is_heeded(urls: str) -> None:
    """A longer timeout in the URL makes connections slower, and the grant is still
    requested again."""
    tg = taskguard.connect(locks=None, ledger=f"{urls}&connect_timeout=3")
    with tg.lock("a", ttl_s=2.5) as lease:
        lease.check()
    tg.close()
