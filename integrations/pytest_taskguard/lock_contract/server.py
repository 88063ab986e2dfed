"""The lock server under test, and short ways to ask it.

Guarantees: the tests call the methods of `taskguard.locks.LockProvider`, and nothing else of a
provider. Everything that a kind of server does in its own way is said by its `LockServer`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pytest

from pytest_taskguard.waiting import wait_until
from taskguard.locks import NOBODY, Granted, Held, Hold, LockProvider, Owner, Renewal

__all__ = [
    "KEY",
    "TURN_S",
    "TWO",
    "WAITS_S",
    "LockServer",
    "abandoned",
    "granted",
    "kept_s",
    "known",
    "locks",
    "renewed",
    "slack_s",
    "take",
    "taken_over",
]

# Time that a busy machine may need for a short operation, in seconds.
PATIENCE_S = 10.0
# A waiter keeps its position if it tries again within WAITS_S, and its turn within TURN_S.
WAITS_S = 1.0
TURN_S = 0.05
KEY = ("order:42",)
TWO = ("order:1", "order:2")


@dataclass(frozen=True)
class LockServer:
    """One server under test.

    Attributes:
        connect: returns a new provider, as another process would have it.
        forget: makes the server lose its memory.
        leftovers: returns what is in the server, apart from tokens.
        url: the server's URL. None if the server exists in this process only.
        deafened: returns a provider that loses its server's replies. None if there is no network.
        end_session: ends a provider's session, as a server does after a silence. None if the locks
            are leases.
    """

    connect: Callable[[], LockProvider]
    forget: Callable[[], object]
    leftovers: Callable[[], list[str]]
    url: str | None = None
    deafened: Callable[[], AbstractContextManager[LockProvider]] | None = None
    end_session: Callable[[LockProvider], object] | None = None


@pytest.fixture
def locks(server: LockServer) -> LockProvider:
    """Return a provider on the server."""
    return server.connect()


def take(
    locks: LockProvider,
    keys: tuple[str, ...],
    owner: Owner,
    *,
    ttl_s: float = 30.0,
    with_fence: bool = False,
    wait_s: float = 0.0,
) -> Granted | Held:
    """Return the answer to an acquire."""
    return locks.acquire(keys, owner, ttl_s=ttl_s, with_fence=with_fence, wait_s=wait_s)


def granted(
    locks: LockProvider,
    keys: tuple[str, ...],
    owner: Owner,
    *,
    ttl_s: float = 30.0,
    with_fence: bool = False,
) -> Granted:
    """Return the grant. Fail if the keys are taken."""
    answer = take(locks, keys, owner, ttl_s=ttl_s, with_fence=with_fence)
    assert isinstance(answer, Granted)
    return answer


def known(locks: LockProvider, *owners: Owner) -> set[Owner]:
    """Return the owners that may be reported as the holder, if it is one of these."""
    return set(owners) if locks.traits.owners else {*owners, NOBODY}


def renewed(
    locks: LockProvider, keys: tuple[str, ...], owner: Owner, *, ttl_s: float = 30.0
) -> str:
    """Return the answer for one lease. Repeat the request if some of several servers are late."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        (answer,) = locks.renew([Hold(keys, owner, ttl_s)])
        if answer != Renewal.UNANSWERED or time.monotonic() > until_s:
            return answer


def kept_s(locks: LockProvider, first: Granted, ttl_s: float) -> float:
    """Return how long a lease lasts for which `ttl_s` was requested after its `first` grant.

    A session's locks last as long as their session, whatever time is requested.
    """
    return first.ttl_s if locks.traits.session else max(ttl_s, locks.traits.min_ttl_s)


def abandoned(
    server: LockServer,
    keys: tuple[str, ...],
    owner: Owner,
    *,
    ttl_s: float = 0.05,
    with_fence: bool = False,
) -> Granted:
    """Take the keys for an owner that never renews them. Return the grant."""
    gone = server.connect()
    answer = granted(gone, keys, owner, ttl_s=ttl_s, with_fence=with_fence)
    if gone.traits.session:
        if server.end_session is None:
            pytest.skip("nothing ends its sessions: say in LockServer how")
        server.end_session(gone)
    return answer


def slack_s(locks: LockProvider) -> float:
    """Return how long to wait for the end of a short lease on a busy machine."""
    return PATIENCE_S + 3 * locks.traits.min_ttl_s


def taken_over(
    locks: LockProvider, keys: tuple[str, ...], owner: Owner, *, with_fence: bool = False
) -> Granted:
    """Return the grant of keys whose lease is about to end."""

    def asked() -> Granted | None:
        answer = take(locks, keys, owner, with_fence=with_fence)
        return answer if isinstance(answer, Granted) else None

    found = wait_until(asked, timeout_s=slack_s(locks), message=f"{keys} free")
    assert found is not None
    return found
