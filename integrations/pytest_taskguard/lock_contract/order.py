"""Waiters are served first come, first served, for providers whose `traits.fair` says so.

Guarantees: the order, no owner in between, and no delay by waiters that are gone. A check that a
busy machine may spoil is tried several times. Does not guarantee an order among waiters for several
keys, or after the server has lost its memory.
"""

from __future__ import annotations

import threading
import time

import pytest

from pytest_taskguard.lock_contract.server import (
    KEY,
    TURN_S,
    WAITS_S,
    LockServer,
    abandoned,
    granted,
    renewed,
    slack_s,
    take,
    taken_over,
)
from pytest_taskguard.lock_contract.waits import (
    fresh,
    took_s,
    took_turn,
    tried,
    unless_late,
    within,
)
from pytest_taskguard.waiting import wait_until
from taskguard.locks import Granted, Held, LockProvider, Owner, Renewal, new_owner

__all__ = ["TestOrder"]


class TestOrder:
    @pytest.fixture(autouse=True)
    def _fair(self, locks: LockProvider) -> None:
        if not locks.traits.fair:
            pytest.skip("it promises no order")

    def test_first_come(self, locks: LockProvider, server: LockServer) -> None:
        """Waiters are served in the order in which they asked. A waiter that asks again keeps its
        position."""
        providers = [server.connect() for _ in range(8)]

        def in_order() -> bool:
            key, holder = fresh("a"), new_owner("m")
            owners = [new_owner(f"w{number}") for number in range(len(providers))]
            take(locks, key, holder)
            waiters = list(zip(owners, providers, strict=True))
            for owner, mine in waiters + waiters[::-1]:
                assert isinstance(take(mine, key, owner, wait_s=30.0), Held)
            got: list[Owner] = []

            def wait(owner: Owner, mine: LockProvider) -> None:
                if took_turn(mine, key, owner):
                    got.append(owner)
                    mine.release(key, owner)

            threads = [threading.Thread(target=wait, args=each) for each in reversed(waiters)]
            for thread in threads:
                thread.start()
            locks.release(key, holder)
            for thread in threads:
                thread.join(60.0)
            assert set(got) == set(owners)
            return got == owners

        assert tried(in_order)

    def test_no_newcomer_overtakes(self, locks: LockProvider, server: LockServer) -> None:
        """A released key belongs to the first waiter at once. Until the first waiter comes, all
        other owners are refused, with the first waiter as the holder."""

        def is_kept() -> bool:
            key, holder, first, second = fresh("a"), *(new_owner(name) for name in "mfs")
            take(locks, key, holder)
            for owner in (first, second):
                assert isinstance(take(locks, key, owner, wait_s=30.0), Held)
            strangers = [server.connect(), server.connect()]
            for stranger in strangers:
                stranger.holders(key[0])  # connects, which may take longer than a key is kept
            locks.release(key, holder)
            others = [
                take(locks, key, second, wait_s=30.0),
                take(strangers[0], key, new_owner("hasty")),
                take(strangers[1], key, new_owner("waits"), wait_s=30.0),
            ]
            kept = [isinstance(each, Held) and each.owner == first for each in others]
            return all(kept) and isinstance(take(locks, key, first, wait_s=30.0), Granted)

        assert tried(is_kept)

    def test_no_newcomer_after_a_dead_holder(self, locks: LockProvider, server: LockServer) -> None:
        """If the holder died, the key belongs to the first waiter when the lease ends."""

        lasts_s = iter((0.05, 0.2, 0.8, 2.0, 2.0))

        def runs_out_for_the_first() -> bool:
            key, first, second = fresh("a"), new_owner("first"), new_owner("second")
            abandoned(server, key, new_owner("dead"), ttl_s=next(lasts_s))
            asked_s, came_first = time.monotonic(), True
            if isinstance(take(locks, key, first, wait_s=30.0), Granted):
                return locks.traits.session  # the lease ended before a waiter came

            def first_is_granted() -> bool:
                nonlocal asked_s, came_first
                refused = isinstance(take(locks, key, second, wait_s=30.0), Held)
                came_first = unless_late(refused, asked_s, WAITS_S)
                asked_s = time.monotonic()
                return not came_first or isinstance(take(locks, key, first, wait_s=30.0), Granted)

            wait_until(first_is_granted, timeout_s=slack_s(locks))
            return came_first

        assert tried(runs_out_for_the_first)

    def test_dead_waiter(self, locks: LockProvider, server: LockServer) -> None:
        """A waiter that vanished is skipped nearly without a pause."""

        def wait() -> float:
            key, holder, second = fresh("a"), new_owner("m"), new_owner("second")
            take(locks, key, holder)
            gone = server.connect()
            assert isinstance(take(gone, key, new_owner("gone"), wait_s=30.0), Held)
            if gone is not locks:
                gone.close()
            assert isinstance(take(locks, key, second, wait_s=30.0), Held)
            took: list[float] = []
            waiter = server.connect()
            thread = threading.Thread(
                target=lambda: took.append(took_s(lambda: took_turn(waiter, key, second)))
            )
            thread.start()
            time.sleep(0.1)  # until it blocks
            locks.release(key, holder)
            thread.join(60.0)
            return took[0]

        assert within(0.7, wait)  # by asking once a second it would be more

    def test_late_waiter(self, locks: LockProvider) -> None:
        """A waiter that misses its turn keeps its position before the waiters behind it."""

        def kept_its_place() -> bool:
            key, holder, slow, second, third = fresh("a"), *(new_owner(name) for name in "mstu")
            take(locks, key, holder)
            for owner in (slow, second, third):
                assert isinstance(take(locks, key, owner, wait_s=30.0), Held)
            locks.release(key, holder)
            assert took_turn(locks, key, second)
            for owner in (third, slow):
                assert isinstance(take(locks, key, owner, wait_s=30.0), Held)
            locks.release(key, second)
            return called(locks, key) == slow

        assert tried(kept_its_place)

    def test_late_but_before_the_next(self, locks: LockProvider, server: LockServer) -> None:
        """A waiter that comes late gets the key, if the next one has not taken it."""

        def has_it() -> bool:
            key, holder, slow, second = fresh("a"), *(new_owner(name) for name in "msn")
            take(locks, key, holder)
            for owner in (slow, second):
                assert isinstance(take(locks, key, owner, wait_s=30.0), Held)
            locks.release(key, holder)

            probe = server.connect()
            after: list[Owner | None] = []

            def is_passed_over() -> bool:
                after.append(called(probe, key))
                return after[-1] != slow

            wait_until(is_passed_over)
            answer = take(locks, key, slow, wait_s=30.0)
            return after[-1] == second and isinstance(answer, Granted)

        assert tried(has_it)

    def test_given_up(self, locks: LockProvider, server: LockServer) -> None:
        """A waiter that gives up leaves nothing behind, and the next one is served at once."""
        holder, gone, second = new_owner("m"), new_owner("gone"), new_owner("second")
        take(locks, KEY, holder)
        for owner in (gone, second):
            assert isinstance(take(locks, KEY, owner, wait_s=30.0), Held)
        assert locks.release(KEY, gone) is False
        locks.release(KEY, holder)
        assert isinstance(take(locks, KEY, second, wait_s=30.0), Granted)
        assert locks.release(KEY, second) is True
        wait_until(lambda: server.leftovers() == [], message="nothing left of the waiters")

    def test_given_up_when_called(self, locks: LockProvider) -> None:
        """A waiter that gives up when its turn has come passes the turn on, and holds nothing."""

        def is_passed_on() -> bool:
            key, holder, gone, second = fresh("a"), *(new_owner(name) for name in "mgs")
            take(locks, key, holder)
            for owner in (gone, second):
                assert isinstance(take(locks, key, owner, wait_s=30.0), Held)
            locks.release(key, holder)
            assert locks.release(key, gone) is False
            return called(locks, key) == second

        assert tried(is_passed_on)

    def test_released_twice(self, locks: LockProvider, server: LockServer) -> None:
        """A release is repeated if its reply was lost. It takes nothing from the next waiter."""
        holder, first = new_owner("m"), new_owner("first")
        take(locks, KEY, holder)
        assert isinstance(take(locks, KEY, first, wait_s=30.0), Held)
        locks.release(KEY, holder)
        assert isinstance(take(locks, KEY, first, wait_s=30.0), Granted)
        assert server.connect().release(KEY, holder) is False
        assert renewed(locks, KEY, first) == Renewal.RENEWED

    def test_asked_twice(self, locks: LockProvider, server: LockServer) -> None:
        """An acquire is repeated if its reply was lost. The owner has one position and one grant,
        with a token above the former holder's."""
        holder, first, second = new_owner("m"), new_owner("first"), new_owner("second")
        before = granted(locks, KEY, holder, with_fence=True).fence
        for owner in (first, second):
            for provider in (locks, server.connect()):
                assert isinstance(take(provider, KEY, owner, wait_s=30.0), Held)
        locks.release(KEY, holder)
        one = taken_over(locks, KEY, first, with_fence=True)  # at once, if it was not late
        again = granted(server.connect(), KEY, first, with_fence=True)
        assert one.fence == again.fence
        assert one.fence > before or not locks.traits.tokens
        locks.release(KEY, first)
        assert isinstance(take(locks, KEY, second, wait_s=30.0), Granted)
        locks.release(KEY, second)
        assert isinstance(take(locks, KEY, new_owner("free")), Granted)

    def test_memory_loss(self, locks: LockProvider, server: LockServer) -> None:
        """If the server forgets the waiters, they queue again, and all are served."""
        holder, owners = new_owner("m"), [new_owner("w") for _ in range(3)]
        take(locks, KEY, holder)
        got: list[Owner] = []

        def wait(owner: Owner) -> None:
            mine = server.connect()
            if took_turn(mine, KEY, owner):
                got.append(owner)
                mine.release(KEY, owner)

        threads = [threading.Thread(target=wait, args=(owner,)) for owner in owners]
        for thread in threads:
            thread.start()
        server.forget()
        for thread in threads:
            thread.join(60.0)
        assert set(got) == set(owners)

    def test_several_keys(self, locks: LockProvider) -> None:
        """A waiter for several keys holds none of them while it waits, and waits for one of them
        only. Waiters for its other keys are served at once."""

        def holds_none() -> bool:
            (a,), (b,) = fresh("a"), fresh("b")
            holders = [new_owner("m"), new_owner("n")]
            both, single = new_owner("both"), new_owner("single")
            for key, holder in zip((a, b), holders, strict=True):
                take(locks, (key,), holder)
            answer = take(locks, (a, b), both, wait_s=30.0)
            assert isinstance(answer, Held)
            other = b if answer.key == a else a
            first, second = holders if answer.key == a else reversed(holders)
            assert isinstance(take(locks, (answer.key,), single, wait_s=30.0), Held)
            since_s = time.monotonic()
            locks.release((answer.key,), first)
            again = take(locks, (a, b), both, wait_s=30.0)
            assert isinstance(again, Held)
            if not unless_late(again.key == other, since_s, TURN_S):
                return False  # another was called
            next_one = called(locks, (answer.key,))
            assert took_turn(locks, (answer.key,), single)
            locks.release((answer.key,), single)
            locks.release((other,), second)
            assert took_turn(locks, (a, b), both)
            assert locks.release((a, b), both) is True
            return next_one == single

        assert tried(holds_none)

    def test_several_keys_in_turn(self, locks: LockProvider) -> None:
        """A waiter for several keys also holds none of them if the taken key comes before the key
        that is reserved for it."""

        def holds_none() -> bool:
            (a,), (b,) = fresh("a"), fresh("b")
            first, second, both, single = (new_owner(name) for name in "mnbs")
            take(locks, (b,), second)
            assert isinstance(take(locks, (a, b), both, wait_s=30.0), Held)
            assert isinstance(take(locks, (b,), single, wait_s=30.0), Held)
            take(locks, (a,), first)
            locks.release((b,), second)
            assert isinstance(take(locks, (a, b), both, wait_s=30.0), Held)
            next_one = called(locks, (b,))
            assert took_turn(locks, (b,), single)
            return next_one == single

        assert tried(holds_none)


def called(locks: LockProvider, keys: tuple[str, ...]) -> Owner | None:
    """Return the owner that has the key now, or None if it was free."""
    probe = new_owner("probe")
    answer = take(locks, keys, probe)
    if isinstance(answer, Held):
        return answer.owner
    locks.release(keys, probe)
    return None
