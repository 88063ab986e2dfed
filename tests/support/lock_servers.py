"""A lock server under test, of whatever kind. It is part of what is installed."""

from __future__ import annotations

from pytest_taskguard.lock_contract import LockServer
from support.waiting import wait_until
from taskguard.errors import LockServerUnavailableError
from taskguard.lease import new_owner
from taskguard.locks.base import Granted, LockProvider

__all__ = ["LockServer", "connect_by_a_lock", "redlock_url"]


def connect_by_a_lock(locks: LockProvider, *, with_fence: bool = True) -> None:
    """Takes a lock and frees it: whatever a provider makes at first is there then, however often a
    server that is busy does not answer within the provider's own, short time."""
    owner = new_owner()

    def is_connected() -> bool:
        try:
            taken = locks.acquire(("none",), owner, ttl_s=1.0, with_fence=with_fence, wait_s=0.0)
            locks.release(("none",), owner)
        except LockServerUnavailableError:
            return False
        return isinstance(taken, Granted)

    wait_until(is_connected, timeout_s=60.0)


def redlock_url(*ports: int) -> str:
    """Of several servers on this machine."""
    return "redlock://" + ",".join(f"127.0.0.1:{port}" for port in ports)
