"""Requirements of a test: skip it with the reason if one is missing, or fail it in CI."""

from __future__ import annotations

import importlib.util
import os

import pytest

from taskguard_sandbox.servers import Consul, MySQL, NewestEtcd, Server


def need(server: type[Server]) -> None:
    """Skip the test, or fail it where CI=true, if the server cannot run here.

    Packages of another Debian release may be missing any day, and never fail a test.
    """
    foreign = server in (MySQL, NewestEtcd, Consul)
    (allowed if foreign else missing)(server.available())


def missing(reason: str | None) -> None:
    """Skip the test, or fail it where CI=true, for a reason other than None."""
    if reason is None:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def need_redis_in_memory() -> None:
    """Skip the test if fakeredis cannot run scripts: the newest Python has no wheel of lupa."""
    found = importlib.util.find_spec("fakeredis") and importlib.util.find_spec("lupa")
    allowed(None if found else "fakeredis[lua] is not installed")


def allowed(reason: str | None) -> None:
    """Skip the test for a reason other than None: the machine forbids it, even in CI."""
    if reason is not None:
        pytest.skip(reason)
