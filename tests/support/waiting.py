"""Waiting on conditions, so that tests need no sleeps. It is part of what is installed."""

from pytest_taskguard.waiting import wait_until

__all__ = ["wait_until"]
