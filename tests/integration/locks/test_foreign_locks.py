"""Values at the lock server that are no lease or outlive every lease: the ledger decides."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from typing import Any

import pytest
import redis

import taskguard
from taskguard import Guard, TaskGuard
from taskguard.errors import KeyBusyError
from taskguard.events import Event
from taskguard.model.lease import new_owner

HOUR_MS = 3_600_000
LOCK = "taskguard:{order:1}"


class LockRig:
    """A guard on Redis and a ledger, and a separate client."""

    def __init__(self, redis_url: str, ledger: str) -> None:
        self.client = redis.Redis.from_url(redis_url)
        self.events: list[Event] = []
        self.tg = self.connect(redis_url, ledger)
        self.other = self.connect(redis_url, ledger)
        runner = self.tg.runner
        assert runner.ledger is not None
        runner.ledger.create_schema()

    def connect(self, redis_url: str, ledger: str) -> TaskGuard:
        return taskguard.connect(locks=redis_url, ledger=ledger, listeners=(self.events.append,))

    def names(self) -> list[str]:
        return [event.name for event in self.events]

    def close(self) -> None:
        self.client.close()
        self.tg.close()
        self.other.close()


@pytest.fixture
def rig(redis_url: str, sqlite_url: str) -> Iterator[LockRig]:
    made = LockRig(redis_url, sqlite_url)
    yield made
    made.close()


FOREIGN = [
    pytest.param("maintenance", None, id="by hand, for ever"),
    pytest.param(str(new_owner("m")), HOUR_MS, id="a clock set back"),
    pytest.param("another application's", 20_000, id="another application's"),
]


@pytest.mark.parametrize(("value", "expires_ms"), FOREIGN)
def test_the_ledger_decides_and_the_value_stays(
    rig: LockRig, value: str, expires_ms: int | None
) -> None:
    """If the ledger knows no holder, the work is done at once, and the foreign value stays."""
    rig.client.set(LOCK, value, px=expires_ms)

    @rig.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> int:
        return guard.attempt

    assert ship(1) == 1  # type: ignore[call-arg]  # the guard is ours
    assert rig.client.get(LOCK) == value.encode()
    assert "lock_overruled" in rig.names()
    (overruled,) = [event for event in rig.events if event.name == "lock_overruled"]
    assert (overruled.key, overruled.level) == ("order:1", 30)


def test_what_is_kept_for_a_waiter_by_a_clock_that_was_set_back(rig: LockRig) -> None:
    """If the clock was set back, a key may be kept for a waiter that never comes, longer than any
    lease."""
    waiter = str(new_owner("m"))
    rig.client.set(LOCK, waiter, px=HOUR_MS)
    rig.client.zadd(f"{LOCK}:line", {waiter: 1})

    @rig.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> int:
        return guard.attempt

    assert ship(1) == 1  # type: ignore[call-arg]  # the guard is ours
    assert "lock_overruled" in rig.names()


@pytest.mark.parametrize(("value", "expires_ms"), FOREIGN)
def test_so_it_does_for_plain_locks(rig: LockRig, value: str, expires_ms: int | None) -> None:
    """A plain lock is granted, too. A holder in the ledger keeps others out until its lease
    expires."""
    rig.client.set(LOCK, value, px=expires_ms)
    with rig.tg.lock("order:1") as lease:
        assert lease.fence
        with pytest.raises(KeyBusyError) as caught:
            contextvars.Context().run(rig.other.lock("order:1").__enter__)
        assert caught.value.retry_after_s is not None
        assert caught.value.retry_after_s <= 30
    with rig.other.lock("order:1", wait_s=5):
        pass


def test_a_live_lease_at_the_lock_server_is_believed(rig: LockRig) -> None:
    """A valid lease at the lock server counts: its holder may be about to claim, or to end."""
    rig.client.set(LOCK, str(new_owner("m")), px=29_000)
    with pytest.raises(KeyBusyError):
        rig.tg.lock("order:1").__enter__()
    assert "lock_overruled" not in rig.names()


def test_a_longer_lease_of_another_task_is_the_ledgers_to_tell(rig: LockRig) -> None:
    """A longer lease of another task is also in the ledger, so the key is busy."""
    with rig.tg.lock("order:1", ttl_s=600), pytest.raises(KeyBusyError):
        contextvars.Context().run(rig.other.lock("order:1", ttl_s=1).__enter__)
    assert "lock_overruled" not in rig.names()


def test_without_a_ledger_it_is_unknown(rig: LockRig, redis_url: str) -> None:
    """Without a ledger the value blocks the key."""
    alone: Any = taskguard.connect(locks=redis_url, ledger=None)
    rig.client.set(LOCK, "maintenance")
    with pytest.raises(KeyBusyError):
        alone.lock("order:1").__enter__()
    alone.close()
