"""Leaving `with tg.lock()` after its lease was lost: an error, unless another one is on its way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import redis
import sqlalchemy as sa

import taskguard
from support.clock import FakeClock
from support.waiting import wait_until
from taskguard import TaskGuard
from taskguard.errors import LeaseLostError
from taskguard.events import Event
from taskguard.locks.memory import MemoryLocks

LOCK = "taskguard:{a}"


class House:
    """Locks, with or without a ledger, and what can be done to them."""

    def __init__(self, redis_url: str, ledger: str | None) -> None:
        self.client = redis.Redis.from_url(redis_url)
        self.url = ledger
        self.events: list[Event] = []
        self.tg: TaskGuard = taskguard.connect(
            locks=redis_url, ledger=ledger, listeners=(self.events.append,)
        )
        made = self.tg.runner.ledger
        if made is not None:
            made.create_schema()

    def take_away(self) -> None:
        """Somebody else has it now."""
        self.client.set(LOCK, "another/m")
        if self.url is not None:
            engine = sa.create_engine(self.url)
            with engine.begin() as db:
                db.execute(sa.text("update taskguard_keys set fence = fence + 1, owner = 'x/m'"))
            engine.dispose()

    def lost(self) -> list[Any]:
        return [event for event in self.events if event.name == "lost"]

    def close(self) -> None:
        self.tg.close()
        self.client.close()


@pytest.fixture(params=["locks alone", "with a ledger"])
def house(request: pytest.FixtureRequest, redis_url: str, sqlite_url: str) -> Iterator[House]:
    made = House(redis_url, sqlite_url if request.param == "with a ledger" else None)
    yield made
    made.close()


def test_a_lock_that_was_taken_over_is_an_error_at_its_end(house: House) -> None:
    """As redis-py's LockNotOwnedError; and an event. The other's is left alone."""
    with pytest.raises(LeaseLostError, match=r"lease\.check") as caught, house.tg.lock("a"):
        house.take_away()
    assert caught.value.key == "a"
    (event,) = house.lost()
    assert (event.key, event.reason) == ("a", "another holder took it over")
    assert house.client.get(LOCK) == b"another/m"


def test_the_blocks_own_error_is_told_instead(house: House) -> None:
    """The event tells of the lost lease all the same."""
    with pytest.raises(ZeroDivisionError), house.tg.lock("a"):
        house.take_away()
        raise ZeroDivisionError
    assert len(house.lost()) == 1


def test_a_lock_that_stood_is_none(house: House) -> None:
    """Nor is one that a server's loss of memory left to the ledger."""
    with house.tg.lock("a"):
        if house.url is not None:
            house.client.flushdb()
    assert house.lost() == []


def test_a_lease_that_ran_out_unseen_is_an_error(house: House) -> None:
    """The process was paused: its watchdog had no time to see it."""
    clock = FakeClock()
    tg = taskguard.connect(
        locks=MemoryLocks(clock), ledger=None, clock=clock, listeners=(house.events.append,)
    )
    with pytest.raises(LeaseLostError, match="ran out"), tg.lock("a", ttl_s=30) as lease:
        clock.advance(31)
        assert lease.remaining_s == 0
    assert len(house.lost()) == 1
    tg.close()


def test_a_lost_lease_is_told_once(house: House) -> None:
    """By the watchdog, long before the end."""
    with suppress(LeaseLostError), house.tg.lock("a", ttl_s=0.3) as lease:
        house.take_away()
        assert lease.lost.wait(60)
    wait_until(house.lost, message="it is told, by one of the two")
    assert len(house.lost()) == 1
