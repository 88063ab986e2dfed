"""A release tells its owner that a message waits for the key in a ledger.

For providers whose `traits.hints` says so. Guarantees: if a waiter leaves a hint while the holder
releases the key, the waiter finds the key free, or the holder finds the hint. A key that is
released with a hint is reserved for the message that is promoted. Does not guarantee that a hint
outlives a server's memory.
"""

from __future__ import annotations

import threading
import time
from typing import cast

import pytest

from pytest_taskguard.lock_contract.server import KEY, TURN_S, LockServer, granted, take
from pytest_taskguard.lock_contract.waits import fresh, tried, unless_late
from taskguard.locks import (
    KEPT_S,
    PROMOTED,
    Granted,
    Held,
    HintingLocks,
    LockProvider,
    Owner,
    new_owner,
)

__all__ = ["TestHints"]


class TestHints:
    @pytest.fixture(autouse=True)
    def _hints(self, locks: LockProvider) -> None:
        if not locks.traits.hints:
            pytest.skip("it keeps no hints")

    def test_taken_once(self, locks: LockProvider) -> None:
        """The next release takes the hint, however many waiters left one."""
        hinting, holder = hinting_of(locks), new_owner("holder")
        granted(locks, KEY, holder)
        assert hinting.leave_hint(KEY[0]) is False
        assert hinting.leave_hint(KEY[0]) is False
        assert hinting.release_and_take_hint(KEY[0], holder) == (True, True)
        assert hinting.release_and_take_hint(KEY[0], holder) == (False, False)

    def test_free_key(self, locks: LockProvider) -> None:
        """A waiter that leaves a hint learns that the key is free, despite hints of other keys."""
        hinting, holder = hinting_of(locks), new_owner("holder")
        granted(locks, ("other",), new_owner("another"))
        assert hinting.leave_hint(KEY[0]) is True
        granted(locks, KEY, holder)
        assert hinting.release_and_take_hint("other", holder) == (False, False)
        assert hinting.release_and_take_hint(KEY[0], holder) == (True, True)

    def test_not_the_holder(self, locks: LockProvider) -> None:
        """A release by an owner that does not hold the key takes the hint, but does not free the
        key."""
        hinting, holder = hinting_of(locks), new_owner("holder")
        granted(locks, KEY, holder)
        hinting.leave_hint(KEY[0])
        assert hinting.release_and_take_hint(KEY[0], new_owner("stranger")) == (False, True)
        assert isinstance(take(locks, KEY, new_owner("next")), Held)

    def test_a_plain_release_leaves_it(self, locks: LockProvider) -> None:
        """A release by an owner without a ledger leaves the hint to owners with one."""
        hinting, holder, heir = hinting_of(locks), new_owner("holder"), new_owner("heir")
        granted(locks, KEY, holder)
        hinting.leave_hint(KEY[0])
        locks.hand_over(KEY, holder, to=heir, ttl_s=30.0)
        locks.release(KEY, holder)
        assert hinting.release_and_take_hint(KEY[0], heir) == (True, True)

    def test_forgotten(self, locks: LockProvider, server: LockServer) -> None:
        """A server that has forgotten the key has forgotten the hint."""
        hinting, holder = hinting_of(locks), new_owner("holder")
        granted(locks, KEY, holder)
        hinting.leave_hint(KEY[0])
        server.forget()
        assert hinting.release_and_take_hint(KEY[0], holder)[1] is False

    def test_no_waiter_is_missed(self, server: LockServer) -> None:
        """At any moment, a waiter that leaves a hint finds the key free, or a release finds the
        hint."""
        waiter, holder = hinting_of(server.connect()), hinting_of(server.connect())
        both = threading.Barrier(2)
        saw: list[bool] = []

        def wait() -> None:
            both.wait()
            saw.append(waiter.leave_hint(KEY[0]))

        for _ in range(50):
            owner = new_owner("holder")
            assert isinstance(
                holder.acquire(KEY, owner, ttl_s=30.0, with_fence=False, wait_s=0.0), Granted
            )
            thread = threading.Thread(target=wait)
            thread.start()
            both.wait()
            _, hint = holder.release_and_take_hint(KEY[0], owner)
            thread.join()
            assert hint or saw.pop()
            saw.clear()
            while holder.release_and_take_hint(KEY[0], PROMOTED)[1]:
                pass

    def test_kept_for_the_promoted_message(self, locks: LockProvider) -> None:
        """A key that is released with a hint is taken for all others, even if they leave a hint."""

        def is_kept() -> bool:
            key, called = fresh("a"), new_owner("called")
            since_s = time.monotonic()
            hinting = released_with_hint(locks, key)
            held = take(locks, key, new_owner("newcomer"))
            is_free = hinting.leave_hint(key[0])
            if not unless_late(isinstance(held, Held) and not is_free, since_s, KEPT_S):
                return False
            assert isinstance(held, Held)
            assert held.owner == PROMOTED
            assert 0.0 < held.remaining_s <= KEPT_S
            for _ in range(2):
                assert isinstance(acquire_promoted(hinting, called, key), Granted)
            held = take(locks, key, new_owner("newcomer"))
            assert isinstance(held, Held)
            assert held.owner == called
            assert held.remaining_s > KEPT_S
            assert hinting.release_and_take_hint(key[0], called) == (True, True)
            return True

        assert tried(is_kept)

    def test_given_back(self, locks: LockProvider) -> None:
        """If no message is promoted, the key is free again, unless there is another hint."""

        def is_given_back() -> bool:
            key, since_s = fresh("a"), time.monotonic()
            hinting = released_with_hint(locks, key)
            hinting.leave_hint(key[0])
            is_right = (
                hinting.release_and_take_hint(key[0], PROMOTED) == (True, True)
                and isinstance(take(locks, key, new_owner("newcomer")), Held)
                and hinting.release_and_take_hint(key[0], PROMOTED) == (True, False)
                and hinting.leave_hint(key[0]) is True
            )
            return unless_late(is_right, since_s, KEPT_S)

        assert tried(is_given_back)

    def test_not_kept_for_long(self, locks: LockProvider) -> None:
        """If the promoted message never arrives, the key becomes free again."""
        released_with_hint(locks)
        while isinstance(take(locks, KEY, new_owner("newcomer")), Held):
            time.sleep(0.05)

    def test_not_kept_without_a_hint(self, locks: LockProvider) -> None:
        """A release by an owner that has lost the key does not reserve it."""
        hinting, holder = hinting_of(locks), new_owner("holder")
        granted(locks, KEY, holder)
        hinting.release_and_take_hint(KEY[0], holder)
        hinting.leave_hint(KEY[0])
        hinting.release_and_take_hint(KEY[0], holder)
        granted(locks, KEY, new_owner("newcomer"))

    def test_taken_before_the_promoted_message(self, locks: LockProvider) -> None:
        """If another owner has taken the key by then, a promoted message is refused."""
        hinting, holder = hinting_of(locks), new_owner("holder")
        granted(locks, KEY, holder)
        held = acquire_promoted(hinting, new_owner("called"))
        assert isinstance(held, Held)
        assert held.owner == holder

    def test_waiters_go_before_the_promoted_message(self, locks: LockProvider) -> None:
        """A promoted message comes after the waiters for which the server reserves the key."""
        if not locks.traits.fair:
            pytest.skip("it keeps no positions")
        hinting = hinting_of(locks)

        def goes_first() -> bool:
            key, holder, waiter = fresh("a"), new_owner("holder"), new_owner("waiter")
            granted(locks, key, holder)
            assert isinstance(take(locks, key, waiter, wait_s=5.0), Held)
            hinting.leave_hint(key[0])
            since_s = time.monotonic()
            assert hinting.release_and_take_hint(key[0], holder) == (True, True)
            answer = acquire_promoted(hinting, new_owner("called"), key)
            is_first = isinstance(answer, Held) and isinstance(take(locks, key, waiter), Granted)
            return unless_late(is_first, since_s, TURN_S)

        assert tried(goes_first)


def released_with_hint(locks: LockProvider, key: tuple[str] = KEY) -> HintingLocks:
    """Release the key with a hint, and return the provider."""
    hinting, holder = hinting_of(locks), new_owner("holder")
    granted(locks, key, holder)
    hinting.leave_hint(key[0])
    assert hinting.release_and_take_hint(key[0], holder) == (True, True)
    return hinting


def acquire_promoted(locks: HintingLocks, owner: Owner, key: tuple[str] = KEY) -> Granted | Held:
    """Take the key as a promoted message does."""
    return locks.acquire_promoted(key[0], owner, ttl_s=30.0, wait_s=0.0)


def hinting_of(locks: LockProvider) -> HintingLocks:
    """Return the provider as one that keeps hints."""
    return cast("HintingLocks", locks)
