"""Waiters of a plain lock are killed, frozen, or stopped by a time limit.

The others are served in order and nearly without a pause.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis

import taskguard
from support.waiting import wait_until
from support.waiting_process import KEY, WaitingProcess
from taskguard.errors import KeyBusyError
from taskguard.locks.base import Granted
from taskguard.locks.redis import RedisLocks
from taskguard.model.lease import new_owner
from taskguard_sandbox.servers import Valkey

LOCK = f"taskguard:{{{KEY}}}"
LINE = f"{LOCK}:line"
# Less than polling once a second would take after three waiters that did not come.
NEARLY_NO_PAUSE_S = 0.7


@pytest.fixture
def client(valkey: Valkey) -> Iterator[Any]:
    with redis.Redis(port=valkey.port, decode_responses=True, protocol=2) as client:
        client.flushall()
        yield client


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Held:
    """The lock, taken, and processes that wait for it, in the order in which they came."""

    def __init__(self, valkey: Valkey, client: Any, stack: ExitStack, count: int) -> None:
        self.locks, self.owner, self.client = RedisLocks(valkey.url), new_owner("m"), client
        answer = self.locks.acquire((KEY,), self.owner, ttl_s=600, with_fence=False, wait_s=0)
        assert isinstance(answer, Granted)
        self.waiting: list[WaitingProcess] = []
        for _ in range(count):
            self.waiting.append(WaitingProcess.start(valkey.url))
            stack.callback(self.waiting[-1].end)
        for number, each in enumerate(self.waiting):
            each.tell()
            wait_until(lambda number=number: client.zcard(LINE) == number + 1)
        self.wait_until_blocked(count)

    def wait_until_blocked(self, count: int) -> None:
        wait_until(lambda: self.client.info("clients")["blocked_clients"] == count)

    def release(self) -> float:
        """When."""
        released_s = time.monotonic()
        assert self.locks.release((KEY,), self.owner)
        return released_s


def next_of(waiting: list[WaitingProcess]) -> WaitingProcess:
    """Return the first waiter that gets the lock. A late waiter loses its turn."""
    said = {each.process.stdout: each for each in waiting}
    ready, _, _ = select.select(list(said), [], [], 120.0)
    return said[ready[0]]


def test_killed(valkey: Valkey, client: Any, stack: ExitStack) -> None:
    """If the first three waiters are killed, the fourth gets the lock almost at once, and the
    others follow in order."""

    def seen() -> bool:
        held = Held(valkey, client, stack, 5)
        dead, alive = held.waiting[:3], held.waiting[3:]
        for each in dead:
            each.end()
        held.wait_until_blocked(len(alive))
        released_s = held.release()
        for each in alive:
            each.tell()
        got_it_s = [each.got_it_s() for each in alive]
        wait_until(lambda: client.exists(LINE, LOCK) == 0)
        return got_it_s == sorted(got_it_s) and got_it_s[0] - released_s < NEARLY_NO_PAUSE_S

    assert any(seen() for _ in range(3))


def test_frozen(valkey: Valkey, client: Any, stack: ExitStack) -> None:
    """If the first waiter is frozen, the second gets the lock almost at once. After it wakes, the
    first one comes before the third."""

    def seen() -> bool:
        held = Held(valkey, client, stack, 3)
        first, second, third = held.waiting
        os.kill(first.process.pid, signal.SIGSTOP)
        released_s = held.release()
        second_was_next = next_of([second, third]) is second
        os.kill(first.process.pid, signal.SIGCONT)
        if second_was_next:
            (owner,) = client.zrange(LINE, 0, 0)
            heard_of = f"{LOCK}:waits:{owner.partition('/')[0]}"
            wait_until(lambda: client.pttl(heard_of) > 1_500, message="that it asks again")
        for each in held.waiting:
            each.tell()
        first_s, second_s, third_s = (each.got_it_s() for each in held.waiting)
        wait_until(lambda: client.exists(LINE, LOCK) == 0)
        in_order = second_was_next and first_s < third_s
        return in_order and second_s - released_s < NEARLY_NO_PAUSE_S

    assert any(seen() for _ in range(3))


def test_the_holder_is_killed(valkey: Valkey, client: Any, stack: ExitStack) -> None:
    """When the killed holder's lease expires, the first waiter gets the key, and no
    newcomer does."""

    def seen() -> bool:
        held = Held(valkey, client, stack, 4)
        held.release()
        holder = next_of(held.waiting)
        holder.end()
        client.pexpire(LOCK, 300)  # what is left of its lease
        others = [each for each in held.waiting if each is not holder]
        for each in others:
            each.tell()
        got_it_s = [each.got_it_s() for each in others]
        wait_until(lambda: client.exists(LINE, LOCK) == 0)
        return got_it_s == sorted(got_it_s)

    assert any(seen() for _ in range(3))  # one that is late loses its turn


def test_the_wait_ends_on_time(valkey: Valkey, client: Any) -> None:
    """After `wait_s` the caller gets its answer, and leaves the line."""
    locks, owner = RedisLocks(valkey.url), new_owner("m")
    locks.acquire((KEY,), owner, ttl_s=60, with_fence=False, wait_s=0)
    tg = taskguard.connect(locks=valkey.url, ledger=None)

    def waited_s() -> float:
        started_s = time.monotonic()
        with pytest.raises(KeyBusyError), tg.lock(KEY, wait_s=1.2):
            pass
        return time.monotonic() - started_s

    found = [waited_s() for _ in range(3)]
    assert min(found) >= 1.2
    assert min(found) < 1.4
    assert client.keys() == [LOCK]


def test_a_time_limit_ends_the_wait(valkey: Valkey, client: Any) -> None:
    """An exception during a wait leaves nothing in the line."""

    class TimeLimitError(Exception):
        pass

    def raise_it(*_: object) -> None:
        raise TimeLimitError

    locks, owner = RedisLocks(valkey.url), new_owner("m")
    locks.acquire((KEY,), owner, ttl_s=60, with_fence=False, wait_s=0)
    tg = taskguard.connect(locks=valkey.url, ledger=None)
    before = signal.signal(signal.SIGALRM, raise_it)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(TimeLimitError), tg.lock(KEY, wait_s=60):
            pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert client.keys() == [LOCK]
