"""`tg.lock(limit=…)` and `tg.lock(mode="read")`: requests, refusals, events and renewals."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import pytest

import taskguard
from support.session_locks import SessionLocks, SessionServer
from support.waiting import patience_s, wait_until
from taskguard.errors import ConfigurationError, KeyBusyError, LeaseLostError
from taskguard.locks import MemoryLocks
from taskguard.locks.base import NO_LIMIT
from taskguard.model.lease import Lease, new_owner


class CountingLocks(MemoryLocks):
    """Counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def acquire(self, *args: Any, **asked: Any) -> Any:
        self.asked.append(("acquire", asked))
        return super().acquire(*args, **asked)

    def release(self, *args: Any, **asked: Any) -> bool:
        self.asked.append(("release", asked))
        return super().release(*args, **asked)

    def renew(self, holds: Any) -> list[str]:
        self.asked.append(("renew", {"holds": len(holds)}))
        return super().renew(holds)


@pytest.fixture
def tg() -> taskguard.TaskGuard:
    """Locks of this test alone."""
    return taskguard.connect(locks=MemoryLocks(), ledger=None)


def test_a_limit(tg: taskguard.TaskGuard) -> None:
    """`limit` blocks run at once. One more is refused as busy."""
    with contextlib.ExitStack() as held:
        for _ in range(2):
            assert held.enter_context(of_another_thread(tg, "a", limit=2)).limit == 2
        with pytest.raises(KeyBusyError), of_another_thread(tg, "a", limit=2):
            pass
    with tg.lock("a") as lease:
        assert lease.limit == 1


def test_readers_and_a_writer(tg: taskguard.TaskGuard) -> None:
    """Readers side by side, a writer alone."""
    with of_another_thread(tg, "a", mode="read") as one, of_another_thread(tg, "a", mode="read"):
        assert one.limit == NO_LIMIT
        with pytest.raises(KeyBusyError), tg.lock("a", mode="write"):
            pass
    with of_another_thread(tg, "a"), pytest.raises(KeyBusyError), tg.lock("a", mode="read"):
        pass


def test_a_limit_of_one_is_a_plain_lock() -> None:
    """And of a plain lock a provider hears what it always did."""
    locks = CountingLocks()
    tg = taskguard.connect(locks=locks, ledger=None)
    for options in ({}, {"limit": 1}, {"mode": "write"}):
        with tg.lock("a", **options):  # type: ignore[arg-type]
            pass
    assert [sorted(asked) for _, asked in locks.asked] == [
        ["ttl_s", "wait_s", "with_fence"],
        [],
    ] * 3


@pytest.mark.parametrize(
    ("keys", "options", "said"),
    [
        (["a"], {"limit": 0}, "limit=0"),
        (["a"], {"limit": 2.0}, "limit=2.0"),
        (["a"], {"limit": True}, "limit=True"),
        (["a"], {"limit": 10**12}, "limit=1000000000000"),
        (["a"], {"mode": "r"}, 'use "write" or "read"'),
        (["a"], {"mode": "read", "limit": 3}, "Remove mode="),
        (["a", "b"], {"limit": 2}, "Nest one lock() for each key"),
        (["a", "b"], {"mode": "read"}, "Nest one lock() for each key"),
    ],
)
def test_refused(
    tg: taskguard.TaskGuard, keys: list[str], options: dict[str, Any], said: str
) -> None:
    """An invalid combination is refused at once, with what to write instead."""
    with pytest.raises(ConfigurationError) as refused:
        tg.lock(*keys, **options)
    assert said in str(refused.value)


@pytest.mark.parametrize("options", [{"limit": 2}, {"mode": "read"}])
def test_other_locks_refuse(options: dict[str, Any], sqlite_url: str) -> None:
    """A lock server without shared keys gets no request. The error names servers that have them."""
    server = SessionServer()
    tg = taskguard.connect(locks=SessionLocks(server), ledger=None)
    with pytest.raises(ConfigurationError, match="Set locks= to Redis or Valkey"):
        tg.lock("a", **options)
    assert server.nodes == {}
    alone = taskguard.connect(locks=None, ledger=sqlite_url)
    with pytest.raises(ConfigurationError, match="there is no lock server"):
        alone.lock("a", **options)
    assert alone.ledger is not None
    alone.ledger.close()


def test_renewals_of_all_go_in_one_call() -> None:
    """Shares and plain locks are renewed in one call."""
    locks = CountingLocks()
    tg = taskguard.connect(locks=locks, ledger=None)
    with (
        of_another_thread(tg, "a", ttl_s=6.0, mode="read"),
        of_another_thread(tg, "a", ttl_s=6.0, mode="read"),
        of_another_thread(tg, "b", ttl_s=6.0),
    ):
        together = ("renew", {"holds": 3})
        wait_until(lambda: together in locks.asked, message="a renewal of three")


def test_a_lost_lease_is_reported() -> None:
    """A share that ran out, or that the server forgot, is lost, and its block raises."""
    locks = MemoryLocks()
    tg = taskguard.connect(locks=locks, ledger=None)
    with (
        pytest.raises(LeaseLostError, match="no longer knows it"),
        tg.lock("a", ttl_s=6.0, limit=2) as lease,
    ):
        locks.flush()
        for _ in range(2):
            locks.acquire(("a",), new_owner(), ttl_s=30.0, with_fence=False, wait_s=0.0, limit=2)
        assert lease.lost.wait(patience_s())


def test_a_ledger_is_not_asked(sqlite_url: str) -> None:
    """Shares are the lock server's, beside a ledger too; a plain lock has its fence, and waits for
    them, also where their leases are longer than its own."""
    locks = MemoryLocks()
    tg = taskguard.connect(locks=locks, ledger=sqlite_url)
    assert tg.ledger is not None
    tg.ledger.create_schema()
    with of_another_thread(tg, "a", mode="read", ttl_s=300.0) as one:
        with of_another_thread(tg, "a", limit=2, ttl_s=300.0) as two:
            assert one.fence == two.fence > 0
        with pytest.raises(KeyBusyError), tg.lock("a", ttl_s=30.0):
            pass
    with tg.lock("a", ttl_s=30.0) as lease:
        assert lease.fence > 0
        with pytest.raises(KeyBusyError), of_another_thread(tg, "a", mode="read"):
            pass
    tg.ledger.close()


@contextlib.contextmanager
def of_another_thread(tg: taskguard.TaskGuard, key: str, **options: Any) -> Iterator[Lease]:
    """Take the lock from another thread, which does not hold what this thread holds."""
    lock, there = tg.lock(key, **options), contextvars.Context()
    lease = there.run(lock.__enter__)
    try:
        yield lease
    finally:
        there.run(lock.__exit__, None, None, None)
