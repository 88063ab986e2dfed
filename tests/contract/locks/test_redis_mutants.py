"""Whether the suite would notice a mistake in the line of waiters: each line of the scripts that
the order hangs on is broken once, on a real server."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest

from pytest_taskguard.lock_contract import server as waiting
from pytest_taskguard.lock_contract.order import TestOrder as Order
from pytest_taskguard.lock_contract.waits import TestWait as Wait
from support.lock_servers import LockServer
from taskguard.locks.base import LockProvider
from taskguard.locks.redis import RedisLocks

Test = Callable[[LockProvider, LockServer], object]
MUTANTS: dict[str, tuple[str, str, Test]] = {
    "asking again costs the place": (
        "if not hear(lock, owner) or not redis.call('ZSCORE', line, owner) then",
        "if hear(lock, owner) or true then redis.call('ZREM', line, owner)",
        Order().test_first_come,
    ),
    "last come, first served": (
        "redis.call('ZRANGE', line, place, place)",
        "redis.call('ZRANGE', line, -1 - place, -1 - place)",
        Order().test_first_come,
    ),
    "frees what it should keep": (
        "redis.call('SET', lock, who, 'PX', GRACE_MS)",
        "",
        Order().test_nobody_barges_in,
    ),
    "wakes nobody": ("push(beside(lock, ':wake:', who)", "push('nobody'", Wait().test_woken),
    "nobody looks": ("push(lock .. ':look'", "push('nobody'", Order().test_dead_waiter),
    "waits for the dead": ("GRACE_MS = 50", "GRACE_MS = 5000", Order().test_dead_waiter),
    "calls the dead again": (
        "try('PEXPIRE', waits, ON_TIME_MS - 1)",
        "try('PEXPIRE', waits, WAITS_MS)",
        Order().test_dead_waiter,
    ),
    "forgets who was late": (
        "elseif left_ms < ON_TIME_MS then",
        "elseif left_ms < ON_TIME_MS then leave(lock, line, who) elseif false then",
        lambda locks, _: Order().test_late_waiter(locks),
    ),
    "refuses who is late": (
        "tonumber(place) < tonumber(theirs)",
        "false",
        Order().test_late_but_before_the_next,
    ),
    "stays in the line": (
        "if redis.call('ZREM', line, owner) == 0 then",
        "if true then",
        Order().test_given_up,
    ),
    "gives up what it was called for": (
        "if waited and redis.pcall('GET', lock) == owner then",
        "if false then",
        lambda locks, _: Order().test_given_up_when_called(locks),
    ),
    "what is kept is held": (
        "again = 0 -- it was kept",
        "again = 1 -- it was kept",
        Order().test_asked_twice,
    ),
    "holds and waits": ("if other ~= i then", "if false then", lambda locks, _: in_turn(locks)),
    "looks at the line only when it releases": (
        "value = waiting.keep_for_first(lock, line)",
        "value = false",
        Order().test_nobody_comes_in_between,
    ),
}


def in_turn(locks: LockProvider) -> None:
    Order().test_several_keys(locks)
    Order().test_several_keys_in_turn(locks)


class Mutant(RedisLocks):
    """Its scripts are wrong in one place."""

    def __init__(self, url: str, old: str, new: str) -> None:
        super().__init__(url)
        found = 0
        for script in (self._acquire, self._release):
            found += old.encode() in script.source
            script.source = script.source.replace(old.encode(), new.encode())
            script.sha = hashlib.sha1(script.source, usedforsecurity=False).hexdigest().encode()
        assert found, old


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
@pytest.mark.parametrize("name", MUTANTS)
def test_mistakes_are_found(server: LockServer, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test that says what is right fails for the script that does it wrong."""
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.4)  # what never comes need not be waited for
    old, new, test = MUTANTS[name]
    assert server.url is not None
    url = server.url
    wrong = LockServer(
        lambda: Mutant(url, old, new), server.forget, server.leftovers, url, server.deafened
    )
    first = wrong.connect()
    with pytest.raises(AssertionError):
        test(first, wrong)
