"""`async with tg.lock()`: the event loop goes on, and a cancelled coroutine holds and waits no
more."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import taskguard
from support.clock import FakeClock
from support.waiting import patience_s, wait_until
from taskguard import Lock, TaskGuard
from taskguard.errors import (
    KeyAlreadyHeldError,
    KeyBusyError,
    LeaseLostError,
    LockServerUnavailableError,
)
from taskguard.events import Event
from taskguard.locks.memory import MemoryLocks


class Slow(MemoryLocks):
    """Locks whose calls wait for a test.

    Attributes:
        before, after: the names of the calls that wait before they do their work, and after it.
        begun: set by a call that waits.
        may_end: lets all calls go on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before: set[str] = set()
        self.after: set[str] = set()
        self.begun = threading.Event()
        self.may_end = threading.Event()

    def _wait(self, slow: bool) -> None:
        if slow:
            self.begun.set()
            assert self.may_end.wait(patience_s())

    def acquire(self, *args: Any, **options: Any) -> Any:
        self._wait("acquire" in self.before)
        granted = super().acquire(*args, **options)
        self._wait("acquire" in self.after)
        return granted

    def release(self, *args: Any, **options: Any) -> bool:
        self._wait("release" in self.before)
        return super().release(*args, **options)


@pytest.fixture
def locks() -> Slow:
    return Slow()


@pytest.fixture
def heard() -> list[Event]:
    return []


@pytest.fixture
def tg(locks: Slow, heard: list[Event]) -> Iterator[TaskGuard]:
    made = taskguard.connect(locks=locks, ledger=None, listeners=[heard.append])
    yield made
    made.close()


def run(main: Any) -> Any:
    """Run a coroutine, which must not take forever."""
    return asyncio.run(asyncio.wait_for(main, patience_s()))


async def until(condition: Any) -> None:
    """Wait in a coroutine: it goes on only if the event loop does."""
    while not condition():  # noqa: ASYNC110  # no event says so
        await asyncio.sleep(0.001)


async def hold(lock: Lock, release: asyncio.Event) -> None:
    async with lock:
        await release.wait()


def test_coroutines_and_processes_exclude_each_other(place: Any) -> None:
    """Of several coroutines and another process, one at a time has the key. Each gets it, with a
    higher fence than the one before."""
    fences: list[int] = []
    inside: list[int] = []

    async def work(lock: Lock) -> None:
        for _ in range(3):
            async with lock as lease:
                inside.append(1)
                assert len(inside) == 1
                await asyncio.sleep(0)
                fences.append(lease.fence)
                inside.pop()

    async def main() -> None:
        tg, other = place(), place()
        shared = tg.lock("a", wait_s=None)
        async with asyncio.TaskGroup() as tasks:
            for lock in (shared, shared, tg.lock("a", wait_s=60), other.lock("a", wait_s=60)):
                tasks.create_task(work(lock))

    run(main())
    assert len(fences) == 12
    assert fences == sorted(set(fences))


@pytest.mark.parametrize("slow", ["acquire", "release"])
def test_the_event_loop_goes_on(tg: TaskGuard, locks: Slow, slow: str) -> None:
    """While the lock server answers slowly, other coroutines run."""
    locks.before = {slow}

    async def main() -> None:
        task = asyncio.create_task(hold(tg.lock("a"), released := asyncio.Event()))
        released.set()
        await until(locks.begun.is_set)  # within a call of the lock server
        locks.may_end.set()
        await task

    run(main())
    assert not locks.held()


def test_waiting_coroutines_are_served_in_order(tg: TaskGuard) -> None:
    """Coroutines that wait for one key get it in the order in which they came."""
    order: list[int] = []

    async def wait(number: int) -> None:
        async with tg.lock("a", wait_s=None):
            order.append(number)

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks, tg.lock("a"):
            for number in range(20):
                tasks.create_task(wait(number))
            await asyncio.sleep(0.01)

    run(main())
    assert order == list(range(20))


def test_a_coroutine_that_is_cancelled_leaves_the_line_at_once(place: Any) -> None:
    """After a waiting coroutine was cancelled, a newcomer gets the key as soon as it is free."""

    async def main() -> None:
        tg, newcomer = place(), place().lock("a")
        async with tg.lock("a"):
            waits = asyncio.create_task(hold(tg.lock("a", wait_s=None), asyncio.Event()))
            later = asyncio.create_task(hold(tg.lock("a", wait_s=None), asyncio.Event()))
            await asyncio.sleep(0.1)
            for each in (later, waits):
                each.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await each
            await asyncio.sleep(0.05)
        async with newcomer:
            pass

    run(main())


def test_a_key_that_is_granted_to_a_cancelled_coroutine_is_released(
    tg: TaskGuard, locks: Slow, heard: list[Event]
) -> None:
    """If the lock server grants the key while the coroutine is cancelled, it becomes free, and is
    not reported as lost."""
    locks.after = {"acquire"}

    async def main() -> None:
        task = asyncio.create_task(hold(tg.lock("a"), asyncio.Event()))
        await until(locks.begun.is_set)
        assert locks.held()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        locks.may_end.set()
        await until(lambda: "released" in {event.name for event in heard})
        assert not locks.held()
        assert not len(tg.runner.watchdog)

    run(main())
    assert "lost" not in {event.name for event in heard}


def test_cancellation_in_the_block_releases(tg: TaskGuard, locks: Slow) -> None:
    """The block of a cancelled coroutine ends, and the key is free when the coroutine ends."""

    async def main() -> None:
        task = asyncio.create_task(hold(tg.lock("a"), asyncio.Event()))
        await until(locks.held)
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not locks.held()

    run(main())


def test_a_second_cancellation_does_not_stop_the_release(tg: TaskGuard, locks: Slow) -> None:
    """A coroutine that is cancelled during its release ends at once, and the key is released."""
    locks.before = {"release"}

    async def main() -> None:
        task = asyncio.create_task(hold(tg.lock("a"), asyncio.Event()))
        await until(locks.held)
        await asyncio.sleep(0.01)
        task.cancel()
        await until(locks.begun.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        locks.may_end.set()
        await until(lambda: not locks.held())

    run(main())


def test_a_coroutine_waits_for_its_time_only(tg: TaskGuard) -> None:
    """Without `wait_s`, and after it, KeyBusyError names the key: at the lock server, and behind
    coroutines of its process."""

    async def main() -> None:
        async with tg.lock("a"):
            waits = asyncio.create_task(hold(tg.lock("a", wait_s=None), asyncio.Event()))
            await asyncio.sleep(0.01)
            for wait_s in (0, 0.05):
                with pytest.raises(KeyBusyError) as caught:
                    await asyncio.create_task(hold(tg.lock("a", wait_s=wait_s), asyncio.Event()))
                assert caught.value.key == "a"
            waits.cancel()
            await asyncio.wait([waits])
            with pytest.raises(KeyBusyError):
                await asyncio.create_task(hold(tg.lock("a", wait_s=0.05), asyncio.Event()))

    run(main())


def test_a_silent_lock_server_is_told(
    tg: TaskGuard, locks: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the lock server arrives in the coroutine. The next one may acquire the key."""

    def silent(*_: Any, **__: Any) -> Any:
        raise LockServerUnavailableError("no answer")

    async def main() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(MemoryLocks, "acquire", silent)
            with pytest.raises(LockServerUnavailableError):
                await hold(tg.lock("a", wait_s=5), asyncio.Event())
        async with tg.lock("a", wait_s=5):
            pass

    run(main())


def test_each_task_has_its_own_lease(tg: TaskGuard) -> None:
    """Tasks can share a lock object: a task that was made in the block is not its holder, and does
    not end its lease."""

    async def main() -> None:
        lock = tg.lock("a")
        async with lock as lease:
            with pytest.raises(KeyBusyError):
                await asyncio.create_task(hold(lock, asyncio.Event()))
            with pytest.raises(KeyAlreadyHeldError):
                await hold(lock, asyncio.Event())
            with pytest.raises(KeyAlreadyHeldError):
                await hold(tg.lock("a"), asyncio.Event())
            lease.check()
        async with lock as again:
            assert again.fence > lease.fence

    run(main())


def test_readers_share_the_key(tg: TaskGuard) -> None:
    """Coroutines that read are in their blocks at the same time."""

    async def main() -> None:
        lock, release = tg.lock("a", mode="read", wait_s=None), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            readers = [tasks.create_task(hold(lock, release)) for _ in range(3)]
            await until(lambda: len(tg.runner.watchdog) == len(readers))
            release.set()

    run(main())


def test_a_lost_lock_is_told_at_the_end_of_its_block(heard: list[Event]) -> None:
    """As without asyncio: by an error, unless the block raises its own."""
    clock = FakeClock()
    tg = taskguard.connect(
        locks=MemoryLocks(clock), ledger=None, clock=clock, listeners=[heard.append]
    )

    async def main() -> None:
        with pytest.raises(LeaseLostError, match="before it was released") as caught:
            async with tg.lock("a", ttl_s=30) as lease:
                clock.advance(31)
        assert (caught.value.key, caught.value.fence) == ("a", lease.fence)
        with pytest.raises(ZeroDivisionError):
            async with tg.lock("a", ttl_s=30):
                clock.advance(31)
                raise ZeroDivisionError

    run(main())
    assert [event.name for event in heard].count("lost") == 2
    tg.close()


def test_a_lost_lease_cancels_the_task(tg: TaskGuard) -> None:
    """With `on_lost="interrupt"` the block is cancelled, and its end raises LeaseLostError. The
    task goes on, and counts as not cancelled."""

    async def main() -> None:
        with pytest.raises(LeaseLostError, match="max_hold_s") as caught:
            async with tg.lock("a", ttl_s=0.1, max_hold_s=0.1, on_lost="interrupt"):
                await asyncio.sleep(3600)
        assert isinstance(caught.value.__cause__, asyncio.CancelledError)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await asyncio.sleep(0)

    run(main())


def test_a_task_that_is_cancelled_beside_a_lost_lease_ends(tg: TaskGuard) -> None:
    """If the task is cancelled by another one as well, it stays cancelled. If the block has ended,
    the loss of its lease cancels nothing."""

    async def main() -> None:
        async def interrupted() -> None:
            async with tg.lock("a", ttl_s=0.1, max_hold_s=0.1, on_lost="interrupt") as lease:
                try:
                    await asyncio.sleep(3600)
                finally:
                    assert lease.is_lost
                    task.cancel()

        task = asyncio.create_task(interrupted())
        with pytest.raises(asyncio.CancelledError):
            await task
        async with tg.lock("a", ttl_s=0.1, max_hold_s=0.1, on_lost="interrupt"):
            pass
        await asyncio.sleep(0.15)

    run(main())


def test_a_lost_lease_interrupts_a_block_of_a_thread(tg: TaskGuard) -> None:
    """Without asyncio, LeaseLostError is raised in the block. `acquire()` interrupts nothing."""
    options: Any = {"ttl_s": 0.1, "max_hold_s": 0.1, "on_lost": "interrupt"}
    lock = tg.lock("b", **options)
    lease = lock.acquire()
    assert lease
    assert lease.lost.wait(patience_s())
    with pytest.raises(LeaseLostError):
        lock.release()
    with pytest.raises(LeaseLostError, match="interrupted"), tg.lock("a", **options):
        wait_until(lambda: False, message="it is interrupted")


def test_a_token_is_released_by_another_coroutine(tg: TaskGuard, locks: Slow) -> None:
    """With a token, the end of the block raises if another coroutine has released the lock."""

    async def main() -> None:
        with pytest.raises(LeaseLostError, match="released by its token"):
            async with tg.lock("a", token="7"):
                other = tg.lock("a", token="7")
                await asyncio.to_thread(contextvars.Context().run, other.release)
                assert not locks.held()

    run(main())


def test_more_coroutines_wait_than_asyncio_has_threads(tg: TaskGuard) -> None:
    """Coroutines that wait for as many keys do not keep each other from releasing theirs."""

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            release = asyncio.Event()
            keys = [str(number) for number in range(40)]
            for key in keys:
                tasks.create_task(hold(tg.lock(key), release))
            await until(lambda: len(tg.runner.watchdog) == len(keys))
            for key in keys:
                tasks.create_task(hold(tg.lock(key, wait_s=None), release))
            await asyncio.sleep(0.05)
            release.set()

    run(main())
    wait_until(lambda: not len(tg.runner.watchdog), message="all have ended")
