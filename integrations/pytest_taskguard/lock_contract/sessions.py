"""Test a provider's `traits`, and the end of its locks when the provider ends.

Guarantees: no lock stays held after a lost reply, the close of a provider or the end of a session.
The server's own setting decides how soon it ends a silent session.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

import pytest

from pytest_taskguard.lock_contract.server import (
    KEY,
    LockServer,
    granted,
    renewed,
    slack_s,
    take,
    taken_over,
)
from pytest_taskguard.lock_contract.waits import Ended
from pytest_taskguard.waiting import wait_until
from taskguard.errors import LockServerUnavailableError
from taskguard.locks import Granted, Held, LockProvider, Renewal, new_owner

__all__ = ["TestClose", "TestSession", "TestSwallowedReply", "TestTraits"]

T = TypeVar("T")


class TestTraits:
    def test_ttl(self, locks: LockProvider) -> None:
        """A grant lasts for the requested time, or for the server's minimum. A session's locks last
        as long as the session. A reported lease exceeds that by at most a second: callers ignore a
        longer one."""
        traits = locks.traits
        for ttl_s in (0.05, 20.0):
            answer = granted(locks, (f"order:{ttl_s}",), new_owner("m"), ttl_s=ttl_s)
            longest_s = max(ttl_s, traits.min_ttl_s)
            assert answer.ttl_s >= (traits.min_ttl_s if traits.session else longest_s)
            assert 0.0 < answer.ttl_s <= longest_s + 1.0

    def test_tokens(self, locks: LockProvider) -> None:
        """A provider without tokens gives 0 where one is asked for, never a number of its own."""
        answer = granted(locks, KEY, new_owner("m"), with_fence=True)
        assert (answer.fence > 0) is locks.traits.tokens


class TestSwallowedReply:
    def test_of_acquire(self, server: LockServer) -> None:
        """An acquire without a reply leaves nothing held beyond its ttl, even while the provider
        lives on."""
        if server.deafened is None:
            pytest.skip("its replies cannot be lost")
        other = server.connect()
        other.release(KEY, new_owner("m"))  # by ways that it knows before they are cut
        with server.deafened() as locks:
            with pytest.raises(LockServerUnavailableError):
                take(locks, KEY, new_owner("m"), ttl_s=1.0)
            wait_until(
                lambda: isinstance(take(other, KEY, new_owner("n")), Granted),
                timeout_s=3 * slack_s(other),
                message="the key free after a grant without a reply",
            )


class TestSession:
    @pytest.fixture
    def two(self, server: LockServer) -> tuple[LockProvider, LockProvider]:
        """Providers as two processes have them."""
        first, other = server.connect(), server.connect()
        if first is other:
            pytest.skip("there is one provider in all")
        return first, other

    @pytest.fixture
    def end_session(
        self, server: LockServer, locks: LockProvider
    ) -> Callable[[LockProvider], object]:
        """The server ends a silent session."""
        if not locks.traits.session:
            pytest.skip("its locks are leases")
        assert server.end_session is not None, "say in LockServer how a session ends"
        return server.end_session

    def test_close(self, two: tuple[LockProvider, LockProvider]) -> None:
        """Closing a provider frees what it held if its locks are a session's, and nothing if they
        are leases."""
        first, other = two
        take(first, KEY, new_owner("m"))
        first.close()
        if first.traits.session:
            taken_over(other, KEY, new_owner("n"))  # as soon as the server has heard of it
        else:
            assert isinstance(take(other, KEY, new_owner("n")), Held)

    def test_lost(
        self,
        two: tuple[LockProvider, LockProvider],
        end_session: Callable[[LockProvider], object],
    ) -> None:
        """A session that ended has freed what it held, says so, and a new one takes its place."""
        first, other = two
        owner, gone, heir = new_owner("m"), ("gone",), new_owner("n")
        take(first, KEY, owner)
        take(first, gone, owner)
        end_session(first)
        wait_until(lambda: isinstance(take(other, KEY, heir), Granted), timeout_s=slack_s(other))
        assert answered(lambda: renewed(first, KEY, owner)) == Renewal.TAKEN
        assert answered(lambda: renewed(first, gone, owner)) == Renewal.GONE
        assert isinstance(answered(lambda: take(first, gone, new_owner("o"))), Granted)
        assert renewed(other, KEY, heir) == Renewal.RENEWED

    def test_lost_while_it_waits(
        self,
        two: tuple[LockProvider, LockProvider],
        end_session: Callable[[LockProvider], object],
    ) -> None:
        """A waiter whose session ends stops waiting, and can try again."""
        first, other = two
        holder, waiter = new_owner("m"), new_owner("n")
        take(other, KEY, holder)
        take(first, ("another",), waiter)  # there is a session
        assert isinstance(take(first, KEY, waiter, wait_s=30.0), Held)

        def wait() -> None:
            with contextlib.suppress(LockServerUnavailableError):
                first.wait(KEY[0], waiter, timeout_s=30.0)

        waiting = Ended(wait)
        end_session(first)
        waiting.join()
        other.release(KEY, holder)
        assert isinstance(answered(lambda: take(first, KEY, waiter)), Granted)


class TestClose:
    def test_used_again(self, locks: LockProvider) -> None:
        """A closed provider connects again, and closing released nothing but a session's locks."""
        owner = new_owner("m")
        take(locks, KEY, owner)
        locks.close()
        if locks.traits.session:
            wait_until(  # as soon as the server has heard of it
                lambda: renewed(locks, KEY, owner) == Renewal.GONE, timeout_s=slack_s(locks)
            )
        else:
            assert renewed(locks, KEY, owner) == Renewal.RENEWED
        locks.close()
        locks.close()


def answered(ask: Callable[[], T]) -> T:
    """The answer of a provider that may have to connect again first."""
    answers: list[T] = []

    def asked() -> bool:
        with contextlib.suppress(LockServerUnavailableError):
            answers.append(ask())
        return bool(answers)

    wait_until(asked, message="an answer")
    return answers[0]
