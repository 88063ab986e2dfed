"""A lock server under test, of whatever kind. Its description is part of what is installed."""

from __future__ import annotations

import contextlib

from pytest_taskguard.lock_contract import LockServer
from support.waiting import wait_until
from taskguard.errors import LockServerUnavailableError
from taskguard.locks.base import Granted, Held, LockProvider
from taskguard.model.lease import Owner, new_owner

__all__ = ["KEY", "LockServer", "answered", "connect_by_a_lock", "redlock_url", "take", "token"]

KEY = ("order:42",)


def take(
    locks: LockProvider,
    keys: tuple[str, ...] = KEY,
    owner: Owner | None = None,
    *,
    ttl_s: float = 30.0,
    with_fence: bool = False,
) -> Granted | Held:
    """Request the keys once."""
    owner = owner or new_owner("m")
    return locks.acquire(keys, owner, ttl_s=ttl_s, with_fence=with_fence, wait_s=0.0)


def token(locks: LockProvider) -> int:
    """Take the key with a token, release it, and return the token."""
    owner = new_owner("m")
    answer = take(locks, owner=owner, with_fence=True)
    assert isinstance(answer, Granted)
    assert locks.release(KEY, owner)
    return answer.fence


def answered(locks: LockProvider) -> int:
    """Return a token; 0 if there is no answer, or if a try without an answer still has the key."""
    owner = new_owner("m")
    try:
        answer = take(locks, owner=owner, with_fence=True)
        locks.release(KEY, owner)
    except LockServerUnavailableError:
        return 0
    return answer.fence if isinstance(answer, Granted) else 0


def redlock_url(*ports: int) -> str:
    """Return the URL of several servers on this machine."""
    return "redlock://" + ",".join(f"127.0.0.1:{port}" for port in ports)


def connect_by_a_lock(locks: LockProvider, key: str = "none") -> None:
    """Take a lock and release it, so that the provider has made its connections.

    Repeat that while a busy server does not answer within the provider's own short timeout.
    """
    owner, with_fence = new_owner(), locks.traits.tokens

    def is_connected() -> bool:
        with contextlib.suppress(LockServerUnavailableError):
            locks.acquire((key,), owner, ttl_s=30.0, with_fence=with_fence, wait_s=0.0)
            return locks.release((key,), owner)
        return False

    wait_until(is_connected, message="a provider that is connected")
