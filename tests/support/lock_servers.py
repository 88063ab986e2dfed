"""A lock server under test, of whatever kind. It is part of what is installed."""

from pytest_taskguard.lock_contract import LockServer

__all__ = ["LockServer"]
