"""Leaving `with tg.lock()` after its lease was lost raises an error, unless another error is raised
already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import redis
import sqlalchemy as sa

import taskguard
from support.clock import FakeClock
from support.waiting import patience_s, wait_until
from taskguard import TaskGuard
from taskguard.errors import LeaseLostError
from taskguard.events import Event
from taskguard.locks.memory import MemoryLocks

LOCK = "taskguard:{a}"


class LockRig:
    """Locks with or without a ledger, and faults for them."""

    def __init__(self, redis_url: str, ledger: str | None) -> None:
        self.client = redis.Redis.from_url(redis_url)
        self.url = ledger
        self.events: list[Event] = []
        self.tg: TaskGuard = taskguard.connect(
            locks=redis_url, ledger=ledger, listeners=(self.events.append,)
        )
        made = self.tg.ledger
        if made is not None:
            made.create_schema()

    def take_away(self) -> None:
        """Give the lock to another owner."""
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
def rig(request: pytest.FixtureRequest, redis_url: str, sqlite_url: str) -> Iterator[LockRig]:
    made = LockRig(redis_url, sqlite_url if request.param == "with a ledger" else None)
    yield made
    made.close()


def test_a_lock_that_was_taken_over_is_an_error_at_its_end(rig: LockRig) -> None:
    """A lock that was taken over raises at the end of its block, and causes an event. The other
    owner's lock stays."""
    with pytest.raises(LeaseLostError, match=r"lease\.check") as caught, rig.tg.lock("a"):
        rig.take_away()
    assert caught.value.key == "a"
    (event,) = rig.lost()
    assert (event.key, event.reason) == ("a", "another holder took it over")
    assert rig.client.get(LOCK) == b"another/m"


def test_the_blocks_own_error_is_raised_instead(rig: LockRig) -> None:
    """If the block raises its own error, the lost lease is reported by an event."""
    with pytest.raises(ZeroDivisionError), rig.tg.lock("a"):
        rig.take_away()
        raise ZeroDivisionError
    assert len(rig.lost()) == 1


def test_a_lock_that_stood_is_none(rig: LockRig) -> None:
    """A lock that was valid to its end raises nothing, even if the server lost its memory and the
    ledger has the lease."""
    with rig.tg.lock("a"):
        if rig.url is not None:
            rig.client.flushdb()
    assert rig.lost() == []


def test_a_lease_that_ran_out_unseen_is_an_error(rig: LockRig) -> None:
    """If the process was paused beyond its lease, the end of the block raises, although the
    watchdog did not notice."""
    clock = FakeClock()
    tg = taskguard.connect(
        locks=MemoryLocks(clock), ledger=None, clock=clock, listeners=(rig.events.append,)
    )
    with pytest.raises(LeaseLostError, match="it expired"), tg.lock("a", ttl_s=30) as lease:
        clock.advance(31)
        assert lease.remaining_s == 0
    assert len(rig.lost()) == 1
    tg.close()


def test_a_lost_lease_is_reported_once(rig: LockRig) -> None:
    """The watchdog reports a lost lease once, long before the end."""
    with suppress(LeaseLostError), rig.tg.lock("a", ttl_s=0.3) as lease:
        rig.take_away()
        assert lease.lost.wait(patience_s())
    wait_until(rig.lost, message="one of the two events")
    assert len(rig.lost()) == 1
