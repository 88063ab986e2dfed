"""The suite detects mistakes in the line of waiters and in shared keys.

Each line of the scripts that order and limits depend on is broken once, on a real server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest

from pytest_taskguard.lock_contract import server as waiting
from pytest_taskguard.lock_contract.hints import TestHints as Hints
from pytest_taskguard.lock_contract.order import TestOrder as Order
from pytest_taskguard.lock_contract.server import granted
from pytest_taskguard.lock_contract.sharing import TestSharing as Sharing
from pytest_taskguard.lock_contract.sharing import TestSharingInOrder as Shared
from pytest_taskguard.lock_contract.sharing import ask
from pytest_taskguard.lock_contract.waits import TestWait as Wait
from pytest_taskguard.lock_contract.waits import fresh
from support.lock_servers import LockServer
from taskguard.locks.base import NO_LIMIT, Granted, Held, LockProvider
from taskguard.locks.redis import RedisLocks
from taskguard.model.lease import new_owner

pytestmark = pytest.mark.once

Test = Callable[[LockProvider, LockServer], object]
MUTANTS: dict[str, tuple[str, str, Test]] = {
    "a repeated request loses its position": (
        "if not hear(lock, owner) or not redis.call('ZSCORE', line, owner) then",
        "if hear(lock, owner) or true then redis.call('ZREM', line, owner)",
        Order().test_first_come,
    ),
    "last come, first served": (
        "redis.call('ZRANGE', line, place, place)",
        "redis.call('ZRANGE', line, -1 - place, -1 - place)",
        Order().test_first_come,
    ),
    "a release reserves nothing": (
        "redis.call('SET', lock, who, 'PX', GRACE_MS)",
        "",
        Order().test_no_newcomer_overtakes,
    ),
    "a release wakes no waiter": (
        "push(beside(lock, ':wake:', who)",
        "push('nobody'",
        Wait().test_woken,
    ),
    "no waiter looks for a dead one": (
        "push(lock .. ':look'",
        "push('nobody'",
        Order().test_dead_waiter,
    ),
    "waits long for a dead waiter": ("GRACE_MS = 50", "GRACE_MS = 5000", Order().test_dead_waiter),
    "reserves the key for a dead waiter again": (
        "try('PEXPIRE', waits, ON_TIME_MS - 1)",
        "try('PEXPIRE', waits, WAITS_MS)",
        Order().test_dead_waiter,
    ),
    "removes a late waiter from the line": (
        "elseif left_ms < ON_TIME_MS then",
        "elseif left_ms < ON_TIME_MS then leave(lock, line, who) elseif false then",
        lambda locks, _: Order().test_late_waiter(locks),
    ),
    "refuses a late waiter": (
        "tonumber(place) < tonumber(theirs)",
        "false",
        Order().test_late_but_before_the_next,
    ),
    "stays in the line": (
        "if redis.call('ZREM', line, owner) == 0 then",
        "if true then",
        Order().test_given_up,
    ),
    "keeps a reservation that its waiter gave up": (
        "if waited and redis.pcall('GET', lock) == owner then",
        "if false then",
        lambda locks, _: Order().test_given_up_when_called(locks),
    ),
    "a reservation counts as a grant": (
        "again = 0 -- the key was reserved",
        "again = 1 -- the key was reserved",
        Order().test_asked_twice,
    ),
    "waits in several lines": (
        "if other ~= i then",
        "if false then",
        lambda locks, _: in_turn(locks),
    ),
    "looks at the line only when it releases": (
        "value = waiting.keep_for_first(lock, line)",
        "value = false",
        Order().test_no_newcomer_after_a_dead_holder,
    ),
    "the hint is for the holder alone": (
        "local hint = redis.call('DEL', KEYS[#KEYS])",
        "local hint = freed * redis.call('DEL', KEYS[#KEYS])",
        lambda locks, _: Hints().test_not_the_holder(locks),
    ),
    "the hint stays": (
        "redis.call('DEL', KEYS[#KEYS])",
        "redis.call('EXISTS', KEYS[#KEYS])",
        lambda locks, _: Hints().test_taken_once(locks),
    ),
    "reserves the key without a hint": (
        "if hint == 1 and freed == 1 then",
        "if freed == 1 then",
        lambda locks, _: Hints().test_given_back(locks),
    ),
    "a former holder reserves the key": (
        "if hint == 1 and freed == 1 then",
        "if hint == 1 then",
        lambda locks, _: Hints().test_not_kept_without_a_hint(locks),
    ),
    "does not reserve the key": (
        "if hint == 1 and freed == 1 then",
        "if false then",
        lambda locks, _: Hints().test_kept_for_the_promoted_message(locks),
    ),
    "takes the key from a waiter": (
        "redis.pcall('SET', KEYS[1], ARGV[2], 'NX',",
        "redis.pcall('SET', KEYS[1], ARGV[2],",
        lambda locks, _: Hints().test_waiters_go_before_the_promoted_message(locks),
    ),
    "a promoted message takes a held key": (
        "if ARGV[7] and redis.pcall('GET', KEYS[1]) == ARGV[7] then",
        "if ARGV[7] then",
        lambda locks, _: Hints().test_taken_before_the_promoted_message(locks),
    ),
    "reports every key as held": (
        "return 1 - redis.call('EXISTS', KEYS[1])",
        "return 0",
        lambda locks, _: Hints().test_free_key(locks),
    ),
    "grants one more than the limit": (
        "elseif held and held < limit then",
        "elseif held and held <= limit then",
        lambda locks, server: Sharing().test_limit(locks, server),
    ),
    "no limit": (
        "elseif held and held < limit then",
        "elseif held then",
        lambda locks, _: Sharing().test_own_limit(locks),
    ),
    "a writer beside readers": (
        "shared = (waiting.sharers(lock)",
        "shared = (0 * waiting.sharers(lock)",
        lambda locks, _: Sharing().test_readers(locks),
    ),
    "does not say that it is shared": (
        "shared and 1 or 0}",
        "0}",
        lambda locks, _: Sharing().test_readers(locks),
    ),
    "a share that has ended counts": (
        "elseif not first[1] or tonumber(first[2]) > now then",
        "elseif true then",
        lambda locks, _: Sharing().test_runs_out(locks),
    ),
    "the key ends with the newest lease": (
        "local _, ends_ms = longest(lock)",
        "local ends_ms = now + ttl_ms",
        lambda locks, _: Sharing().test_shorter_leases(locks),
    ),
    "the key ends with the last renewal": (
        "math.max(now + ttl_ms, last_ms) - now",
        "ttl_ms",
        lambda locks, _: Sharing().test_shorter_leases(locks),
    ),
    "does not renew a share": (
        "redis.call('ZADD', KEYS[i], ends_ms, owner)",
        "",
        lambda locks, _: Sharing().test_renewed(locks),
    ),
    "renews what has ended": (
        "if ends_ms <= now then",
        "if ends_ms == 0 then",
        lambda locks, _: Sharing().test_renewal_creates_nothing(locks),
    ),
    "makes a share by a renewal": (
        "if ends_ms <= now then",
        "if false then",
        lambda locks, _: Sharing().test_renewed(locks),
    ),
    "a release frees no share": (
        "redis.call('ZREM', lock, owner) == 1",
        "false",
        lambda locks, server: Sharing().test_released(locks, server),
    ),
    "always reports a release": (
        "return had and not waited and 1 or 0",
        "return 1",
        lambda locks, server: Sharing().test_released(locks, server),
    ),
    "a token for each share": (
        "if not beside or token == 0 then",
        "if true then",
        lambda locks, _: Sharing().test_tokens(locks),
    ),
    "the token of an earlier holder": (
        "if not beside or token == 0 then",
        "if token == 0 then",
        lambda locks, _: Sharing().test_tokens(locks),
    ),
    "reserved shares count as held": (
        "(longest == owner or not redis.call('ZSCORE', line, longest))",
        "true",
        lambda locks, _: Shared().test_readers_together(locks),
    ),
    "the reservation for a waiter counts as its share": (
        "waiting.leave(lock, line, owner) and longest == owner then",
        "waiting.leave(lock, line, owner) and false then",
        lambda locks, _: last_of_a_row(locks),
    ),
    "a newcomer overtakes waiters": (
        "if in_line and not mine then",
        "if in_line and waits and not mine then waiting.hear(lock, owner)",
        lambda locks, server: Shared().test_first_come(locks, server),
    ),
    "reserves one share at a time": (
        "held, place = held + 1, place + 1",
        "return first",
        lambda locks, _: Shared().test_readers_together(locks),
    ),
    "reserves more shares than the limit": (
        "if held >= limit then",
        "if held >= limit and limit == 1 then",
        lambda locks, server: Shared().test_first_come(locks, server),
    ),
    "readers overtake a writer": (
        "return first -- later waiters do not overtake it",
        "limit, place = nil, place + 1",
        lambda locks, _: Shared().test_writer_is_not_starved(locks),
    ),
    "waiters behind one that gave up get nothing": (
        "    elseif waited then",
        "    elseif false then",
        lambda locks, _: Shared().test_writer_gives_up(locks),
    ),
    "a reserved share that is given up is lost": (
        "if held and (had or waited) then",
        "if held and had and not waited then",
        lambda locks, _: Shared().test_given_up_when_called(locks),
    ),
    "the release of a share wakes no waiter": (
        "if held and (had or waited) then",
        "if false then",
        lambda locks, server: Sharing().test_woken(locks, server),
    ),
}


def last_of_a_row(locks: LockProvider) -> None:
    """A delivery that was woken alone has a token above that of the writer before it."""
    for _ in range(5):
        key, writer, reader = fresh("a"), new_owner("w"), new_owner("r")
        before = granted(locks, key, writer, with_fence=True).fence
        assert isinstance(ask(locks, key, reader, NO_LIMIT, wait_s=30.0), Held)
        locks.release(key, writer)
        after = ask(locks, key, reader, NO_LIMIT, wait_s=30.0)
        assert isinstance(after, Granted)
        assert after.fence > before


def in_turn(locks: LockProvider) -> None:
    Order().test_several_keys(locks)
    Order().test_several_keys_in_turn(locks)


class Mutant(RedisLocks):
    """Redis scripts with one mistake."""

    def __init__(self, url: str, old: str, new: str) -> None:
        super().__init__(url)
        found = 0
        hint, shares = self._leave_hint, (self._share, self._unshare)
        for script in (self._acquire, self._release, *shares, self._renew, hint):
            found += old.encode() in script.source
            script.source = script.source.replace(old.encode(), new.encode())
            script.sha = hashlib.sha1(script.source, usedforsecurity=False).hexdigest().encode()
        assert found, old


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
@pytest.mark.parametrize("name", MUTANTS)
def test_mistakes_are_found(server: LockServer, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite's test fails with the mutant."""
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.4)  # the test waits for an event that never comes
    old, new, test = MUTANTS[name]
    assert server.url is not None
    url = server.url
    wrong = LockServer(
        lambda: Mutant(url, old, new), server.forget, server.leftovers, url, server.deafened
    )
    first = wrong.connect()
    # Some mistakes show only at a certain moment.
    assert any(is_found(test, first, wrong) for _ in range(5))


def is_found(test: Test, locks: LockProvider, server: LockServer) -> bool:
    """Return whether the test fails, on an empty server."""
    server.forget()
    try:
        test(locks, server)
    except AssertionError:
        return True
    return False
