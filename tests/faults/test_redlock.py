"""Fault 19: some of several independent lock servers are down, frozen, emptied, started again.

A minority in trouble is not felt; a majority in trouble leaves it to the ledger alone. One effect,
and none is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.independent import Independent, independent
from support.needs import need
from support.rivals import Rivals, expect_one_effect
from taskguard.locks.redlock import RedlockLocks
from taskguard_sandbox.servers import Valkey

Strike = Callable[[Independent, list[int]], None]


def down(servers: Independent, numbers: list[int]) -> None:
    for number in numbers:
        servers.servers[number].kill()


def frozen(servers: Independent, numbers: list[int]) -> None:
    for number in numbers:
        servers.servers[number].pause()


def emptied(servers: Independent, numbers: list[int]) -> None:
    servers.empty(*numbers)


def restarted(servers: Independent, numbers: list[int]) -> None:
    for number in numbers:
        servers.servers[number].kill()
        servers.servers[number].start()


STRIKES = pytest.mark.parametrize("strike", [down, frozen, emptied, restarted])


@pytest.fixture
def five() -> Iterator[Independent]:
    need(Valkey)
    with independent(5) as made:
        yield made


@pytest.fixture
def rivals(five: Independent, make_rivals: Any) -> Rivals:
    made: Rivals = make_rivals(locks=lambda: five.connect(socket_timeout_s=3.0))
    assert made.ship(order=100) == "first"
    assert made.ship_too(order=101) == "second"
    return made


@STRIKES
def test_a_minority_in_trouble_is_not_felt(
    five: Independent, rivals: Rivals, strike: Strike
) -> None:
    """If two servers of five fail in a body, there is one effect, and other work goes on as
    before."""
    expect_one_effect(rivals, lambda: strike(five, [1, 3]))
    took = []
    for order in range(2, 12):
        began = time.monotonic()
        assert rivals.ship_too(order=order) == "second"
        took.append(time.monotonic() - began)
    assert sorted(took)[5] < 1.0  # the timeout is three seconds
    assert "lock_unavailable" not in rivals.second.happened
    assert all(rivals.shipped(order) == ["second"] for order in range(2, 12))


@STRIKES
def test_of_a_majority_in_trouble_the_ledger_decides(
    five: Independent, rivals: Rivals, strike: Strike
) -> None:
    """If three of five servers fail in a body, the ledger decides: one effect, and other work is
    done."""
    expect_one_effect(rivals, lambda: strike(five, [0, 2, 4]))
    assert rivals.ship_too(order=2) == "second"
    assert rivals.shipped(2) == ["second"]
    unavailable = "lock_unavailable" in rivals.second.happened
    assert unavailable is (strike in (down, frozen))


def test_split_between_two_sides(five: Independent, make_rivals: Any) -> None:
    """If one side of the network reaches two servers of five, the ledger decides there."""
    rivals = make_rivals(
        locks=lambda: _side(five, [0, 1, 2]), second_locks=lambda: _side(five, [3, 4])
    )
    expect_one_effect(rivals, lambda: None)
    assert "lock_unavailable" in rivals.second.happened
    assert "lock_unavailable" not in rivals.first.happened


def _side(five: Independent, reached: list[int]) -> Any:
    hosts = [
        f"127.0.0.1:{server.port if number in reached else 1}"
        for number, server in enumerate(five.servers)
    ]
    # All that it reaches are needed: one that is busy is not away.
    return RedlockLocks("redlock://" + ",".join(hosts), socket_timeout_s=10.0)
