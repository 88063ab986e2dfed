"""The traits of a lock provider: how long its leases are trusted, and what it needs."""

from __future__ import annotations

from typing import Any

import pytest

import taskguard
from support import session_locks
from support.session_locks import SessionLocks, SessionServer
from support.waiting import wait_until
from taskguard.errors import ConfigurationError, KeyBusyError
from taskguard.locks import Granted, Held, MemoryLocks, Traits
from taskguard.model.lease import new_owner


class LongLocks(MemoryLocks):
    """Keeps no lease for less than a minute."""

    traits = Traits(min_ttl_s=60.0)

    def acquire(self, *args: Any, ttl_s: float, **asked: Any) -> Granted | Held:
        return super().acquire(*args, ttl_s=max(ttl_s, self.traits.min_ttl_s), **asked)


class Tokenless(MemoryLocks):
    """Locks without tokens, as on several independent servers."""

    traits = Traits(tokens=False)


def test_a_lease_of_locks_alone_is_trusted_for_as_long_as_was_granted() -> None:
    """Longer than was asked for: else it would be given up while the server keeps it."""
    tg = taskguard.connect(locks=LongLocks(), ledger=None)
    with tg.lock("a", ttl_s=1.0) as lease:
        assert lease.ttl_s == 60.0
        assert 50.0 < lease.remaining_s < 60.0


def test_a_lease_of_locks_alone_is_trusted_for_no_longer_than_was_granted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If a session is shorter than the requested ttl, the lease is trusted and renewed within the
    session."""
    monkeypatch.setattr(session_locks, "SESSION_S", 6.0)
    events: list[Any] = []
    locks = SessionLocks(SessionServer())
    tg = taskguard.connect(locks=locks, ledger=None, listeners=[events.append])
    with tg.lock("a", ttl_s=300.0) as lease:
        assert lease.ttl_s == 6.0
        assert lease.remaining_s < 6.0
        wait_until(lambda: "renewed" in {event.name for event in events}, message="a renewal")
        lease.check()


def test_with_a_ledger_a_lease_is_trusted_for_as_long_as_was_asked(sqlite_url: str) -> None:
    """There it is the ledger that grants it."""
    tg = taskguard.connect(locks=LongLocks(), ledger=sqlite_url)
    assert tg.ledger is not None
    tg.ledger.create_schema()
    with tg.lock("a", ttl_s=30.0) as lease:
        assert lease.ttl_s == 30.0
        assert lease.remaining_s < 30.0
    tg.ledger.close()


@pytest.mark.parametrize(("kind", "waits"), [(LongLocks, True), (MemoryLocks, False)])
def test_a_lease_that_is_longer_than_a_task_asks_for_is_one_where_the_provider_makes_them_so(
    kind: type[MemoryLocks], waits: bool, sqlite_url: str
) -> None:
    """If the provider lengthens leases, a longer lease's holder may be about to claim. Otherwise
    the ledger decides."""
    locks = kind()
    tg = taskguard.connect(locks=locks, ledger=sqlite_url)
    assert tg.ledger is not None
    tg.ledger.create_schema()
    locks.acquire(("a",), new_owner("m"), ttl_s=50.0, with_fence=False, wait_s=0.0)
    if waits:
        with pytest.raises(KeyBusyError), tg.lock("a", ttl_s=30.0):
            pass
    else:
        with tg.lock("a", ttl_s=30.0) as lease:
            assert lease.fence > 0
    tg.ledger.close()


def test_locks_without_tokens_need_a_ledger(sqlite_url: str) -> None:
    """Without tokens no server could refuse a stale write. With a ledger the fence is its own."""
    with pytest.raises(ConfigurationError, match=r"issues no fencing tokens.*Set a ledger"):
        _ = taskguard.connect(locks=Tokenless(), ledger=None).runner
    tg = taskguard.connect(locks=Tokenless(), ledger=sqlite_url)
    assert tg.ledger is not None
    tg.ledger.create_schema()
    with tg.lock("a") as lease:
        assert lease.fence > 0
    tg.ledger.close()
