"""`limit=` and `rate=` of tasks: which deliveries run, and what the outcome of the others is.

With a ledger on SQLite, and with locks in memory or without. The queue only notes its calls.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from support.waiting import patience_s, wait_until
from taskguard import Guard
from taskguard.errors import (
    ConfigurationError,
    KeyAlreadyHeldError,
    KeyBusyError,
    LockServerUnavailableError,
)
from taskguard.events import Event, Events
from taskguard.integration import (
    Completed,
    Deferred,
    Delivery,
    Dropped,
    GuardedFunction,
    MessageRef,
)
from taskguard.ledger.sql import SqlLedger
from taskguard.locks.memory import MemoryLocks
from taskguard.model.lease import new_owner
from taskguard.run.runner import Runner

KEY = "account:1"


class NotingQueue:
    """Takes deferred messages."""

    max_delay_s = 15.0
    new_message_per_deferral = True
    longest_wait_s = math.inf

    def __init__(self) -> None:
        self.deferrals: list[tuple[int, float]] = []

    def retries_in_s(self, error: BaseException) -> float | None:
        return 0.0

    def publish_again(self, deferrals: int, delay_s: float) -> None:
        self.deferrals.append((deferrals, delay_s))


class CountingLocks(MemoryLocks):
    """Locks that may be down, and that count their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.is_away = False

    def acquire(self, keys: Any, owner: Any, **options: Any) -> Any:
        self.asked += 1
        if self.is_away:
            raise LockServerUnavailableError("away")
        return super().acquire(keys, owner, **options)


def pay(account: int, guard: Guard) -> None:
    """The guarded function; each test has its own body."""


class Rig:
    """A runner, its parts in reach."""

    def __init__(self, url: str, locks: CountingLocks | None) -> None:
        self.ledger = SqlLedger(url)
        self.ledger.create_schema()
        self.locks = locks
        self.queue = NotingQueue()
        self.events: list[Event] = []
        self.runner = Runner(locks=locks, ledger=self.ledger, events=Events(self.events.append))
        self._numbers = itertools.count()
        self._url = url

    def delivery(self, message: str = "", *, deferrals: int = 0, **options: Any) -> Delivery:
        """Return a delivery of a new message."""
        options.setdefault("busy", "retry")
        compiled = GuardedFunction(pay, key="account:<account>", once_per="message", **options)
        ref = MessageRef(message or f"m{next(self._numbers)}", deferrals=deferrals)
        return compiled.delivery((1,), {}, namespace="", message=ref, queue=self.queue)

    def deliver(self, message: str = "", *, body: Any = lambda guard: None, **options: Any) -> Any:
        return self.runner.deliver(self.delivery(message, **options), body)

    @contextmanager
    def at_work(self, count: int, **options: Any) -> Iterator[list[Guard]]:
        """Run this many bodies meanwhile."""
        guards: list[Guard] = []
        ended = threading.Event()

        def body(guard: Guard) -> None:
            guards.append(guard)
            ended.wait(patience_s())

        def run() -> None:
            self.deliver(body=body, **options)

        threads = [threading.Thread(target=run) for _ in range(count)]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: len(guards) == count)
            yield guards
        finally:
            ended.set()
            for thread in threads:
                thread.join()

    def change(self, statement: str) -> None:
        """Change the database past the ledger."""
        engine = sa.create_engine(self._url)
        with engine.begin() as db:
            db.execute(sa.text(statement))
        engine.dispose()


@pytest.fixture(params=["locks and ledger", "ledger"])
def rig(request: pytest.FixtureRequest, sqlite_url: str) -> Iterator[Rig]:
    made = Rig(sqlite_url, None if request.param == "ledger" else CountingLocks())
    yield made
    made.ledger.close()


class TestLimit:
    def test_so_many_at_once(self, rig: Rig) -> None:
        """Each of `limit` deliveries holds its own slot, in the ledger and at the lock server. One
        more is deferred."""
        with rig.at_work(3, limit=3) as guards:
            assert {guard.key for guard in guards} == {f"{KEY}#{number}" for number in range(3)}
            assert isinstance(rig.deliver(limit=3), Deferred)
            if rig.locks is not None:
                assert set(rig.locks.held()) == {guard.key for guard in guards}
        assert isinstance(rig.deliver(limit=3), Completed)

    def test_what_is_done_with_one_more(self, rig: Rig) -> None:
        """A delivery beyond the limit does what `busy=` says. A duplicate of running work is always
        deferred."""
        with rig.at_work(2, limit=2):
            assert rig.deliver(limit=2, busy="skip") == Dropped("skipped")
            with pytest.raises(KeyBusyError, match=f"{KEY} is held by 2 deliveries"):
                rig.deliver(limit=2, busy="raise")
            assert isinstance(rig.deliver(limit=2, busy="wait", wait_s=0.3), Deferred)
            assert isinstance(rig.deliver("m0", limit=2, busy="skip"), Deferred)

    def test_a_duplicate_does_not_run_in_another_slot(self, rig: Rig) -> None:
        with rig.at_work(1, limit=2):
            assert isinstance(rig.deliver("m0", limit=2), Deferred)

    def test_who_waits_gets_the_first_that_is_free(self, rig: Rig) -> None:
        outcomes: list[Any] = []

        def run() -> None:
            outcomes.append(rig.deliver(limit=2, busy="wait", wait_s=60.0))

        with rig.at_work(2, limit=2):
            thread = threading.Thread(target=run)
            thread.start()
        thread.join(patience_s())
        assert [type(each) for each in outcomes] == [Completed]

    def test_in_a_body_of_the_same_key(self, rig: Rig) -> None:
        """A nested call with the same key gets another slot at once. If none is free, it is
        refused."""
        found: list[Any] = []

        def body(guard: Guard) -> None:
            found.append(rig.deliver(limit=2))
            with rig.at_work(1, limit=2):
                found.append(rig.deliver(limit=2, busy="wait", wait_s=60.0))

        rig.deliver(limit=2, body=body)
        assert [type(each) for each in found] == [Completed, Deferred]

        def refused(guard: Guard) -> None:
            rig.deliver(limit=2)

        def inner(guard: Guard) -> None:
            rig.deliver(limit=2, body=refused)

        with pytest.raises(KeyAlreadyHeldError, match=KEY):
            rig.deliver(limit=2, body=inner)

    def test_a_fence_elsewhere(self, rig: Rig) -> None:
        """guard.fenced() is refused, because a row cannot tell which of two holders is older."""

        def body(guard: Guard) -> None:
            guard.fenced(sa.update(sa.table("orders")))

        with pytest.raises(ConfigurationError, match="each with a fence of its own slot"):
            rig.deliver(limit=2, body=body)

    def test_a_claim_whose_answer_got_lost(self, rig: Rig, monkeypatch: Any) -> None:
        """If a claim's answer got lost, its slot is free at once."""

        def interrupted(request: Any) -> Any:
            claim(request)
            raise KeyboardInterrupt

        claim = rig.ledger.claim
        with rig.at_work(1, limit=2):
            monkeypatch.setattr(rig.ledger, "claim", interrupted)
            with pytest.raises(KeyboardInterrupt):
                rig.deliver(limit=2)
            monkeypatch.undo()
            assert isinstance(rig.deliver(limit=2), Completed)


class TestLockServer:
    @pytest.fixture
    def locks(self, rig: Rig) -> CountingLocks:
        if rig.locks is None:
            pytest.skip("there is none")
        return rig.locks

    def test_emptied(self, rig: Rig, locks: CountingLocks) -> None:
        """If the lock server is emptied, the ledger knows the holder of each slot, and grants no
        further one."""
        with rig.at_work(2, limit=2):
            locks.flush()
            assert isinstance(rig.deliver(limit=2), Deferred)
        assert isinstance(rig.deliver(limit=2), Completed)

    def test_away(self, rig: Rig, locks: CountingLocks) -> None:
        """If the lock server is down, it is called once, not for each slot, and the ledger
        decides."""
        with rig.at_work(4, limit=5):
            locks.is_away, locks.asked = True, 0
            assert isinstance(rig.deliver(limit=5), Completed)
            assert isinstance(rig.deliver(limit=4), Deferred)
            assert locks.asked == 2

    def test_a_slot_that_it_thinks_is_held(self, rig: Rig, locks: CountingLocks) -> None:
        """If a slot is held at the lock server only, for example by a dead holder, another slot is
        taken without waiting."""
        dead = new_owner("dead")
        locks.acquire((f"{KEY}#0",), dead, ttl_s=30, with_fence=False, wait_s=0.0)
        with rig.at_work(1, limit=2) as guards:
            assert guards[0].key == f"{KEY}#1"
            assert isinstance(rig.deliver(limit=2), Deferred)


class TestRate:
    def test_put_off_until_the_moment(self, rig: Rig) -> None:
        """A delivery that comes too early is deferred until its start. One that was deferred before
        comes later."""
        assert isinstance(rig.deliver(rate="6/m"), Completed)
        outcome = rig.deliver(rate="6/m")
        assert outcome.delay_s == pytest.approx(10, abs=5)
        assert isinstance(rig.deliver(rate="6/m", busy="wait", wait_s=0.1), Deferred)
        rig.change("update taskguard_keys set next_start = next_start + 60000000")
        assert rig.deliver(rate="1/m").delay_s == rig.queue.max_delay_s
        rig.change("update taskguard_keys set next_start = 1")
        assert isinstance(rig.deliver(rate="6/m"), Completed)

    def test_skipped_or_raised(self, rig: Rig) -> None:
        rig.deliver(rate="6/m")
        assert rig.deliver(rate="6/m", busy="skip") == Dropped("skipped")
        with pytest.raises(KeyBusyError, match=r"as often as its rate allows \(6/m\)") as caught:
            rig.deliver(rate="6/m", busy="raise")
        assert caught.value.retry_after_s == pytest.approx(10, abs=5)

    def test_waited_for(self, rig: Rig) -> None:
        """`busy="wait"` waits until the start, not longer."""
        began: list[int] = []
        for _ in range(3):
            body = lambda guard: began.append(rig.ledger.now_us())  # noqa: E731
            outcome = rig.deliver(rate="4/s", busy="wait", wait_s=30.0, body=body)
            assert isinstance(outcome, Completed)
        assert began[2] - began[0] >= 400_000

    def test_of_work_that_has_begun(self, rig: Rig) -> None:
        """Work that has begun is never dropped."""

        def fails(guard: Guard) -> None:
            raise ValueError("no such account")

        with pytest.raises(ValueError, match="no such account"):
            rig.deliver("m", rate="6/m", body=fails)
        assert isinstance(rig.deliver("m", rate="6/m", busy="skip"), Deferred)


def test_without_a_ledger() -> None:
    """Limits need a ledger, and an error says so before any body runs."""
    compiled = GuardedFunction(pay, key="account:<account>", once_per="message", limit=2)
    delivery = compiled.delivery((1,), {}, namespace="", message=MessageRef("m"))
    with pytest.raises(ConfigurationError, match="no ledger to count in"):
        Runner(locks=MemoryLocks(), ledger=None).deliver(delivery, lambda guard: None)
