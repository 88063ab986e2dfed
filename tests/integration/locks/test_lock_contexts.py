"""`tg.lock()` that is not left where, or in the order in which, it was entered."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import taskguard
from taskguard import Guard, TaskGuard
from taskguard.errors import KeyAlreadyHeldError, KeyBusyError, TransactionUsageError
from taskguard.locks.memory import MemoryLocks
from taskguard.run.current import held_keys


@pytest.fixture
def locks() -> MemoryLocks:
    return MemoryLocks()


@pytest.fixture
def tg(locks: MemoryLocks) -> Iterator[TaskGuard]:
    made = taskguard.connect(locks=locks, ledger=None)
    yield made
    made.close()


def take(tg: TaskGuard, key: str) -> str:
    """Return "taken" if the key is free for this caller, or the name of the error."""
    try:
        with tg.lock(key):
            return "taken"
    except (KeyAlreadyHeldError, KeyBusyError) as error:
        return type(error).__name__


def test_a_lock_may_be_left_in_another_context(tg: TaskGuard, locks: MemoryLocks) -> None:
    """A lock can be entered and left in different copies of a context, as a `yield` dependency of
    FastAPI is."""
    lock: Any = tg.lock("a")
    contextvars.copy_context().run(lock.__enter__)
    assert set(locks.held()) == {"a"}
    assert take(tg, "a") == "KeyBusyError"
    contextvars.copy_context().run(lock.__exit__, None, None, None)
    assert locks.held() == {}
    assert take(tg, "a") == "taken"


def test_a_lock_may_be_entered_here_and_left_elsewhere(tg: TaskGuard) -> None:
    """If another context leaves the lock, this one does not count as its holder any more."""
    lock: Any = tg.lock("a")
    lock.__enter__()
    assert take(tg, "a") == "KeyAlreadyHeldError"
    contextvars.copy_context().run(lock.__exit__, None, None, None)
    assert take(tg, "a") == "taken"
    assert held_keys() == set()


def test_locks_may_be_left_in_the_order_they_were_entered(tg: TaskGuard) -> None:
    """Two locks can be released in the order in which they were taken. Each is held until its own
    end."""
    first: Any = tg.lock("a")
    second: Any = tg.lock("b")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert (take(tg, "a"), take(tg, "b")) == ("taken", "KeyAlreadyHeldError")
    second.__exit__(None, None, None)
    assert (take(tg, "a"), take(tg, "b")) == ("taken", "taken")
    assert held_keys() == set()


def test_locks_handed_over_for_ever_leave_nothing_behind(tg: TaskGuard) -> None:
    """If each lock is taken before the last one is released, a context refers to one lock at a
    time."""
    with ExitStack() as stack:
        before = stack.enter_context(tg.lock("0"))
        assert before
        locks: list[Any] = [tg.lock(str(number)) for number in range(1, 1000)]
        locks[0].__enter__()
        stack.pop_all().close()
        for lock, following in itertools.pairwise(locks):
            following.__enter__()
            lock.__exit__(None, None, None)
        assert held_keys() == {"999"}
        assert _links() == 1
        locks[-1].__exit__(None, None, None)
    assert _links() == 0


def _links() -> int:
    """Return the number of locks that this context still refers to."""
    lock, count = taskguard.run.current._innermost.get(), 0
    while lock is not None:
        lock, count = lock.enclosing, count + 1
    return count


def test_a_task_that_was_made_inside_holds_nothing_afterwards(tg: TaskGuard) -> None:
    """A task that was made inside a lock, and lives on, does not count as its holder after its
    end."""

    async def main() -> list[str]:
        go = asyncio.Event()

        async def later() -> str:
            await go.wait()
            return take(tg, "a")

        with tg.lock("a"):
            task = asyncio.create_task(later())
            await asyncio.sleep(0)
        go.set()
        return [await task, take(tg, "a")]

    assert asyncio.run(main()) == ["taken", "taken"]


def test_another_task_finds_the_key_busy(tg: TaskGuard) -> None:
    """A task that was made inside a lock is not its holder, and finds the key busy."""

    async def main() -> list[str]:
        async def at_once() -> str:
            return take(tg, "a")

        with tg.lock("a"):
            other = await asyncio.create_task(at_once())
            thread = await asyncio.to_thread(take, tg, "a")
            return [other, thread, take(tg, "a")]

    # A thread that the holder waits for would wait for itself.
    assert asyncio.run(main()) == ["KeyBusyError", "KeyAlreadyHeldError", "KeyAlreadyHeldError"]


def test_the_guard_of_a_body_that_has_ended_is_not_current(tg: TaskGuard) -> None:
    """After a body has ended, its guard is not current any more, even in a context that was copied
    while it ran."""
    copied: list[contextvars.Context] = []

    @tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> None:
        copied.append(contextvars.copy_context())
        assert taskguard.current_guard() is guard

    ship(1)  # type: ignore[call-arg]  # the guard is ours
    with pytest.raises(TransactionUsageError, match="current_guard"):
        copied[0].run(taskguard.current_guard)
    assert copied[0].run(take, tg, "order:1") == "taken"
