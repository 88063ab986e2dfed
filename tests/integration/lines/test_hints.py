"""Requests of a task that parks, and promotion although a hint got lost.

One process delivers on a real Redis and PostgreSQL, each behind a proxy that counts.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest
import redis

from support.guarded_shop import GuardedShop, NotingQueue
from support.proxy import Mode, Proxy
from support.waiting import patience_s
from taskguard.locks.base import PROMOTED
from taskguard.locks.redis import RedisLocks
from taskguard.model.claims import Claim
from taskguard.model.delivery import (
    Answered,
    Completed,
    Deferred,
    Delivery,
    MessageRef,
    Outcome,
    Parked,
)
from taskguard.model.lease import new_owner
from taskguard.model.policy import Busy, Policy

KEY = "account:1"


class Calls:
    """Parks messages of this process, and lists promoted ones in `sent`."""

    queue = "test"

    def __init__(self) -> None:
        self.sent: list[str] = []

    def call(self) -> dict[str, Any]:
        return {"queue": "test"}

    def send(self, call: Any, message: MessageRef) -> None:
        del call
        self.sent.append(message.id)

    def failed(self, claim: Claim) -> None:
        raise AssertionError(f"{claim.work} keeps no place")


class Office:
    """A runner, and its requests."""

    def __init__(self, shop: GuardedShop, locks: RedisLocks, redis: Proxy, database: Proxy) -> None:
        self.runner = shop.tg.runner
        self.locks = locks
        self.ledger = shop.ledger
        self.calls = Calls()
        self.queue = NotingQueue()
        self._proxies = redis, database

    def deliver(self, number: int, body: Any = None, **values: Any) -> Outcome:
        """Deliver a message, work of its own, of the account's key, in a worker's thread.

        A thread of its own is needed because a body knows the keys that it holds.
        """
        with ThreadPoolExecutor(1) as worker:
            return worker.submit(self._deliver, number, body, **values).result()

    def _deliver(self, number: int, body: Any, **values: Any) -> Outcome:
        return self.runner.deliver(self._delivery(number, **values), body or (lambda guard: None))

    def expire(self, number: int) -> None:
        """Drop a promoted message that has expired."""
        assert self.ledger.expire(f"book {number}", message=MessageRef(f"m{number}"))
        self.runner.never_runs(self._delivery(number, promoted=True))

    def _delivery(self, number: int, *, busy: Busy = "park", **values: Any) -> Delivery:
        return Delivery(
            keys=(KEY,),
            work=f"book {number}",
            task="book",
            queue=self.queue,
            parking=self.calls if busy == "park" else None,
            **{"message": MessageRef(f"m{number}"), "policy": Policy(busy=busy), **values},
        )

    def flush(self) -> None:
        """Empty the lock server."""
        with redis.Redis.from_url(f"redis://{self.locks.address.replace('/0', '')}/0") as client:
            client.flushall()

    def trips(self, ask: Callable[[], object]) -> tuple[int, int]:
        """Return how often it calls the lock server and the database."""
        before = [proxy.requests for proxy in self._proxies]
        ask()
        at_redis, at_database = (
            proxy.requests - was for proxy, was in zip(self._proxies, before, strict=True)
        )
        return at_redis, at_database


@pytest.fixture
def office(valkey: Any, postgres: Any, redis_url: str, pg_url: str) -> Iterator[Office]:
    del redis_url  # empties the server
    with ExitStack() as stack:
        redis, database = (
            stack.enter_context(Proxy(port)) for port in (valkey.port, postgres.port)
        )
        ledger = pg_url.replace(f":{postgres.port}/", f":{database.port}/")
        locks = RedisLocks(f"redis://127.0.0.1:{redis.port}", socket_timeout_s=10.0)
        shop = stack.enter_context(closing(GuardedShop(pg_url, ledger, locks=locks)))
        made = Office(shop, locks, redis, database)
        for number in range(-20, 0):  # connected, prepared, scripts loaded
            made.deliver(number, busy="park" if number % 2 else "retry")
        for number in range(8):
            made.deliver(100 + number, lambda guard, after=200 + number: made.deliver(after))
            made.deliver(200 + number, promoted=True)
        made.calls.sent.clear()
        yield made


def test_a_message_alone_costs_no_more_than_without_a_line(office: Office) -> None:
    """If no message waits, a task that parks needs the same round trips as one that defers: lease,
    claim, end, release."""
    parks = office.trips(lambda: office.deliver(1))
    puts_off = office.trips(lambda: office.deliver(2, busy="retry"))
    assert parks == puts_off == (2, 2)
    assert office.trips(lambda: office.deliver(3)) == (2, 2)


def test_what_a_parked_message_costs(office: Office) -> None:
    """A parked message costs five round trips: a refused lease, parking, a hint, its promotion, and
    its sending.

    After that it arrives like any other message, however long it has waited.
    """
    asked: list[tuple[int, int]] = []

    def body(guard: Any) -> None:
        asked.append(office.trips(lambda: office.deliver(2)))

    at_redis, at_database = office.trips(lambda: office.deliver(1, body))
    assert asked == [(2, 1)]
    assert office.calls.sent == ["m2"]
    assert (at_redis - 2, at_database - 1) == (2, 3)  # one more ends the delivery that promotes
    assert office.trips(lambda: office.deliver(2, promoted=True)) == (2, 3)
    assert office.calls.sent == ["m2"]


def test_behind_a_promoted_message(office: Office) -> None:
    """Each promoted message promotes the next one, even if the server forgot the hint."""

    def body(guard: Any) -> None:
        for number in (2, 3, 4):
            assert isinstance(office.deliver(number), Parked)

    office.deliver(1, body)
    for number in (2, 3, 4):
        assert office.calls.sent[-1] == f"m{number}"
        office.flush()
        assert isinstance(office.deliver(number, promoted=True), Completed)
    assert office.calls.sent == ["m2", "m3", "m4"]


@pytest.mark.parametrize(
    "values",
    [{"redelivered": True}, {"message": MessageRef("m1", 1)}, {"message": MessageRef("m1", 0, 1)}],
    ids=["redelivered", "retry", "copy"],
)
def test_who_came_before_trusts_no_hint(office: Office, values: dict[str, Any]) -> None:
    """A message that the queue delivered before trusts no hint, and reads the ledger at its end."""

    def body(guard: Any) -> None:
        assert isinstance(office.deliver(2), Parked)
        office.locks.release_and_take_hint(KEY, new_owner("another"))

    office.deliver(1, body, **values)
    assert office.calls.sent == ["m2"]


@pytest.mark.parametrize("retaken", [False, True], ids=["forgotten", "taken again"])
def test_a_server_that_forgets_the_lock_may_forget_a_hint(office: Office, retaken: bool) -> None:
    """If a holder finds its lock forgotten, at its end or at a renewal, it looks for waiting
    messages in the ledger."""

    def body(guard: Any) -> None:
        assert isinstance(office.deliver(2), Parked)
        office.flush()
        if retaken:
            watchdog = office.runner.watchdog
            for tracked in watchdog._everything():
                tracked.renew_at_s = 0.0
            watchdog.tick()

    office.deliver(1, body)
    assert office.calls.sent == ["m2"]


def test_a_key_that_was_taken_after_its_lock_was_forgotten(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delivery of higher priority takes the key before the holder looks for waiting messages, and
    finds no hint. The holder leaves one for it."""
    release = office.locks.release_and_take_hint
    holds, looked = threading.Event(), threading.Event()

    def next_holder(guard: Any) -> None:
        holds.set()
        assert looked.wait(patience_s())

    def released(*arguments: Any) -> tuple[bool, bool]:
        monkeypatch.setattr(office.locks, "release_and_take_hint", release)
        answer = release(*arguments)
        assert answer == (False, False)
        holders.append(pool.submit(deliver, 3, next_holder, rank=-1))
        assert holds.wait(patience_s())
        return answer

    def body(guard: Any) -> None:
        assert isinstance(deliver(2), Parked)
        office.flush()

    deliver = functools.partial(office.deliver, policy=Policy(busy="park", order="priority"))
    holders: list[Future[Outcome]] = []
    monkeypatch.setattr(office.locks, "release_and_take_hint", released)
    with ThreadPoolExecutor(1) as pool:
        deliver(1, body)
        assert office.calls.sent == []
        looked.set()
        assert isinstance(holders[0].result(), Completed)
    assert office.calls.sent == ["m2"]


def test_who_finds_out_that_a_server_has_forgotten(office: Office) -> None:
    """A delivery that finds out that a server has forgotten a lock restores it for its holder, with
    a hint."""

    def body(guard: Any) -> None:
        assert isinstance(office.deliver(2), Parked)
        office.flush()
        assert isinstance(office.deliver(2, message=MessageRef("again")), Deferred)

    office.deliver(1, body)
    assert office.calls.sent == ["m2"]


@pytest.mark.parametrize("others", [False, True], ids=["alone", "another was called"])
def test_a_lock_is_handed_to_an_owner_that_has_ended(
    office: Office, monkeypatch: pytest.MonkeyPatch, *, others: bool
) -> None:
    """If the holder ended before its forgotten lock was restored, the lock is released, and not
    left to its ttl."""
    refused, released = threading.Event(), threading.Event()
    leave_hint = office.locks.leave_hint

    def leave_hint_late(key: str) -> bool:
        monkeypatch.setattr(office.locks, "leave_hint", leave_hint)  # for the holder
        refused.set()
        assert released.wait(patience_s())
        return leave_hint(key)

    def body(guard: Any) -> None:
        if others:
            office.deliver(2)
        office.flush()
        monkeypatch.setattr(office.locks, "leave_hint", leave_hint_late)
        parks.append(pool.submit(office.deliver, 3))
        assert refused.wait(patience_s())

    parks: list[Future[Outcome]] = []
    with ThreadPoolExecutor(1) as pool:
        office.deliver(1, body)
        released.set()
        assert isinstance(parks[0].result(), Parked)
    first = 2 if others else 3
    assert office.calls.sent == [f"m{first}"]
    assert isinstance(office.deliver(first, promoted=True), Completed)


def test_what_was_kept_is_forgotten(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the lock server forgot a kept key, the next waiting message is still promoted."""
    promote_next, asked = office.ledger.promote_next, 0

    def another_is_promoted(*args: Any, **options: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked > 1:
            return promote_next(*args, **options)
        assert isinstance(office.deliver(3), Parked)
        office.flush()
        return None

    def body(guard: Any) -> None:
        assert isinstance(office.deliver(2), Parked)
        monkeypatch.setattr(office.ledger, "promote_next", another_is_promoted)

    office.deliver(1, body)
    assert office.calls.sent == ["m2"]


@pytest.mark.parametrize("when", ["before it parks", "after that"])
def test_who_was_called_has_expired(
    office: Office, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """If the promoted message has expired, its kept key is kept for the next one, which is
    promoted."""
    park = office.ledger.park

    def expire_and_park(*arguments: Any, **options: Any) -> bool:
        office.expire(2)
        return park(*arguments, **options)

    office.deliver(1, lambda guard: office.deliver(2))
    assert office.calls.sent == ["m2"]
    if when == "before it parks":
        monkeypatch.setattr(office.ledger, "park", expire_and_park)
        assert isinstance(office.deliver(3), Parked)  # the lock server has refused it
    else:
        assert isinstance(office.deliver(3), Parked)
        office.expire(2)
    assert office.calls.sent == ["m2", "m3"]
    assert isinstance(office.deliver(3, promoted=True), Completed)


def test_the_promoted_message_has_expired_and_so_has_the_one_with_a_hint(office: Office) -> None:
    """If the promoted message and the one that left a hint have both expired, the kept key is given
    back."""
    office.deliver(1, lambda guard: office.deliver(2))
    assert isinstance(office.deliver(3), Parked)
    assert office.ledger.expire("book 3", message=MessageRef("m3"))
    office.expire(2)
    assert office.calls.sent == ["m2"]
    assert isinstance(office.deliver(4), Completed)


def test_who_was_called_has_expired_while_another_has_the_key(office: Office) -> None:
    """If the promoted message has expired and another delivery holds the key, that holder gets a
    hint."""
    office.deliver(1, lambda guard: office.deliver(2))
    held = new_owner("other")
    office.flush()
    office.locks.acquire((KEY,), held, ttl_s=30.0, with_fence=False, wait_s=0.0)
    assert isinstance(office.deliver(3), Parked)
    office.expire(2)
    assert office.calls.sent == ["m2", "m3"]
    assert office.locks.release_and_take_hint(KEY, held) == (True, True)


def test_two_of_one_message(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy of a message waits in line, and the other one takes the key and the hint first. The
    next message is still promoted."""
    promote_next = office.ledger.promote_next

    def taken_meanwhile(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(office.ledger, "promote_next", promote_next)
        office.locks.release((KEY,), PROMOTED)  # the key was kept for long enough
        assert isinstance(office.deliver(2), Completed)
        return None

    def body(guard: Any) -> None:
        for number in (2, 3):
            assert isinstance(office.deliver(number), Parked)
        monkeypatch.setattr(office.ledger, "promote_next", taken_meanwhile)

    office.deliver(1, body)
    assert office.calls.sent == ["m3"]


def test_no_hint_of_a_task_that_has_no_line(office: Office) -> None:
    """A task without a line leaves no hint, because it would stay at the lock server for a day."""

    def body(guard: Any) -> None:
        office.flush()
        assert isinstance(office.deliver(2, busy="retry"), Deferred)

    office.deliver(1, body, busy="retry")
    assert office.locks.release_and_take_hint(KEY, new_owner("another")) == (False, False)


def test_an_answer_that_is_lost_counts_as_a_hint(office: Office) -> None:
    """If the reply to a release is lost, the holder looks for waiting messages in the ledger."""
    redis = office._proxies[0]

    def body(guard: Any) -> None:
        office.deliver(2)
        redis.lose_reply_to(b"EVALSHA", then=Mode.CUT)

    office.deliver(1, body)
    assert office.calls.sent == ["m2"]


def test_a_release_that_is_sent_again_takes_the_hint_of_the_next_holder(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the reply to a release is lost, another delivery may hold the key before the release is
    sent again. The message that waits for that delivery is promoted at its end."""
    release = office.locks.release_and_take_hint
    parked, looked = threading.Event(), threading.Event()

    def next_holder(guard: Any) -> None:
        assert isinstance(office.deliver(3), Parked)
        parked.set()
        assert looked.wait(patience_s())

    def release_twice(*arguments: Any) -> tuple[bool, bool]:
        monkeypatch.setattr(office.locks, "release_and_take_hint", release)
        assert release(*arguments) == (True, False)  # the holder does not get this reply
        holders.append(pool.submit(office.deliver, 2, next_holder))
        assert parked.wait(patience_s())
        assert release(*arguments) == (False, True)
        return True, True

    holders: list[Future[Outcome]] = []
    monkeypatch.setattr(office.locks, "release_and_take_hint", release_twice)
    with ThreadPoolExecutor(1) as pool:
        office.deliver(1)
        looked.set()
        assert isinstance(holders[0].result(), Completed)
    assert office.calls.sent == ["m3"]


def test_a_second_message_of_the_work(office: Office) -> None:
    """A message is parked unread only if its work is new. Otherwise the record answers."""
    office.deliver(1)

    def body(guard: Any) -> None:
        assert isinstance(office.deliver(2), Parked)
        assert isinstance(office.deliver(2, message=MessageRef("again")), Deferred)
        assert isinstance(office.deliver(1, message=MessageRef("again")), Answered)
        assert isinstance(office.deliver(2), Parked)  # the same message again

    office.deliver(3, body)
    assert [each.message for each in office.ledger.waiting()] == ["m2"]
