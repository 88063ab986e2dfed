"""Fault 17: the wall clock of a server jumps forward by a minute, or back by an hour.

Two deliveries may hold a key then, but only one commits, and fences still grow. A waiter learns the
remaining time of a lease, even if that seems to be an hour.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.clock_shim import Postgres, ServerClock, Valkey, server_clock, unavailable
from support.needs import missing, need
from support.rivals import Rivals, expect_one_effect
from taskguard import Guard
from taskguard.errors import KeyBusyError
from taskguard.locks.base import Granted, Held
from taskguard.locks.redis import RedisLocks
from taskguard.model.lease import new_owner

KEY = ("order:1",)
FORWARD_S, BACK_S = 60.0, -3600.0
JUMPS = pytest.mark.parametrize("jump_s", [FORWARD_S, BACK_S])
# Not renewed before the jump, unless the machine is frozen for long. It has ended after the jump.
TTL_S = 50.0


@pytest.fixture
def clock() -> Iterator[ServerClock]:
    missing(unavailable())
    with server_clock() as made:
        yield made


@pytest.fixture
def lock_server(clock: ServerClock) -> Iterator[Valkey]:
    need(Valkey)
    with Valkey(clock) as server:
        yield server


@pytest.fixture
def database(clock: ServerClock) -> Iterator[Postgres]:
    need(Postgres)
    with Postgres(clock, fsync="off") as server:
        yield server


def take(locks: RedisLocks, owner: Any = None) -> Any:
    return locks.acquire(KEY, owner or new_owner("m"), ttl_s=TTL_S, with_fence=True, wait_s=0.0)


class TestLockServer:
    @JUMPS
    def test_a_ledger_lets_one_of_them_in(
        self, lock_server: Valkey, make_rivals: Any, jump_s: float
    ) -> None:
        """After a jump forward the lock server gives the key away, and the ledger does not. After a
        jump back neither does."""
        rivals = make_rivals(locks=lock_server.url)
        expect_one_effect(rivals, lambda: lock_server.jump(jump_s))

    @JUMPS
    def test_fences_grow(self, lock_server: Valkey, jump_s: float) -> None:
        """After a jump forward there may be a second holder, after one back there is none. The next
        token is higher."""
        locks, owner = RedisLocks(lock_server.url), new_owner("first")
        first = take(locks, owner)
        lock_server.jump(jump_s)
        second = take(locks)
        assert isinstance(second, Granted if jump_s == FORWARD_S else Held)
        locks.release(KEY, owner)
        third = second if isinstance(second, Granted) else take(locks)
        assert third.fence > first.fence

    def test_a_far_deadline_is_overruled_and_reported(
        self, lock_server: Valkey, make_rivals: Any
    ) -> None:
        """If a holder vanished and the clock went back, the ledger knows no holder, and decides."""
        rivals = make_rivals(locks=lock_server.url)
        take(RedisLocks(lock_server.url))
        lock_server.jump(BACK_S)
        assert rivals.ship_too() == "second"
        (overruled,) = [event for event in rivals.second.events if event.name == "lock_overruled"]
        assert overruled.remaining_s > -BACK_S
        assert rivals.shipped() == ["second"]

    def test_a_far_deadline_of_a_live_holder_keeps_others_out(
        self, lock_server: Valkey, make_rivals: Any
    ) -> None:
        """A far deadline of a live holder counts, because the ledger knows the holder."""
        rivals = make_rivals(locks=lock_server.url)

        def during(guard: Guard) -> None:
            lock_server.jump(BACK_S)
            with pytest.raises(KeyBusyError) as caught:
                rivals.ship_too()
            assert caught.value.retry_after_s is not None
            assert caught.value.retry_after_s <= TTL_S

        assert rivals.ship(during, ttl_s=TTL_S) == "first"
        assert rivals.shipped() == ["first"]


class TestDatabase:
    @pytest.fixture
    def rivals(self, database: Postgres, make_rivals: Any) -> Rivals:
        made: Rivals = make_rivals(url=database.create_database("clocks"), locks=None)
        return made

    def test_forward_the_first_one_is_refused(self, database: Postgres, rivals: Rivals) -> None:
        """After a jump forward another delivery takes over and commits, and the first one's commit
        is refused."""

        def during(guard: Guard) -> None:
            database.jump(FORWARD_S)
            assert rivals.ship_too() == "second"

        assert rivals.ship(during, ttl_s=TTL_S) == "second"
        assert rivals.shipped() == ["second"]
        assert "takeover" in rivals.second.happened
        assert "stale_refused" in rivals.first.happened

    def test_back_no_rival_is_granted_and_fences_grow(
        self, database: Postgres, rivals: Rivals
    ) -> None:
        """After a jump back the lease ends with its body. Fences still grow."""
        fences: list[int] = []

        def during(guard: Guard) -> None:
            fences.append(guard.fence)
            database.jump(BACK_S)
            with pytest.raises(KeyBusyError) as caught:
                rivals.ship_too()
            assert caught.value.retry_after_s is not None
            assert caught.value.retry_after_s > -BACK_S

        assert rivals.ship(during, ttl_s=TTL_S) == "first"
        assert rivals.ship_too() == "first"
        assert rivals.shipped() == ["first"]
        for tg in (rivals.first.tg, rivals.second.tg):
            with tg.lock("order:1") as lease:
                fences.append(lease.fence)
        assert fences == sorted(set(fences))
