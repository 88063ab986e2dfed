"""The contract suite detects locks on ZooKeeper with a check left out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pytest_taskguard.lock_contract import TestHandOver as HandOver
from pytest_taskguard.lock_contract import TestRelease as Release
from pytest_taskguard.lock_contract import TestRenew as Renew
from pytest_taskguard.lock_contract import TestSession as Sessions
from pytest_taskguard.lock_contract import TestTokens as Tokens
from pytest_taskguard.lock_contract import TestWait as Waits
from pytest_taskguard.lock_contract import server as waiting
from support.lock_servers import LockServer
from support.zookeeper import zookeeper_kind
from taskguard.locks.base import LockProvider
from taskguard.model.lease import Owner
from taskguard_sandbox.servers import ZooKeeper
from taskguard_zookeeper import wire
from taskguard_zookeeper.provider import ZooKeeperLocks

pytestmark = pytest.mark.once

Test = Callable[[LockProvider, LockServer], None]


def free_whoever_has_it(nodes: wire.Nodes) -> list[Any]:
    return [wire.Delete(nodes.lock, -1)]


def create_for_ever(nodes: wire.Nodes, value: bytes, acl: Any) -> list[Any]:
    return [wire.Create(nodes.lock, value, acl, 0), wire.Create(nodes.hold, b"", acl, 0)]


def hand_without_asking(mine: wire.Nodes, theirs: wire.Nodes, value: bytes, acl: Any) -> list[Any]:
    return [wire.SetData(mine.lock, value, -1)]


# Changed attribute, its replacement, and the test that must fail.
MUTANTS: dict[str, tuple[str, object, Test]] = {
    "frees what another has": (
        "provider.freeing",
        free_whoever_has_it,
        lambda k, s: Release().test_by_another(k),
    ),
    "keeps what its session had": (
        "provider.creating",
        create_for_ever,
        lambda k, s: Sessions().test_close((k, s.connect())),
    ),
    "hands over and keeps it": (
        "provider.handing",
        hand_without_asking,
        lambda k, s: HandOver().test_hands_over(k),
    ),
    "counts from nothing": (
        "tokens.Epoch.token",
        lambda epoch, czxid: czxid,
        lambda k, s: Tokens().test_are_microseconds(k),
    ),
}


@pytest.fixture
def server(zookeeper: ZooKeeper) -> Iterator[LockServer]:
    """Return an empty ZooKeeper."""
    with zookeeper_kind(zookeeper) as kind:
        yield kind


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(server: LockServer, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The suite passes without the mutant, and fails with it by an assertion."""
    changed, by, test = MUTANTS[name]
    test(server.connect(), server)
    server.forget()
    monkeypatch.setattr(f"taskguard_zookeeper.{changed}", by)
    monkeypatch.setattr(
        waiting, "slack_s", lambda _: 2.0
    )  # the test waits for an event that never comes
    with pytest.raises(AssertionError):
        test(server.connect(), server)


def test_a_renewal_that_takes(server: LockServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A renewal that takes back a key that the server forgot is detected."""

    def renew(self: ZooKeeperLocks, holds: list[Any]) -> list[str]:
        for hold in holds:
            self.acquire(hold.keys, hold.owner, ttl_s=hold.ttl_s, with_fence=False, wait_s=0.0)
        return ["renewed"] * len(holds)

    monkeypatch.setattr(ZooKeeperLocks, "renew", renew)
    with pytest.raises(AssertionError):
        Renew().test_creates_nothing(server.connect(), server)


def test_a_session_that_is_believed_alive(
    server: LockServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that answers for keys without asking the server is detected."""

    def renew(self: ZooKeeperLocks, holds: list[Any]) -> list[str]:
        self._session()
        return ["renewed"] * len(holds)

    monkeypatch.setattr(ZooKeeperLocks, "renew", renew)
    first, other = server.connect(), server.connect()
    assert server.end_session is not None
    with pytest.raises(AssertionError):
        Sessions().test_lost((first, other), server.end_session)


def test_a_waiter_that_is_not_notified(server: LockServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter that is not woken, and sleeps until it asks again, is detected."""

    def wait(self: ZooKeeperLocks, key: str, owner: Owner, *, timeout_s: float) -> None:
        del self, key, owner, timeout_s
        time.sleep(1.0)

    monkeypatch.setattr(ZooKeeperLocks, "wait", wait)
    with pytest.raises(AssertionError):
        Waits().test_woken(server.connect(), server)
