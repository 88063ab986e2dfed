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
        connect: a provider as another process would have it.
        forget: the server loses its memory.
        leftovers: what stands in the server, apart from tokens.
        url: None where the server is in this process alone.
        deafened: a provider that gets no replies to what it sends: None where there is no wire.
        end_session: ends a provider's session as its server does that has heard nothing of it:
            None where locks are no session's.
    """

    connect: Callable[[], LockProvider]
    forget: Callable[[], object]
    leftovers: Callable[[], list[str]]
    url: str | None = None
    deafened: Callable[[], AbstractContextManager[LockProvider]] | None = None
    end_session: Callable[[LockProvider], object] | None = None


@pytest.fixture
def locks(server: LockServer) -> LockProvider:
    """A provider on the server."""
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
    """The answer."""
    return locks.acquire(keys, owner, ttl_s=ttl_s, with_fence=with_fence, wait_s=wait_s)


def granted(
    locks: LockProvider,
    keys: tuple[str, ...],
    owner: Owner,
    *,
    ttl_s: float = 30.0,
    with_fence: bool = False,
) -> Granted:
    """The answer, which has to be a grant."""
    answer = take(locks, keys, owner, ttl_s=ttl_s, with_fence=with_fence)
    assert isinstance(answer, Granted)
    return answer


def known(locks: LockProvider, *owners: Owner) -> set[Owner]:
    """Return the owners that may be reported as the holder, if it is one of these."""
    return set(owners) if locks.traits.owners else {*owners, NOBODY}


def renewed(
    locks: LockProvider, keys: tuple[str, ...], owner: Owner, *, ttl_s: float = 30.0
) -> str:
    """The answer for one lease; asked again where some of several servers say nothing in time."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        (answer,) = locks.renew([Hold(keys, owner, ttl_s)])
        if answer != Renewal.UNANSWERED or time.monotonic() > until_s:
            return answer


def kept_s(locks: LockProvider, first: Granted, ttl_s: float) -> float:
    """How long a lease is kept for which `ttl_s` was asked after its `first` grant.

    A session's locks are kept as long as their session, whatever is asked for.
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
    """Somebody takes the keys, and is not heard of again: from here on, they run out."""
    gone = server.connect()
    answer = granted(gone, keys, owner, ttl_s=ttl_s, with_fence=with_fence)
    if gone.traits.session:
        if server.end_session is None:
            pytest.skip("nothing ends its sessions: say in LockServer how")
        server.end_session(gone)
    return answer


def slack_s(locks: LockProvider) -> float:
    """For how long to wait for the end of a short lease, on a machine that is busy."""
    return PATIENCE_S + 3 * locks.traits.min_ttl_s


def taken_over(
    locks: LockProvider, keys: tuple[str, ...], owner: Owner, *, with_fence: bool = False
) -> Granted:
    """The grant of keys that are about to be free."""

    def asked() -> Granted | None:
        answer = take(locks, keys, owner, with_fence=with_fence)
        return answer if isinstance(answer, Granted) else None

    found = wait_until(asked, timeout_s=slack_s(locks), message=f"{keys} free")
    assert found is not None
    return found
