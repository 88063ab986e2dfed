"""The contract suite detects locks on etcd with a check left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_taskguard.lock_contract import TestAcquire as Acquire
from pytest_taskguard.lock_contract import TestHandOver as HandOver
from pytest_taskguard.lock_contract import TestRelease as Release
from pytest_taskguard.lock_contract import TestRenew as Renew
from pytest_taskguard.lock_contract import TestTokens as Tokens
from support.etcd import etcd_kind
from support.lock_servers import LockServer
from taskguard.locks.base import LockProvider
from taskguard.model.lease import Owner
from taskguard_etcd import messages
from taskguard_etcd.provider import EtcdLocks
from taskguard_sandbox.servers import Etcd

pytestmark = pytest.mark.once

Test = Callable[[LockProvider, LockServer], None]


def whatever(name: str, *_: object) -> dict[str, Any]:
    """Return a condition that always holds."""
    return messages.is_never(name) | {"result": "GREATER", "version": "-1"}


def lease_of_message(owner: Owner, *_: object) -> str:
    """Use one lease for all deliveries of a message."""
    return messages.lease_of(Owner("", owner.message), ())


# Changed attribute, its replacement, and the test that must fail.
MUTANTS: dict[str, tuple[str, object, Test]] = {
    "takes what another has": ("is_at", whatever, lambda k, s: Acquire().test_taken(k, s)),
    "frees what another has": ("has_value", whatever, lambda k, s: Release().test_by_another(k)),
    "believes the lease alone": ("has_lease", whatever, lambda k, s: HandOver().test_hands_over(k)),
    "one lease for a message": (
        "lease_of",
        lease_of_message,
        lambda k, s: Release().test_by_another(k),
    ),
    "counts from nothing": (
        "_digits",
        lambda number: "0" * 20,
        lambda k, s: Tokens().test_are_microseconds(k),
    ),
}


@pytest.fixture
def server(etcd: Etcd) -> LockServer:
    """Return an empty etcd."""
    return etcd_kind(etcd)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(server: LockServer, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The suite passes without the mutant, and fails with it by an assertion."""
    changed, by, test = MUTANTS[name]
    test(server.connect(), server)
    server.forget()
    monkeypatch.setattr(f"taskguard_etcd.provider.{changed}", by)
    with pytest.raises(AssertionError):
        test(server.connect(), server)


def test_a_renewal_that_takes(server: LockServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A renewal that takes back a key that the server forgot is detected."""

    def renew(self: EtcdLocks, holds: list[Any]) -> list[str]:
        for hold in holds:
            self.acquire(hold.keys, hold.owner, ttl_s=hold.ttl_s, with_fence=False, wait_s=0.0)
        return ["renewed"] * len(holds)

    monkeypatch.setattr(EtcdLocks, "renew", renew)
    with pytest.raises(AssertionError):
        Renew().test_creates_nothing(server.connect(), server)
