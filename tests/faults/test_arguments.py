"""Fault 32: arguments that break naive keys, all the way to a real lock server and a database.

A clear error that names the parameter, and no body; or a key like any other, and one effect.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.guarded_shop import write
from taskguard import Guard
from taskguard.errors import KeyArgumentError

REFUSED = {
    "100 MB": "x" * 100_000_000,
    "100 MB of bytes": bytes(100_000_000),
    "half a surrogate pair": "\ud800",
    "nothing": None,
    "a list": ["x"],
}
TAKEN = {
    "NUL": "a\0b",
    "a pattern": "a*?[b]",
    "a hash tag": "}{order:1}",
    "lines": "a\r\nSET x y\r\n",
    "SQL": "a'; drop table effects; --%s%(x)s",
    "Cyrillic a": "а",
    "Latin a": "a",
    "wide a": "ａ",
    "emoji": "🙂",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_key_is_refused_by_name(
    make_rivals: Any, redis_url: str, name: str
) -> None:
    """An argument that cannot be a key is refused. Nothing runs or is recorded, and the error does
    not show the value."""
    shop = make_rivals(locks=redis_url).first

    @shop.tg.guarded(key="order:<order>")
    def ship(order: Any, guard: Guard) -> None:
        raise AssertionError("the body ran")

    with pytest.raises(KeyArgumentError, match="order") as caught:
        ship(REFUSED[name])
    assert len(str(caught.value)) < 1000
    assert (shop.states, shop.happened) == ([], [])


def test_what_can_be_a_key_is_one_of_its_own(make_rivals: Any, redis_url: str) -> None:
    """Each text is work of its own, and has one effect although it is sent twice."""
    shop = make_rivals(locks=redis_url).first

    @shop.tg.guarded(key="order:<order>")
    def ship(order: str, number: int, guard: Guard) -> None:
        with guard.transaction() as db:
            write(db, str(number))

    for number, text in [*enumerate(TAKEN.values()), *enumerate(TAKEN.values())]:
        ship(text, number)
    assert shop.effects == sorted(map(str, range(len(TAKEN))))
