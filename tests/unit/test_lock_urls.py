"""URLs of lock servers, as each version of Python reads them."""

from __future__ import annotations

import pytest

from taskguard.settings import make_locks


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
    """Newer Pythons refuse a bracket behind a comma, which stands in no URL of one server."""
    shown = repr(make_locks(url))
    assert "h1" in shown
    assert "::1" in shown
    assert "6000" in shown
    assert "secret" not in shown
