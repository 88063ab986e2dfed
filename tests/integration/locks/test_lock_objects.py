"""`tg.lock()` as an object that is acquired, extended and released, by threads or by a token."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import redis

import taskguard
from support.clock import FakeClock
from support.waiting import patience_s, wait_until
from taskguard import Lease, Lock, TaskGuard
from taskguard.errors import (
    ConfigurationError,
    KeyAlreadyHeldError,
    KeyBusyError,
    LeaseLostError,
    LedgerUnavailableError,
    LockNotOwnedError,
    LockServerUnavailableError,
)
from taskguard.events import Event
from taskguard.locks.memory import MemoryLocks

T = TypeVar("T")


@pytest.fixture
def heard() -> list[Event]:
    return []


@pytest.fixture
def memory() -> MemoryLocks:
    return MemoryLocks()


@pytest.fixture
def tg(memory: MemoryLocks, heard: list[Event]) -> Iterator[TaskGuard]:
    made = taskguard.connect(locks=memory, ledger=None, listeners=[heard.append])
    yield made
    made.close()


@pytest.fixture
def thread() -> Iterator[Callable[..., Any]]:
    """Return a function that calls another one in one other thread."""
    with ThreadPoolExecutor(1) as other:
        yield lambda function, *args: other.submit(function, *args).result(patience_s())


def elsewhere(function: Callable[[], T]) -> T:
    """Call as another process would, with no lock around it."""
    return contextvars.Context().run(function)


def waiters(tg: TaskGuard) -> bool:
    """Return whether a caller waits for a lock of these."""
    locks = tg.runner.locks
    assert isinstance(locks, MemoryLocks)
    return bool(locks._lines)


def names(heard: list[Event]) -> list[str]:
    return [event.name for event in heard]


class TestOnServers:
    """Calls that need an answer of a lock server or a ledger."""

    def test_it_is_acquired_released_and_acquired_again(self, place: Any) -> None:
        """Each acquisition has a higher fence, and the key is free between them."""
        mine, other = place().lock("a"), place().lock("a")
        fences = []
        for _ in range(2):
            lease = mine.acquire()
            assert isinstance(lease, Lease)
            fences.append(lease.fence)
            assert elsewhere(other.acquire) is None
            assert (mine.locked(), other.locked()) == (True, True)
            assert (mine.owned(), other.owned()) == (True, False)
            mine.extend()
            mine.release()
            assert (mine.locked(), mine.owned()) == (False, False)
        assert fences[1] > fences[0]

    def test_release_and_extend_are_refused_without_a_lease(self, place: Any) -> None:
        """The error names the key. The holder keeps it."""
        mine, other = place().lock("a"), place().lock("a")
        assert mine.acquire()
        for refused in (other.release, other.extend):
            with pytest.raises(LockNotOwnedError, match="a is not held by this thread") as caught:
                refused()
            assert caught.value.key == "a"
        assert mine.owned()
        mine.release()
        with pytest.raises(LockNotOwnedError):
            mine.release()

    def test_a_token_releases_and_extends_elsewhere(self, place: Any) -> None:
        """Another process with the token owns the lease. Its holder stops the renewal without an
        event, and finds the lease ended."""
        heard: list[Event] = []
        mine = place(listeners=[heard.append]).lock("a", "b", token="job 7/x", ttl_s=3.0)
        other, without = place().lock("a", "b", token="job 7/x"), place().lock("a", "b", token="8")
        lease = mine.acquire()
        assert lease
        assert elsewhere(lambda: (other.owned(), without.owned())) == (True, False)
        assert elsewhere(other.acquire) is None
        elsewhere(other.extend)
        elsewhere(other.release)
        assert lease.lost.wait(patience_s())
        wait_until(lambda: not mine.locked(), message="the key is free")
        with pytest.raises(LeaseLostError, match="released by its token") as caught:
            mine.release()
        assert (caught.value.key, caught.value.fence) == ("a, b", lease.fence)
        assert "lost" not in names(heard)
        for refused in (other.release, other.extend, without.release):
            with pytest.raises(LockNotOwnedError, match="token"):
                elsewhere(refused)

    def test_a_released_token_leaves_the_next_holder_alone(self, place: Any) -> None:
        """If another process has acquired the key since, the first holder's release changes
        nothing."""
        mine, other = place().lock("a", token="7"), place().lock("a")
        assert mine.acquire()
        elsewhere(place().lock("a", token="7").release)
        assert elsewhere(other.acquire)
        with pytest.raises(LeaseLostError):
            mine.release()
        assert other.owned()
        other.release()

    def test_it_waits_without_limit(self, place: Any, thread: Any) -> None:
        """With `wait_s=None` it waits until the holder releases the key."""
        mine, waiting = place().lock("a"), place().lock("a", wait_s=None)
        with ThreadPoolExecutor(1) as another:
            assert mine.acquire()
            acquired = another.submit(waiting.acquire)
            with pytest.raises(TimeoutError):
                acquired.result(0.2)
            mine.release()
            assert acquired.result(patience_s())
            another.submit(waiting.release).result(patience_s())


def test_a_lost_lease_is_told_by_extend_and_release(redis_url: str, heard: list[Event]) -> None:
    """After another owner has the key, `owned()` is False, and `extend()` and `release()` raise.
    The other owner's lock stays, and the lock may be acquired again when it is free."""
    client = redis.Redis.from_url(redis_url)
    tg = taskguard.connect(locks=redis_url, ledger=None, listeners=[heard.append])
    lock = tg.lock("a")
    for told in (lock.extend, lock.release):
        lease = lock.acquire()
        assert lease
        client.set("taskguard:{a}", "another/m")
        assert (lock.locked(), lock.owned()) == (True, False)
        with pytest.raises(LeaseLostError) as caught:
            told()
        assert (caught.value.key, caught.value.fence) == ("a", lease.fence)
        assert client.getdel("taskguard:{a}") == b"another/m"
    assert names(heard).count("lost") == 2
    assert lock.acquire()
    lock.release()
    tg.close()
    client.close()


def test_extend_gives_a_whole_ttl() -> None:
    """`extend()` counts from now, before the watchdog renews the lease."""
    clock = FakeClock()
    tg = taskguard.connect(locks=MemoryLocks(clock), ledger=None, clock=clock)
    lock = tg.lock("a", ttl_s=30)
    held = lock.acquire()
    assert held
    clock.advance(5)
    lock.extend()
    assert held.remaining_s > 29
    lock.release()
    tg.close()


@pytest.mark.parametrize("with_ledger", [False, True])
def test_extend_tells_that_no_server_answers(
    memory: MemoryLocks, sqlite_url: str, with_ledger: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an answer `extend()` raises, and the lease keeps its present end."""
    tg = taskguard.connect(locks=memory, ledger=sqlite_url if with_ledger else None)
    error = LedgerUnavailableError if with_ledger else LockServerUnavailableError

    def silent(_: Any) -> Any:
        raise error("no answer")

    if tg.ledger is not None:
        tg.ledger.create_schema()
        monkeypatch.setattr(tg.ledger, "renew", silent)
    else:
        monkeypatch.setattr(memory, "renew", silent)
    for token in (None, "7"):
        lock = tg.lock("a", token=token)
        lease = lock.acquire()
        assert lease
        with pytest.raises(error, match=r"did not renew|no answer"):
            lock.extend()
        lease.check()
        lock.release()
    tg.close()


class TestThreads:
    """One object, several threads, tasks or processes."""

    def test_each_thread_has_its_own_lease(self, tg: TaskGuard, thread: Any) -> None:
        """A thread cannot release another thread's lease, and learns that the key is taken."""
        lock = tg.lock("a")
        assert lock.acquire()
        assert thread(lock.owned) is False
        with pytest.raises(LockNotOwnedError):
            thread(lock.release)
        assert thread(lock.acquire) is None
        lock.release()
        assert thread(lock.acquire)
        assert not lock.owned()
        thread(lock.release)

    def test_readers_of_one_object_have_a_lease_each(self, tg: TaskGuard, thread: Any) -> None:
        """Two threads read at once, and each ends its own lease."""
        lock = tg.lock("a", mode="read")
        mine, theirs = lock.acquire(), thread(lock.acquire)
        assert mine
        assert theirs is not mine
        lock.release()
        assert thread(lock.owned)
        thread(lock.release)
        assert not lock.locked()

    def test_a_token_owns_the_lease_in_every_thread(self, tg: TaskGuard, thread: Any) -> None:
        """With a token, another thread extends and releases the lease of the same object."""
        lock = tg.lock("a", token="7", wait_s=5)
        lease = lock.acquire()
        assert lease
        assert thread(lock.owned)
        with pytest.raises(KeyAlreadyHeldError, match="token='7'"):
            thread(lock.acquire)
        thread(lock.extend)
        thread(lock.release)
        assert not lock.locked()
        assert lease.lost_reason is None
        assert lock.acquire(), "the first thread counts as its holder no more"
        lock.release()

    def test_a_thread_may_wait_for_a_token(self, tg: TaskGuard, thread: Any) -> None:
        """A thread that acquired a lock for a token is not its holder: another one may release
        it."""
        first, second = tg.lock("a", token="1"), tg.lock("a", token="2", wait_s=None)
        with ThreadPoolExecutor(1) as releasing:
            assert first.acquire()
            released = releasing.submit(
                lambda: (wait_until(lambda: waiters(tg), message="it waits"), first.release())
            )
            assert second.acquire()
            released.result(patience_s())
        second.release()

    def test_a_thread_that_holds_it_does_not_wait_for_itself(self, tg: TaskGuard) -> None:
        """Acquiring it again raises at once, by the same object or by another one. If it does not
        wait, it returns None."""
        lock = tg.lock("a", wait_s=None)
        assert lock.acquire()
        for each in (lock, tg.lock("a", wait_s=None)):
            with pytest.raises(KeyAlreadyHeldError):
                each.acquire()
        assert tg.lock("a").acquire() is None
        lock.release()

    def test_each_task_has_its_own_lease(self, tg: TaskGuard) -> None:
        """Two asyncio tasks of one thread do not share a lease."""

        async def main() -> list[bool]:
            lock = tg.lock("a")

            async def other() -> bool:
                return lock.acquire() is not None or lock.owned()

            with lock:
                refused = await asyncio.create_task(other())
            return [refused, await asyncio.create_task(other())]

        assert asyncio.run(main()) == [False, True]

    def test_a_block_may_end_in_another_thread(self, tg: TaskGuard, thread: Any) -> None:
        """A `yield` dependency of FastAPI enters in one thread and ends in another."""
        lock = tg.lock("a")
        thread(lock.__enter__)
        lock.__exit__(None, None, None)
        assert not lock.locked()

    def test_the_end_of_a_block_spares_another_threads_lease(
        self, tg: TaskGuard, thread: Any
    ) -> None:
        """If a block has released the lock itself, its end raises, and leaves the lease that
        another thread has acquired since."""
        lock = tg.lock("a")
        with pytest.raises(LockNotOwnedError), lock:
            lock.release()
            thread(lock.__enter__)
        assert thread(lock.owned)
        thread(lock.__exit__, None, None, None)

    def test_a_forked_child_holds_nothing(self, tg: TaskGuard) -> None:
        """A child owns none of its parent's leases, and the end of its block ends none."""
        lock, block = tg.lock("a", token="7"), tg.lock("b")
        lease = lock.acquire()
        block.__enter__()
        assert lease
        child = os.fork()
        if child == 0:
            status = 1
            try:
                block.__exit__(None, None, None)
                del lock
                gc.collect()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert lock.owned()
        lock.release()
        block.__exit__(None, None, None)

    def test_a_forked_child_cannot_release(self, tg: TaskGuard) -> None:
        """`release()` in the child raises."""
        lock = tg.lock("a")
        assert lock.acquire()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                lock.release()
            except LockNotOwnedError:
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        lock.release()


def test_a_lost_lock_may_be_acquired_again() -> None:
    """After a lease has expired, the same thread acquires the lock without releasing it before."""
    clock, heard = FakeClock(), list[Event]()
    tg = taskguard.connect(
        locks=MemoryLocks(clock), ledger=None, clock=clock, listeners=[heard.append]
    )
    lock = tg.lock("a", ttl_s=30)
    first = lock.acquire()
    clock.advance(31)
    assert not lock.owned()
    second = lock.acquire()
    assert first
    assert second
    assert second.fence > first.fence
    assert names(heard).count("lost") == 1
    lock.release()
    tg.close()


def test_an_object_that_is_gone_is_renewed_no_more(
    memory: MemoryLocks, tg: TaskGuard, caplog: pytest.LogCaptureFixture
) -> None:
    """If nothing can release a lock any more, its renewal ends, and its lease expires."""
    lock: Lock | None = tg.lock("a", ttl_s=0.3)
    assert lock is not None
    assert lock.acquire()
    lock = None
    gc.collect()
    wait_until(lambda: not memory.held(), message="the lease has expired")
    wait_until(lambda: "nothing released it" in caplog.text, message="it is logged")
    with tg.lock("a"):
        pass


def test_busy_is_an_error_in_a_block_and_none_without(tg: TaskGuard) -> None:
    """`with` raises KeyBusyError, and `acquire()` returns None."""
    with tg.lock("a"):
        other = tg.lock("a")
        with pytest.raises(KeyBusyError):
            elsewhere(other.__enter__)
        assert elsewhere(other.acquire) is None


@pytest.mark.parametrize("token", ["", b"7", 7])
def test_a_token_is_a_text(tg: TaskGuard, token: Any) -> None:
    """Anything else is refused when the lock is made."""
    with pytest.raises(ConfigurationError, match="token="):
        tg.lock("a", token=token)


def test_it_shows_its_key_and_token(tg: TaskGuard) -> None:
    """In its `repr()`."""
    assert [repr(tg.lock("a", "b")), repr(tg.lock("a", token="7"))] == [
        "<Lock a, b>",
        "<Lock a token='7'>",
    ]
