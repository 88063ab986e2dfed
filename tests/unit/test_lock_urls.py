"""URLs of lock servers, as each version of Python reads them."""

from __future__ import annotations

from typing import Any

import pytest

from taskguard.errors import ConfigurationError
from taskguard.settings import make_locks
from taskguard_consul import ConsulLocks
from taskguard_etcd import EtcdLocks
from taskguard_zookeeper import ZooKeeperLocks


@pytest.mark.parametrize(
    "url",
    [
        "sentinel://user:secret@h1,[::1]:6000/shop",
        "redis+cluster://user:secret@h1:1,[::1]:6000",
        "redlock://user:secret@h1,h2,[::1]:6000",
        "etcd://h1,[::1]:6000",
    ],
)
def test_an_ipv6_address_behind_another(url: str) -> None:
    """Newer Pythons refuse a bracket behind a comma, which no URL of a single server has."""
    shown = repr(make_locks(url))
    assert "h1" in shown
    assert "::1" in shown
    assert "6000" in shown
    assert "secret" not in shown


@pytest.mark.parametrize("option", ["socket_timeout_s", "connect_timeout_s"])
@pytest.mark.parametrize("provider", [EtcdLocks, ConsulLocks, ZooKeeperLocks])
def test_a_time_out_that_is_none(provider: Any, option: str) -> None:
    """The provider refuses it by name when it is made, not the driver in the first call."""
    scheme = provider.__name__.removesuffix("Locks").lower()
    with pytest.raises(ConfigurationError, match=f"{option}=0: give a number"):
        provider(f"{scheme}://host", **{option: 0})
