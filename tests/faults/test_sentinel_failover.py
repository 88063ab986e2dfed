"""Locks with a `sentinel://` URL while Sentinel replaces the master: killed, frozen, or by command.

The replica may have been cut off from the master before, so that it lacks the last writes. Locks
have to work again within the group's own time for a failover and a second.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from support.needs import need
from support.rivals import expect_one_effect
from support.sentinel import Group, groups, role
from support.waiting import patience_s, wait_until
from taskguard.errors import LockServerUnavailableError
from taskguard.locks.base import Granted, Hold, Renewal
from taskguard.locks.redis import RedisLocks
from taskguard.model.lease import Owner, new_owner
from taskguard_sandbox.servers import DebianRedis, SentinelOf

pytestmark = pytest.mark.debian

KEY = ("order:1",)
LOCK = "taskguard:{order:1}"


@pytest.fixture
def group() -> Iterator[Group]:
    need(DebianRedis)
    with groups() as group:
        yield group


def kill(group: Group) -> None:
    group.master.kill()


def freeze(group: Group) -> None:
    group.master.pause()


def replace_master(group: Group) -> None:
    """The old master goes on taking locks until Sentinel reaches it, some ten seconds later."""
    group.ask(group.sentinels[0], "FAILOVER", "shop")


EACH_FAULT = pytest.mark.parametrize("fault", [kill, freeze, replace_master])


def strand(group: Group) -> DebianRedis:
    """Cut the replica off from the master. Sentinel may still promote it."""
    replica = group.replica
    with (
        redis.Redis(port=replica.port) as client,
        redis.Redis(port=group.master.port) as master,
    ):
        client.config_set("masterauth", "wrong")
        master.execute_command("CLIENT", "KILL", "TYPE", "replica")
        wait_until(lambda: master.info("replication")["connected_slaves"] == 0)
    return replica


def take(locks: RedisLocks, owner: Owner | None = None, key: str = KEY[0]) -> Any:
    owner = owner or new_owner("m")
    return locks.acquire((key,), owner, ttl_s=600.0, with_fence=True, wait_s=0.0)


def taken(locks: RedisLocks, owner: Owner, key: str = KEY[0]) -> Any:
    """The grant that comes as soon as there is a master."""

    def grant() -> Granted | None:
        try:
            answer = take(locks, owner, key)
        except LockServerUnavailableError:
            return None
        return answer if isinstance(answer, Granted) else None

    return wait_until(grant)


class TestWithALedger:
    @EACH_FAULT
    def test_the_new_master_lacks_the_lease(
        self, group: Group, make_rivals: Any, fault: Callable[[Group], None]
    ) -> None:
        """If the new master lacks the lease, the ledger refuses a rival. There is one effect."""
        rivals = make_rivals(locks=lambda: RedisLocks(group.url))
        replica = strand(group)

        def strike() -> None:
            with redis.Redis(port=replica.port) as client:
                assert not client.exists(LOCK)
            fault(group)
            group.wait_for_promotion(replica)

        expect_one_effect(rivals, strike)
        rivals.second.events.clear()
        assert rivals.ship_too(order=2) == "second"
        assert "lock_unavailable" not in rivals.second.happened
        assert rivals.shipped(2) == ["second"]

    def test_in_the_middle_of_it_work_goes_on(self, make_rivals: Any) -> None:
        """While there is no master, the ledger decides alone, and no work is deferred."""
        need(DebianRedis)
        with groups(down_after_ms=60_000) as group:  # so that the middle lasts
            rivals = make_rivals(locks=lambda: RedisLocks(group.url))

            def strike() -> None:
                group.master.kill()
                assert rivals.ship_too(order=2) == "second"

            expect_one_effect(rivals, strike)
            assert "lock_unavailable" in rivals.second.happened

    def test_without_replicas_to_write_to_work_goes_on(
        self, group: Group, make_rivals: Any
    ) -> None:
        """A master that refuses writes for want of replicas counts as down, and work goes on."""
        with redis.Redis(port=group.master.port) as client:
            client.config_set("min-replicas-to-write", 1)
        rivals = make_rivals(locks=lambda: RedisLocks(group.url))
        expect_one_effect(rivals, lambda: strand(group))
        assert rivals.ship_too(order=2) == "second"
        assert "lock_unavailable" in rivals.second.happened


class TestWithLocksOnly:
    @EACH_FAULT
    def test_a_grant_that_no_replica_has_is_lost(
        self, group: Group, fault: Callable[[Group], None]
    ) -> None:
        """A grant that no replica has may be lost. Another owner is granted the key with a higher
        token, and the first one's next renewal says so."""
        locks, first, second = RedisLocks(group.url), new_owner("first"), new_owner("second")
        before = take(locks, first)
        wait_until(lambda: _has(group.replica), message="the replica has the lock")
        assert locks.release(KEY, first) is True
        replica = strand(group)
        before = take(locks, first)
        fault(group)
        group.wait_for_promotion(replica)
        after = taken(RedisLocks(group.url), second)
        assert after.fence > before.fence
        wait_until(lambda: _renewal(locks, first) == Renewal.TAKEN)
        assert locks.release(KEY, first) is False
        assert _renewal(locks, second) == Renewal.RENEWED

    def test_a_grant_that_the_replica_has_stays(self, group: Group) -> None:
        """A grant that the replica has remains, and is renewed at the new master."""
        locks, owner = RedisLocks(group.url), new_owner("m")
        granted = take(locks, owner)
        wait_until(lambda: _has(group.replica), message="the replica has the lock")
        group.master.kill()
        assert taken(locks, owner) == granted
        assert _renewal(locks, owner) == Renewal.RENEWED
        assert locks.release(KEY, owner) is True

    def test_min_replicas_refuse_what_would_be_lost(self, group: Group) -> None:
        """A master without a replica grants nothing that a failover would forget."""
        with redis.Redis(port=group.master.port) as client:
            client.config_set("min-replicas-to-write", 1)
        strand(group)
        with pytest.raises(LockServerUnavailableError, match="NOREPLICAS"):
            take(RedisLocks(group.url))


class TestWorksAgain:
    @pytest.mark.parametrize(("fault", "frozen_sentinels"), [(kill, 0), (freeze, 0), (freeze, 1)])
    def test_within_a_second_of_the_groups_own_time(
        self, fault: Callable[[Group], None], frozen_sentinels: int
    ) -> None:
        """Locks work within a second after the first Sentinel names the new master, even if the
        first Sentinel of the URL is frozen."""
        need(DebianRedis)
        assert any(self.late_by_s(fault, frozen_sentinels) <= 1.0 for _ in range(3)), (
            "works too late"
        )

    def late_by_s(self, fault: Callable[[Group], None], frozen_sentinels: int) -> float:
        """The time between the two."""
        with groups() as group:
            locks = RedisLocks(group.url)
            assert locks.release(KEY, new_owner()) is False
            for sentinel in group.sentinels[:frozen_sentinels]:
                sentinel.pause()
            replica, named = group.replica, _Named(group, group.sentinels[frozen_sentinels:])
            fault(group)
            taken(locks, new_owner("m"))
            works_at_s = time.monotonic()
            assert _has(replica)
            return works_at_s - named.at_s()

    def test_many_threads(self, group: Group) -> None:
        """All threads find the new master."""
        locks, owners = RedisLocks(group.url), [new_owner(f"m{number}") for number in range(16)]
        with ThreadPoolExecutor(len(owners)) as pool:
            for owner in owners:
                pool.submit(take, locks, owner, owner.message).result()
            group.master.kill()
            granted = pool.map(lambda owner: taken(locks, owner, owner.message), owners)
            assert all(isinstance(each, Granted) for each in granted)

    def test_a_master_that_is_held_for_down_is_not_waited_for(self) -> None:
        """After the Sentinels hold the master for down, calls fail at once. When it is back, they
        work."""
        need(DebianRedis)
        with groups(sentinels=1, replicas=0, quorum=1, down_after_ms=500) as group:
            locks = RedisLocks(group.url, socket_timeout_s=2.0)
            take(locks)
            master = group.master
            master.pause()
            wait_until(lambda: "s_down" in group.values(group.sentinels[0])["flags"])
            with pytest.raises(LockServerUnavailableError):
                take(locks)  # the open connection has waited for the master once
            assert any(self.fails_after_s(locks) < 1.0 for _ in range(10))
            master.resume()
            taken(locks, new_owner("m"), "another")

    def fails_after_s(self, locks: RedisLocks) -> float:
        """How long that took."""
        started = time.monotonic()
        with pytest.raises(LockServerUnavailableError) as caught:
            take(locks)
        said = "is down according to its Sentinels" in str(caught.value)  # unless they were late
        return time.monotonic() - started if said else math.inf

    def test_a_replaced_master_is_left_though_it_goes_on_granting(self, group: Group) -> None:
        """Calls that never fail leave the old master within a second of the Sentinels' change. The
        old master would grant locks for ten more seconds."""
        locks, old, new = RedisLocks(group.url), group.master, group.replica
        take(locks)
        replace_master(group)
        numbers = itertools.count()

        def granted_by_the_new_one() -> bool:
            key = f"k{next(numbers)}"
            take(locks, key=key)
            return not _has(old, f"taskguard:{{{key}}}") and _has(new, f"taskguard:{{{key}}}")

        wait_until(granted_by_the_new_one)
        assert role(old) == "master"

    def test_a_watchdogs_tick_notices_as_well(self, group: Group) -> None:
        """A process that only renews also finds the new master while the old one is up."""
        locks, owner, old, new = RedisLocks(group.url), new_owner("m"), group.master, strand(group)
        take(locks, owner)
        replace_master(group)
        wait_until(lambda: role(new) == "master")
        wait_until(lambda: _renewal(locks, owner) == Renewal.GONE)
        assert role(old) == "master"

    def test_a_sentinel_that_knows_of_no_failover_is_overruled(self, group: Group) -> None:
        """The Sentinel with the highest configuration epoch counts, wherever it is in the URL."""
        with DebianRedis() as other, SentinelOf(other.port, down_after_ms=60_000) as stale:
            replica = group.replica
            replace_master(group)
            group.wait_for_promotion(replica)
            locks = RedisLocks(group.url_of(stale, *group.sentinels))
            for _ in range(2):
                take(locks)
                locks.close()
            assert _has(replica)
            assert not _has(other)


class _Named:
    """When the first of these Sentinels named another master, noted by a thread of its own."""

    def __init__(self, group: Group, sentinels: list[SentinelOf]) -> None:
        self._clients = [redis.Redis(port=each.port, socket_timeout=1) for each in sentinels]
        self._old = group.master.port
        self._at_s: float | None = None
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        until = time.monotonic() + 60.0
        while self._at_s is None and time.monotonic() < until:
            for client in self._clients:
                with contextlib.suppress(redis.RedisError):  # one that is busy
                    (_, port) = client.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", "shop")
                    if int(port) != self._old:
                        self._at_s = time.monotonic()
            time.sleep(0.005)
        for client in self._clients:
            client.close()

    def at_s(self) -> float:
        """On the monotonic clock."""
        self._thread.join(patience_s())
        assert self._at_s is not None
        return self._at_s


def _renewal(locks: RedisLocks, owner: Owner) -> str:
    (answer,) = locks.renew([Hold(KEY, owner, 600.0)])
    return answer


def _has(server: DebianRedis, lock: str = LOCK) -> bool:
    with redis.Redis(port=server.port) as client:
        return bool(client.exists(lock))
