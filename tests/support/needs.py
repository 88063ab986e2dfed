"""What a test needs from its machine: skipped with the reason where it is missing, failed in CI."""

from __future__ import annotations

import importlib.util
import os

import pytest

from taskguard_sandbox.servers import Consul, MySQL, NewestEtcd, Server


def need(server: type[Server]) -> None:
    """Skips the test, or fails it where CI=true, if the server cannot run here.

    What comes from another Debian may be missing there any day: never a failure.
    """
    foreign = server in (MySQL, NewestEtcd, Consul)
    (allowed if foreign else missing)(server.available())


def missing(reason: str | None) -> None:
    """Skips the test, or fails it where CI=true, for a reason other than None."""
    if reason is None:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def need_redis_in_memory() -> None:
    """Skips the test where fakeredis cannot run scripts: the newest Python has no wheel of lupa."""
    found = importlib.util.find_spec("fakeredis") and importlib.util.find_spec("lupa")
    allowed(None if found else "fakeredis[lua] is not installed")


def allowed(reason: str | None) -> None:
    """Skips the test for a reason other than None: the machine forbids it, which no CI can mend."""
    if reason is not None:
        pytest.skip(reason)
