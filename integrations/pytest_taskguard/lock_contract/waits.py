"""Refused owners wait, and a release wakes them at once.

Guarantees: a wait counts as short if one of several tries is short, because a busy machine may take
longer at times. For the order of waiters, see `order.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from pytest_taskguard.lock_contract import server
from pytest_taskguard.lock_contract.server import KEY, LockServer, renewed, take
from taskguard.locks import Granted, Held, LockProvider, Owner, Renewal, new_owner

__all__ = ["Ended", "TestWait", "fresh", "took_s", "took_turn", "tried", "unless_late", "within"]


class TestWait:
    def test_woken(self, locks: LockProvider, server: LockServer) -> None:
        """A release wakes an owner that was refused and waits, at once."""
        waiter = server.connect()

        def wait() -> float:
            key, holder, me = fresh("a"), new_owner("m"), new_owner("n")
            take(locks, key, holder)
            assert isinstance(take(waiter, key, me, wait_s=30.0), Held)
            woken = Ended(lambda: waiter.wait(key[0], me, timeout_s=30.0))
            time.sleep(0.1)  # until it blocks
            locks.release(key, holder)
            woken.join()
            assert isinstance(take(waiter, key, me), Granted)
            return woken.took_s

        wait()  # over connections that are made now
        assert within(0.6, wait)

    def test_release_before_the_wait(self, locks: LockProvider) -> None:
        """A release between the refusal and the wait is not missed."""

        def wait() -> float:
            key, holder, me = fresh("a"), new_owner("m"), new_owner("n")
            take(locks, key, holder)
            assert isinstance(take(locks, key, me, wait_s=30.0), Held)
            locks.release(key, holder)
            return took_s(lambda: locks.wait(key[0], me, timeout_s=30.0))

        assert within(0.5, wait)

    def test_bounded(self, locks: LockProvider) -> None:
        """A wait ends after its timeout, or after about a second. Then the caller tries again."""
        take(locks, KEY, new_owner("m"))
        me = new_owner("n")

        def wait(timeout_s: float) -> Callable[[], float]:
            return lambda: took_s(lambda: locks.wait(KEY[0], me, timeout_s=timeout_s))

        for timeout_s, least_s, most_s in [(0.0, 0.0, 0.1), (-1.0, 0.0, 0.1), (0.2, 0.15, 0.7)]:
            assert within(most_s, wait(timeout_s), least_s=least_s)
        assert within(1.9, wait(30.0))

    def test_one_after_the_other(self, locks: LockProvider, server: LockServer) -> None:
        """Many waiters for one key all get it. Each is woken by the release before it."""
        # Eight waiters that poll once a second would take several seconds.
        assert within(2.0, lambda: self._all_in_a_row(locks, server, 8))

    def _all_in_a_row(self, locks: LockProvider, server: LockServer, count: int) -> float:
        holder = new_owner("m")
        got: list[Owner] = []
        take(locks, KEY, holder)

        def worker() -> None:
            mine, me = server.connect(), new_owner("w")
            if took_turn(mine, KEY, me):
                got.append(me)
                mine.release(KEY, me)

        threads = [threading.Thread(target=worker, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        released_at = time.monotonic()
        locks.release(KEY, holder)
        for thread in threads:
            thread.join(30.0)
        assert len(set(got)) == count
        return time.monotonic() - released_at

    def test_several_keys(self, locks: LockProvider, server: LockServer) -> None:
        """If a waiter for several keys is woken for one of them, and another is taken, the next
        waiter for the free key is woken."""
        assert within(0.5, lambda: self._passed_on(locks, server))

    def _passed_on(self, locks: LockProvider, server: LockServer) -> float:
        a, b = fresh("a")[0], fresh("b")[0]
        first, second, greedy, mine = (new_owner(name) for name in ("m", "n", "both", "single"))
        take(locks, (a,), first)
        take(locks, (b,), second)
        both, single = server.connect(), server.connect()
        assert isinstance(take(both, (a, b), greedy, wait_s=30.0), Held)
        assert isinstance(take(single, (a,), mine, wait_s=30.0), Held)
        woken = Ended(lambda: both.wait(a, greedy, timeout_s=30.0))
        time.sleep(0.1)  # it is first in the line
        locks.release((a,), first)
        woken.join()
        assert isinstance(take(both, (a, b), greedy, wait_s=30.0), Held)
        waited_s = took_s(lambda: single.wait(a, mine, timeout_s=30.0))
        assert isinstance(take(single, (a,), mine), Granted)
        locks.release((a,), mine)
        locks.release((b,), second)
        return waited_s

    def test_several_keys_in_turn(self, locks: LockProvider, server: LockServer) -> None:
        """The next waiter is also woken if the key that is taken comes before the free key."""
        assert within(0.5, lambda: self._passed_on_before_asking(locks, server))

    def _passed_on_before_asking(self, locks: LockProvider, server: LockServer) -> float:
        a, b = fresh("a")[0], fresh("b")[0]
        first, second, greedy, mine = (new_owner(name) for name in ("m", "n", "both", "single"))
        both, single = server.connect(), server.connect()
        take(locks, (b,), second)
        assert isinstance(take(both, (a, b), greedy, wait_s=30.0), Held)
        assert isinstance(take(single, (b,), mine, wait_s=30.0), Held)
        woken = Ended(lambda: both.wait(b, greedy, timeout_s=30.0))
        time.sleep(0.1)  # it is first in the line
        take(locks, (a,), first)
        locks.release((b,), second)
        woken.join()
        assert isinstance(take(both, (a, b), greedy, wait_s=30.0), Held)
        waited_s = took_s(lambda: single.wait(b, mine, timeout_s=30.0))
        assert isinstance(take(single, (b,), mine), Granted)
        return waited_s

    def test_given_up(self, locks: LockProvider) -> None:
        """A waiter that gave up by a release blocks no other waiter, and does not free the holder's
        key."""
        holder, gone, other = new_owner("m"), new_owner("gone"), new_owner("n")
        take(locks, KEY, holder)
        assert isinstance(take(locks, KEY, gone, wait_s=30.0), Held)
        assert locks.release(KEY, gone) is False
        assert renewed(locks, KEY, holder) == Renewal.RENEWED
        assert locks.release(KEY, holder) is True
        assert isinstance(take(locks, KEY, other), Granted)
        assert locks.release(KEY, other) is True


def fresh(name: str) -> tuple[str]:
    """Return a new key that begins with this name, so that keys sort by their names."""
    return (f"{name}:{new_owner().nonce}",)


def took_turn(locks: LockProvider, keys: tuple[str, ...], owner: Owner) -> Granted | None:
    """Wait for the keys as a future holder does. Return None if its turn never comes."""
    until = time.monotonic() + 3 * server.PATIENCE_S
    while (left_s := until - time.monotonic()) > 0:
        answer = take(locks, keys, owner, wait_s=left_s)
        if isinstance(answer, Granted):
            return answer
        locks.wait(answer.key, owner, timeout_s=min(left_s, answer.remaining_s + 0.01))
    return None


def took_s(call: Callable[[], object]) -> float:
    """Return how long the call took."""
    started = time.monotonic()
    call()
    return time.monotonic() - started


def within(most_s: float, seconds: Callable[[], float], *, least_s: float = 0.0) -> bool:
    """Return True if one of five tries takes this long: a busy machine may take longer at times."""
    return any(least_s <= seconds() < most_s for _ in range(5))


def tried(attempt: Callable[[], bool], *, most: int = 5) -> bool:
    """Return True if one of `most` tries succeeds: a busy machine may be late at times."""
    return any(attempt() for _ in range(most))


def unless_late(right: bool, since_s: float, most_s: float) -> bool:
    """Return `right`. Fail if it is False although at most `most_s` have passed since `since_s`."""
    assert right or time.monotonic() - since_s > most_s
    return right


class Ended:
    """A call in a thread, and how long it took."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.took_s = 0.0
        self.ended = False
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._started = time.monotonic()
        self._thread.start()

    def _run(self) -> None:
        self._call()
        self.took_s = time.monotonic() - self._started
        self.ended = True

    def join(self) -> None:
        self._thread.join(30.0)
        assert self.ended, "the call did not end"
