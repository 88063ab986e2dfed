"""Two callers of the same work, as two processes are: while one is in its body, the other calls.

Effects go into a table without a unique index, so that a double effect can be seen. Leases are
long: a test that wants one to run out says how long it is.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from support.guarded_shop import GuardedShop, write
from taskguard import Guard
from taskguard.errors import KeyBusyError
from taskguard_sandbox.process import Server

__all__ = ["Rivals", "expect_one_effect", "expect_work_beside_a_frozen_server", "rivals"]


class Rivals:
    """`first` and `second` have a ledger and a lock server in common, and no memory.

    `locks` makes a lock provider, or is what one is made of; `second_locks` is the second one's
    way to the lock server, if it is another.
    """

    def __init__(
        self, url: str, *, locks: Any, second_locks: Any = None, ledger: Any = None
    ) -> None:
        self.first = GuardedShop(url, ledger, locks=_made(locks))
        self.second = GuardedShop(url, ledger, locks=_made(second_locks or locks))

    def ship(
        self,
        during: Callable[[Guard], object] = lambda guard: None,
        *,
        order: int = 1,
        ttl_s: float = 30.0,
    ) -> Any:
        """The first one ships; `during` happens in its body, before it writes."""
        return _shipping(self.first, "first", during, ttl_s=ttl_s)(order)

    def ship_too(
        self,
        during: Callable[[Guard], object] = lambda guard: None,
        *,
        order: int = 1,
        ttl_s: float = 30.0,
        **options: Any,
    ) -> Any:
        """The second one ships the same order. May be called in the first one's body."""
        ship = _shipping(self.second, "second", during, ttl_s=ttl_s, **options)
        return contextvars.Context().run(ship, order)

    def shipped(self, order: int = 1) -> list[str]:
        """Return the names of those that shipped it."""
        return [who for who, what in map(str.split, self.first.effects) if what == str(order)]

    def close(self) -> None:
        self.first.close()
        self.second.close()


def _made(locks: Any) -> Any:
    return locks() if callable(locks) else locks


def _shipping(
    shop: GuardedShop, name: str, during: Callable[[Guard], object], **options: Any
) -> Callable[[int], Any]:
    @shop.tg.guarded(key="order:<order>", work="ship", **options)
    def ship(order: int, guard: Guard) -> str:
        during(guard)
        with guard.transaction() as db:
            write(db, f"{name} {order}")
            guard.result = name
        return name

    return ship  # type: ignore[no-any-return,unused-ignore]


@contextmanager
def rivals(url: str, **options: Any) -> Iterator[Rivals]:
    made = Rivals(url, **options)
    try:
        yield made
    finally:
        made.close()


def expect_one_effect(rivals: Rivals, fault: Callable[[], object]) -> None:
    """The fault strikes in the first one's body; the second one is refused, later answered."""

    def during(guard: Guard) -> None:
        fault()
        with pytest.raises(KeyBusyError):
            rivals.ship_too()
        guard.check()

    assert rivals.ship(during) == "first"
    assert rivals.ship_too() == "first"
    assert rivals.shipped() == ["first"]
    assert "takeover" not in rivals.first.happened + rivals.second.happened


def expect_work_beside_a_frozen_server(rivals: Rivals, server: Server) -> None:
    """Freeze the lock server in the body of the first rival: the second one is refused that work,
    does other work, and goes on when the server does."""

    def freeze() -> None:
        server.pause()
        assert rivals.ship_too(order=2) == "second"

    expect_one_effect(rivals, freeze)
    assert "lock_unavailable" in rivals.second.happened
    server.resume()
    assert rivals.ship_too(order=3) == "second"
