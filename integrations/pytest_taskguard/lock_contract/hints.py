"""Whoever releases a key is told that somebody waits for it in a ledger: for providers whose
`traits.hints` says so.

Guarantees: of one who leaves a hint, and one who releases, one at least finds the other. Does not
guarantee that a hint outlives a server's memory.
"""

from __future__ import annotations

import threading
from typing import cast

import pytest

from pytest_taskguard.lock_contract.server import KEY, LockServer, granted, take
from taskguard.lease import new_owner
from taskguard.locks.base import Granted, Held, HintingLocks, LockProvider

__all__ = ["TestHints"]


class TestHints:
    @pytest.fixture(autouse=True)
    def _hints(self, locks: LockProvider) -> None:
        if not locks.traits.hints:
            pytest.skip("it keeps no hints")

    def test_told_once(self, locks: LockProvider) -> None:
        """Who releases next takes the hint; however many left one."""
        hinting, holder = hinting_of(locks), new_owner("holder")
        granted(locks, KEY, holder)
        assert hinting.leave_hint(KEY[0]) is False
        assert hinting.leave_hint(KEY[0]) is False
        assert hinting.release_and_take_hint(KEY[0], holder) == (True, True)
        assert hinting.release_and_take_hint(KEY[0], holder) == (False, False)

    def test_nobody_holds_it(self, locks: LockProvider) -> None:
        """Who leaves a hint is told that the key is free, and by no hint of another key."""
        hinting, holder = hinting_of(locks), new_owner("holder")
        granted(locks, ("other",), new_owner("another"))
        assert hinting.leave_hint(KEY[0]) is True
        granted(locks, KEY, holder)
        assert hinting.release_and_take_hint("other", holder) == (False, False)
        assert hinting.release_and_take_hint(KEY[0], holder) == (True, True)

    def test_not_the_holder(self, locks: LockProvider) -> None:
        """Also who does not hold the key any more, or never did, takes the hint; the key stays."""
        hinting, holder = hinting_of(locks), new_owner("holder")
        granted(locks, KEY, holder)
        hinting.leave_hint(KEY[0])
        assert hinting.release_and_take_hint(KEY[0], new_owner("stranger")) == (False, True)
        assert isinstance(take(locks, KEY, new_owner("next")), Held)

    def test_a_plain_release_leaves_it(self, locks: LockProvider) -> None:
        """Who does not look into the ledger takes no hint from one who does."""
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

    def test_nobody_is_missed(self, server: LockServer) -> None:
        """Whatever the moment: who leaves a hint finds the key free, or is found."""
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
            holder.release_and_take_hint(KEY[0], owner)


def hinting_of(locks: LockProvider) -> HintingLocks:
    """The provider as one that keeps hints."""
    return cast("HintingLocks", locks)
