"""The lock server fails while a body runs: paused, full, forgetful, killed.

With a ledger there is one effect, and a rival is refused by the ledger. With locks only, fences
still grow, and a holder learns that its lease is over.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

import taskguard
from support.rivals import expect_one_effect, expect_work_beside_a_frozen_server
from support.waiting import wait_until
from taskguard.clock import SYSTEM_CLOCK
from taskguard.errors import LeaseLostError, LockServerUnavailableError
from taskguard.events import Event
from taskguard.locks.base import Granted, Held
from taskguard.locks.redis import RedisLocks
from taskguard.model.lease import new_owner
from taskguard_sandbox.servers import Valkey

KEY = ("order:1",)
LOCK = "taskguard:{order:1}"


@pytest.fixture
def server() -> Iterator[Valkey]:
    """A server that keeps nothing when it is killed."""
    with Valkey() as server:
        yield server


@pytest.fixture
def evicting() -> Iterator[Valkey]:
    """A tiny server that throws away what was not used for longest."""
    with Valkey(maxmemory="3mb", maxmemory_policy="allkeys-lru") as server:
        yield server


def impatient(server: Valkey, timeout_s: float = 0.3) -> RedisLocks:
    return RedisLocks(server.url, socket_timeout_s=timeout_s, connect_timeout_s=timeout_s)


def take(locks: RedisLocks, owner: Any = None, **options: Any) -> Any:
    options = {"ttl_s": 30.0, "with_fence": True, "wait_s": 0.0, **options}
    return locks.acquire(KEY, owner or new_owner("m"), **options)


def crowd_out(server: Valkey) -> None:
    """Write until neither the lock nor its fence is there any more."""
    with redis.Redis(port=server.port) as client:
        number = 0
        while client.exists(LOCK, f"{LOCK}:fence"):
            client.set(f"crowd:{number}", b"x" * 1000)
            number += 1


class TestPaused:
    """Fault 8."""

    def test_the_ledger_decides_and_work_goes_on(self, server: Valkey, make_rivals: Any) -> None:
        """If the server freezes, a rival is refused, and other work is done."""
        rivals = make_rivals(locks=lambda: impatient(server))
        expect_work_beside_a_frozen_server(rivals, server)

    def test_with_locks_only_the_deadline_stays_and_then_the_lease_is_lost(
        self, server: Valkey
    ) -> None:
        """If renewals get no answer, the lease is valid until its deadline, and not longer."""
        events: list[Event] = []
        locks = impatient(server, 1.0)
        tg = taskguard.connect(locks=locks, ledger=None, listeners=(events.append,))
        with (
            pytest.raises(LeaseLostError, match="before it was released"),
            tg.lock("order:1", ttl_s=9.0) as lease,
        ):
            server.pause()
            wait_until(lambda: "renewal_failed" in [event.name for event in events])
            deadline_s = lease.trusted_until_s
            wait_until(lease.lost.is_set)
            assert SYSTEM_CLOCK.monotonic_s() >= deadline_s == lease.trusted_until_s
            with pytest.raises(LeaseLostError):
                lease.check()
            server.resume()
        assert [event.name for event in events].count("lost") == 1
        patient = impatient(server, 10.0)
        wait_until(lambda: isinstance(take(patient), Granted))
        tg.close()


class TestEviction:
    """Fault 11."""

    def test_a_lock_that_was_thrown_away_stays_taken(
        self, evicting: Valkey, make_rivals: Any
    ) -> None:
        """If the server evicts a lock, the ledger's lease keeps the key."""
        expect_one_effect(make_rivals(locks=evicting.url), lambda: crowd_out(evicting))

    def test_fences_grow_over_it(self, evicting: Valkey) -> None:
        """If the server evicts a fence, the next one is still higher. The server's setting causes a
        warning."""
        locks = RedisLocks(evicting.url)
        before = take(locks)
        crowd_out(evicting)
        after = take(locks)
        assert isinstance(after, Granted)
        assert after.fence > before.fence
        assert any("allkeys-lru" in finding.what for finding in locks.check())


class TestFull:
    """Fault 12."""

    @pytest.fixture
    def full(self, server: Valkey) -> Valkey:
        """Return a server without free memory, which evicts nothing."""
        with redis.Redis(port=server.port) as client:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", "1")
        return server

    def test_locks_alone_fail_closed(self, full: Valkey) -> None:
        """With locks only, a full server grants no lease, and no body runs. The error names the
        reason."""
        ran: list[int] = []
        tg = taskguard.connect(locks=full.url, ledger=None)

        @tg.guarded(key="order:<order>")
        def ship(order: int) -> None:
            ran.append(order)

        with pytest.raises(LockServerUnavailableError, match="maxmemory"):
            ship(1)
        assert ran == []
        tg.close()

    def test_the_ledger_alone_decides(self, full: Valkey, make_rivals: Any) -> None:
        """With a ledger, many callers at once cause one effect, and each gets an answer."""
        rivals = make_rivals(locks=full.url)
        callers = 8
        with ThreadPoolExecutor(callers) as pool:
            asked = [pool.submit(rivals.ship_too, busy="wait", wait_s=60.0) for _ in range(callers)]
            assert [each.result() for each in asked] == ["second"] * callers
        assert rivals.shipped() == ["second"]
        assert "lock_unavailable" in rivals.second.happened


class TestKilled:
    """Fault 13."""

    def test_without_persistence_the_ledger_keeps_the_key(
        self, server: Valkey, make_rivals: Any
    ) -> None:
        """If the server comes back empty in a body, a rival is refused."""

        def fault() -> None:
            server.kill()
            server.start()

        expect_one_effect(make_rivals(locks=server.url), fault)

    def test_without_persistence_fences_grow(self, server: Valkey) -> None:
        """Fences are higher than the forgotten ones, because they follow the clock."""
        locks = RedisLocks(server.url)
        before = take(locks)
        server.kill()
        server.start()
        assert take(locks).fence > before.fence

    def test_with_an_append_only_file_nothing_is_lost(self) -> None:
        """The holder's lease and fence are restored, and no other owner gets the key."""
        with Valkey(appendonly="yes", appendfsync="always") as server:
            locks, owner = RedisLocks(server.url), new_owner("m")
            granted = take(locks, owner, ttl_s=600.0)
            server.kill()
            server.start()
            other = take(locks)
            assert isinstance(other, Held)
            assert other.owner == owner
            assert take(locks, owner, ttl_s=600.0) == granted
            assert locks.release(KEY, owner) is True
