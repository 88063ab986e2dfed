"""A lock server under test, of whatever kind. Its description is part of what is installed."""

from __future__ import annotations

import contextlib

from pytest_taskguard.lock_contract import LockServer
from support.waiting import wait_until
from taskguard.errors import LockServerUnavailableError
from taskguard.locks.base import LockProvider
from taskguard.model.lease import new_owner

__all__ = ["LockServer", "connect_by_a_lock", "redlock_url"]


def redlock_url(*ports: int) -> str:
    """Of several servers on this machine."""
    return "redlock://" + ",".join(f"127.0.0.1:{port}" for port in ports)


def connect_by_a_lock(locks: LockProvider, key: str = "none") -> None:
    """Takes a lock and frees it: whatever a provider makes at first is there then, however often a
    server that is busy does not answer within the provider's own, short time."""
    owner, with_fence = new_owner(), locks.traits.tokens

    def is_connected() -> bool:
        with contextlib.suppress(LockServerUnavailableError):
            locks.acquire((key,), owner, ttl_s=30.0, with_fence=with_fence, wait_s=0.0)
            return locks.release((key,), owner)
        return False

    wait_until(is_connected, message="a provider that is connected")
