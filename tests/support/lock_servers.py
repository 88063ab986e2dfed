"""A lock server under test, of whatever kind. It is part of what is installed."""

from pytest_taskguard.lock_contract import LockServer

__all__ = ["LockServer", "redlock_url"]


def redlock_url(*ports: int) -> str:
    """Of several servers on this machine."""
    return "redlock://" + ",".join(f"127.0.0.1:{port}" for port in ports)
