"""One delivery, outcome by outcome: what the queue gets, and what the ledger contains afterwards.

With a real ledger on SQLite and locks in memory. The queue only notes its calls.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from support.claims import request
from support.leaving import exiting_at_sigterm
from support.waiting import wait_until
from taskguard import Guard
from taskguard.errors import (
    BodyCancelledError,
    KeyBusyError,
    LeaseLostError,
    LedgerUnavailableError,
    LockServerUnavailableError,
    MessageTooOldError,
    TransactionRetryError,
    WorkDeadError,
)
from taskguard.events import Event, Events
from taskguard.integration import Answered, Completed, Deferred, Delivery, Dropped, MessageRef
from taskguard.ledger.sql import SqlLedger
from taskguard.ledger.tables import WORK
from taskguard.locks.memory import MemoryLocks
from taskguard.model.claims import Claimed
from taskguard.model.history import Happened, read
from taskguard.model.policy import make_policy
from taskguard.model.states import State
from taskguard.run.runner import Runner


class NotingQueue:
    """Takes deferred messages, or refuses them."""

    max_delay_s = 15.0
    new_message_per_deferral = True

    def __init__(self) -> None:
        self.deferrals: list[tuple[int, float]] = []
        self.refuses = False
        self.longest_wait_s = math.inf

    def retries_in_s(self, error: BaseException) -> float | None:
        return 0.0

    def publish_again(self, deferrals: int, delay_s: float) -> None:
        if self.refuses:
            raise ConnectionError("the broker is away")
        self.deferrals.append((deferrals, delay_s))


class RunnerRig:
    """A runner, its parts in reach."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.ledger = SqlLedger(url)
        self.ledger.create_schema()
        self.locks = MemoryLocks()
        self.events: list[Event] = []
        self.queue = NotingQueue()
        self.runner = Runner(
            locks=self.locks, ledger=self.ledger, events=Events(self.events.append)
        )

    def delivery(self, message: str = "m", **values: Any) -> Delivery:
        """Return a delivery of work on order:1. Options of its task are given by name."""
        numbers = {name: values.pop(name, 0) for name in ("retries", "deferrals")}
        fixed: dict[str, Any] = {
            name: values.pop(name)
            for name in ("work", "published_at_s", "queue", "by_message", "by_run")
            if name in values
        }
        return Delivery(
            **{
                "keys": ("order:1",),
                "work": "ship order:1",
                "task": "ship",
                "message": MessageRef(message, **numbers),
                "policy": make_policy(values, task="ship"),
                "queue": self.queue,
                **fixed,
            }
        )

    def deliver(self, body: Callable[[Guard], Any] = lambda guard: None, **values: Any) -> Any:
        return self.runner.deliver(self.delivery(**values), body)

    def state(self, work: str = "ship order:1") -> State:
        view = self.ledger.view(work)
        assert view is not None
        return view.state

    def change(self, statement: str) -> None:
        """Change the database past the ledger."""
        engine = sa.create_engine(self._url)
        with engine.begin() as db:
            db.execute(sa.text(statement))
        engine.dispose()

    def names(self) -> list[str]:
        return [event.name for event in self.events]


@pytest.fixture
def rig(sqlite_url: str) -> Iterator[RunnerRig]:
    made = RunnerRig(sqlite_url)
    yield made
    made.ledger.close()


def test_done_is_answered_with_the_stored_result(rig: RunnerRig) -> None:
    """DONE is answered with the stored result, also to another message, and if the lock server
    forgot everything."""
    assert rig.deliver(lambda guard: {"n": 1}) == Completed({"n": 1})
    rig.locks.flush()
    assert rig.deliver(message="other") == Answered({"n": 1})
    assert rig.locks.held() == {}


OTHER = {"message": "other", "work": "bill order:1"}


def inside(rig: RunnerRig, **second: Any) -> Any:
    """Return the outcome of a second delivery during the first one's body."""
    outcomes: list[Any] = []

    def body(guard: Guard) -> None:
        # A context of its own: otherwise it would be the first body that requests its own key.
        outcomes.append(contextvars.Context().run(rig.deliver, **second))

    rig.deliver(body)
    return outcomes[0]


@pytest.mark.parametrize("options", [{}, {"busy": "wait", "wait_s": 0.05}], ids=["retry", "wait"])
def test_a_taken_key_puts_the_delivery_off(rig: RunnerRig, options: dict[str, Any]) -> None:
    """A delivery of a taken key is deferred, by at most a quarter of the visibility timeout."""
    assert isinstance(inside(rig, **OTHER, **options), Deferred)
    assert [deferrals for deferrals, _ in rig.queue.deferrals] == [1]
    assert all(0 < delay_s <= 15 for _, delay_s in rig.queue.deferrals)


def test_a_delivery_waits_no_longer_than_its_queue_can(rig: RunnerRig) -> None:
    """A delivery waits for its key at most as long as its queue allows."""
    rig.queue.longest_wait_s = 0.05
    assert isinstance(inside(rig, **OTHER, busy="wait", wait_s=3_600.0), Deferred)
    assert [deferrals for deferrals, _ in rig.queue.deferrals] == [1]


def test_a_taken_key_drops_what_never_started_where_the_user_chose_so(rig: RunnerRig) -> None:
    """With `busy="skip"`, a delivery of a taken key is acknowledged, and causes an event."""
    assert inside(rig, **OTHER, busy="skip") == Dropped("skipped")
    assert rig.queue.deferrals == []
    assert "duplicate" in rig.names()


def test_a_taken_key_raises_where_the_user_chose_so(rig: RunnerRig) -> None:
    """With `busy="raise"`, a delivery of a taken key raises KeyBusyError, with the key and a time
    to try again."""

    def body(guard: Guard) -> None:
        with pytest.raises(KeyBusyError) as caught:
            contextvars.Context().run(rig.deliver, **OTHER, busy="raise")
        assert caught.value.key == "order:1"
        assert caught.value.retry_after_s is not None
        assert 0 < caught.value.retry_after_s <= 30

    rig.deliver(body)


@pytest.mark.parametrize("busy", ["skip", "raise"])
def test_what_has_started_is_never_dropped(rig: RunnerRig, busy: str) -> None:
    """Work that has begun is deferred: dropping it could lose it."""
    with pytest.raises(ZeroDivisionError):
        rig.deliver(lambda guard: 1 / 0, **OTHER)
    assert isinstance(inside(rig, **OTHER, retries=1, busy=busy), Deferred)


def test_the_same_work_in_progress_is_put_off_whatever_the_user_chose(rig: RunnerRig) -> None:
    """A duplicate of running work is deferred: it may be the only copy if its holder is killed."""
    assert isinstance(inside(rig, message="m", busy="skip"), Deferred)


def test_a_copy_that_the_broker_refused_is_no_acknowledgement(rig: RunnerRig) -> None:
    """If the broker refuses the deferred copy, its error reaches the queue, and the message remains
    the live copy."""

    def body(guard: Guard) -> None:
        rig.queue.refuses = True
        with pytest.raises(ConnectionError):
            contextvars.Context().run(rig.deliver, **OTHER)
        rig.queue.refuses = False

    rig.deliver(body)
    assert rig.deliver(lambda guard: 7, **OTHER) == Completed(7)


def test_a_superseded_delivery_goes_without_a_copy(rig: RunnerRig) -> None:
    """A delivery whose copy with a higher number is alive is acknowledged without another copy."""
    assert isinstance(inside(rig, **OTHER), Deferred)
    assert rig.deliver(**OTHER) == Dropped("superseded")
    assert isinstance(rig.deliver(**OTHER, deferrals=1), Completed)
    assert len(rig.queue.deferrals) == 1


def test_a_message_older_than_the_record_is_not_run(rig: RunnerRig) -> None:
    """A message older than `retention_s` raises MessageTooOldError if there is no record of its
    work. Otherwise the record answers."""
    old = {"published_at_s": time.time() - 100, "retention_s": 50}
    with pytest.raises(MessageTooOldError, match="retention_s"):
        rig.deliver(**old)
    assert rig.ledger.view("ship order:1") is None
    rig.deliver(lambda guard: 1)
    assert rig.deliver(**old, message="other") == Answered(1)


def test_a_retry_that_comes_after_a_purge_of_its_work_is_refused(rig: RunnerRig) -> None:
    """A retry whose record was purged is refused, because its attempts and steps are lost."""
    with pytest.raises(ZeroDivisionError):
        rig.deliver(lambda guard: 1 / 0)
    day_us = 86_400_000_000
    rig.change(f"update taskguard_work set finished = finished - {31 * day_us}")
    assert rig.ledger.purge(older_than_s=30 * 86_400.0).work_items == 1
    with pytest.raises(MessageTooOldError, match="retention_s"):
        rig.deliver(retries=1, published_at_s=time.time() - 31 * 86_400)
    assert rig.ledger.view("ship order:1") is None


def test_a_late_answer_to_a_new_message_names_once_per(
    rig: RunnerRig, caplog: pytest.LogCaptureFixture
) -> None:
    """If another message gets the answer of work that ended over an hour ago, the log names
    `once_per` and its values that run the body."""
    rig.deliver()
    rig.change("update taskguard_work set finished = finished - 3600000000 - 1")
    rig.deliver()
    assert "once_per" not in caplog.text
    rig.deliver(message="other")
    assert 'once_per="message"' in caplog.text
    assert 'once_per="run"' in caplog.text


def test_a_late_answer_to_a_message_of_an_ended_run_is_not_logged(
    rig: RunnerRig, caplog: pytest.LogCaptureFixture
) -> None:
    """With `once_per="run"`, a message that joined a run gets its result, however late."""

    def join(guard: Guard) -> None:
        contextvars.Context().run(rig.deliver, message="other", by_run=True)

    rig.deliver(join, by_run=True)
    rig.change("update taskguard_work set finished = finished - 3600000000 - 1")
    answer = rig.deliver(message="other", deferrals=1, by_run=True)
    assert (type(answer), answer.same_message) == (Answered, False)
    assert "once_per" not in caplog.text


def test_a_deadlock_runs_the_body_again_under_the_same_lease(rig: RunnerRig) -> None:
    """After a deadlock the body runs again, a few times at most. Then the delivery is deferred, and
    the work is given back."""
    fences: list[int] = []

    def body(guard: Guard) -> int:
        fences.append(guard.fence)
        if len(fences) < 3:
            raise TransactionRetryError("deadlock")
        return len(fences)

    assert rig.deliver(body) == Completed(3)
    assert len(set(fences)) == 1

    def hopeless(guard: Guard) -> None:
        raise TransactionRetryError("deadlock")

    assert isinstance(rig.deliver(hopeless, **OTHER), Deferred)
    assert rig.state("bill order:1") is State.NEW


def test_without_the_ledger_nothing_runs(rig: RunnerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the ledger, deliveries are deferred with a growing delay, and no lease is left at the
    lock server."""

    def away(*_: Any, **__: Any) -> Any:
        raise LedgerUnavailableError("away")

    for name in ("claim", "peek", "defer"):
        monkeypatch.setattr(rig.ledger, name, away)
    ran: list[Guard] = []
    delays = []
    for deferrals in (0, 3, 9):
        outcome = rig.deliver(ran.append, deferrals=deferrals)
        assert isinstance(outcome, Deferred)
        delays.append(outcome.delay_s)
    assert ran == []
    assert rig.locks.held() == {}
    assert delays == sorted(delays)
    assert max(delays) <= rig.queue.max_delay_s


def test_the_bodys_own_error_is_failed_and_goes_on(rig: RunnerRig) -> None:
    """An error of the body makes the work FAILED, ends the lease, and reaches the queue. A later
    delivery does the work."""
    with pytest.raises(ZeroDivisionError):
        rig.deliver(lambda guard: 1 / 0)
    assert rig.state() is State.FAILED
    assert rig.locks.held() == {}
    assert isinstance(rig.deliver(retries=1), Completed)


def test_an_error_after_done_leaves_done(rig: RunnerRig) -> None:
    """An error after DONE reaches the queue, and the effects are not repeated."""

    def body(guard: Guard) -> None:
        with guard.transaction():
            guard.result = "shipped"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        rig.deliver(body)
    assert rig.state() is State.DONE
    assert rig.deliver(body, retries=1) == Answered("shipped")


@pytest.mark.parametrize("leaves", [SystemExit, KeyboardInterrupt])
def test_a_shutdown_gives_the_work_back(rig: RunnerRig, leaves: type[BaseException]) -> None:
    """After a shutdown the work is NEW at once, and counts no crash."""

    def body(guard: Guard) -> None:
        number = signal.SIGTERM if leaves is SystemExit else signal.SIGINT
        signal.raise_signal(number)

    with exiting_at_sigterm(), pytest.raises(leaves):
        rig.deliver(body)
    assert rig.state() is State.NEW
    assert rig.locks.held() == {}
    assert rig.deliver(lambda guard: guard.attempt) == Completed(2)


def test_a_body_that_exits_is_a_crash_each_time(rig: RunnerRig) -> None:
    """Each `sys.exit()` counts as a crash, without waiting for the lease. In the end the work is
    DEAD."""

    def body(guard: Guard) -> None:
        attempts.append(guard.attempt)
        sys.exit("usage: …")

    attempts: list[int] = []
    for _ in range(3):
        with pytest.raises(SystemExit):
            rig.deliver(body, max_crashes=3)
        assert (rig.state(), rig.locks.held()) == (State.PROCESSING, {})
    with pytest.raises(WorkDeadError, match=r"3 holders.*SystemExit: usage"):
        rig.deliver(body, max_crashes=3)
    assert attempts == [1, 2, 3]
    assert rig.state() is State.DEAD
    view = rig.ledger.view("ship order:1")
    assert view is not None
    assert view.error == "SystemExit: usage: …"
    assert rig.names().count("failed") == 3


def test_an_exit_after_done_leaves_done(rig: RunnerRig) -> None:
    """An exit after DONE leaves the effects."""

    def body(guard: Guard) -> None:
        with guard.transaction():
            guard.result = "shipped"
        sys.exit(0)

    with pytest.raises(SystemExit):
        rig.deliver(body)
    assert rig.deliver(body) == Answered("shipped")


def test_an_exit_that_the_ledger_never_hears_of_counts_too(
    rig: RunnerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the ledger does not learn of an exit, the lease expires, and the exit counts as a
    crash."""

    def away(*_: Any) -> None:
        raise LedgerUnavailableError("away")

    with monkeypatch.context() as patch:
        patch.setattr(rig.ledger, "crash", away)
        with pytest.raises(SystemExit):
            rig.deliver(lambda guard: sys.exit(1))
    rig.change("update taskguard_work set lease_until = 1")
    rig.change("update taskguard_keys set lease_until = 1")
    assert rig.deliver(lambda guard: guard.attempt) == Completed(2)
    view = rig.ledger.view("ship order:1")
    assert view is not None
    assert view.crashes == 1


def test_a_cancelled_body_is_failed(rig: RunnerRig) -> None:
    """A cancelled body makes the work FAILED, and the queue gets an error that does not end its
    worker."""

    def body(guard: Guard) -> None:
        async def cancelled() -> None:
            raise asyncio.CancelledError("by itself")

        asyncio.run(cancelled())

    with pytest.raises(BodyCancelledError, match="event loop") as caught:
        rig.deliver(body)
    assert isinstance(caught.value.__cause__, asyncio.CancelledError)
    view = rig.ledger.view("ship order:1")
    assert view is not None
    assert (view.state, view.crashes) == (State.FAILED, 0)
    assert (view.error or "").startswith("CancelledError")
    with pytest.raises(asyncio.CancelledError):
        rig.deliver(body, queue=None)
    assert rig.deliver(lambda guard: guard.attempt, retries=1) == Completed(3)


def test_a_dead_work_is_raised_so_that_a_person_sees_it(rig: RunnerRig) -> None:
    """After `max_crashes` every delivery raises."""

    def vanish(guard: Guard) -> None:
        rig.change("update taskguard_work set lease_until = 1")
        rig.change("update taskguard_keys set lease_until = 1")
        rig.locks.flush()
        with pytest.raises(WorkDeadError):
            contextvars.Context().run(rig.deliver, max_crashes=1)

    with pytest.raises(WorkDeadError, match="requeue"):
        rig.deliver(vanish, max_crashes=1)
    assert rig.state() is State.DEAD
    assert "dead" in rig.names()


# -- a lock server that comes back ------------------------------------------------------------


def test_the_end_of_a_lease_that_others_handed_over_wakes_them(
    rig: RunnerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the lock server was down, a holder's lease that others restored there is released at
    its end, and wakes them."""
    locks = rig.locks
    outcomes: list[Any] = []

    def wait() -> None:
        outcomes.append(rig.deliver(lambda guard: 2, **OTHER, busy="wait", wait_s=15, ttl_s=600))

    waiter = threading.Thread(target=wait)

    def body(guard: Guard) -> int:
        patch.undo()
        waiter.start()
        wait_until(locks.held, message="the lease at the lock server")
        return 1

    def away(*_: Any, **__: Any) -> Any:
        raise LockServerUnavailableError("away")

    with monkeypatch.context() as patch:
        patch.setattr(locks, "acquire", away)
        assert rig.deliver(body, ttl_s=600) == Completed(1)
    waiter.join()
    assert outcomes == [Completed(2)]
    assert locks.held() == {}


# -- without a lock server --------------------------------------------------------------------


@pytest.fixture
def alone(rig: RunnerRig) -> RunnerRig:
    """Return a rig with the ledger alone, as with `locks=None`."""
    rig.runner = Runner(locks=None, ledger=rig.ledger, events=Events(rig.events.append))
    return rig


def test_a_duplicate_waits_for_the_end_of_a_body_that_is_done(alone: RunnerRig) -> None:
    """A duplicate waits for the end of a body whose work is DONE, because its return value may
    still come."""
    outcomes: list[Any] = []

    def body(guard: Guard) -> int:
        with guard.transaction():
            pass
        outcomes.append(contextvars.Context().run(alone.deliver))
        return 7

    assert alone.deliver(body) == Completed(7)
    assert isinstance(outcomes[0], Deferred)
    assert alone.deliver(deferrals=1) == Answered(7)


@pytest.mark.parametrize("transacts", [True, False])
def test_a_body_without_a_value_is_answered_once_it_ended(
    alone: RunnerRig, transacts: bool
) -> None:
    """If a body returned None, a duplicate is answered at once."""

    def body(guard: Guard) -> None:
        if transacts:
            with guard.transaction():
                pass

    assert alone.deliver(body) == Completed(None)
    assert alone.deliver() == Answered(None)
    assert alone.queue.deferrals == []


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_a_body_that_fails_after_done_is_answered_at_once(
    alone: RunnerRig, error: type[BaseException]
) -> None:
    """If a body raised after DONE, a duplicate is answered at once, because no value will come."""

    def body(guard: Guard) -> None:
        with guard.transaction():
            pass
        raise error

    with pytest.raises(error):
        alone.deliver(body)
    assert alone.deliver() == Answered(None)


def test_a_holder_that_died_after_done_is_not_waited_for(
    alone: RunnerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a holder died after DONE, a duplicate waits for its value at most until the lease ends."""

    def body(guard: Guard) -> None:
        with guard.transaction():
            pass
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(alone.runner, "_end_answer", lambda *_: None)
        with pytest.raises(ZeroDivisionError):
            alone.deliver(body)
    assert isinstance(alone.deliver(), Deferred)
    alone.change("update taskguard_work set finished = finished - 30000000")
    assert alone.deliver(deferrals=1) == Answered(None)


# -- forks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaves", ["returns", "raises", "exits"])
@pytest.mark.parametrize("atomic", [False, True])
def test_a_process_that_the_body_forked_ends_where_it_leaves_the_body(
    rig: RunnerRig, leaves: str, atomic: bool
) -> None:
    """A process that the body forked ends when it leaves the body: it marks no work, and its parent
    goes on."""
    me = os.getpid()
    seen: list[Any] = []

    def body(guard: Guard) -> int:
        pid = os.fork()
        if pid == 0:
            if leaves == "raises":
                raise ZeroDivisionError
            if leaves == "exits":
                sys.exit(5)
            return 1
        _, status = os.waitpid(pid, 0)
        seen.append(os.waitstatus_to_exitcode(status))
        if not atomic:  # else SQLite has this body as its writer
            seen.append(rig.state())
        guard.check()
        return 2

    try:
        outcome = rig.deliver(body, atomic=atomic)
    finally:
        if os.getpid() != me:
            os._exit(77)
    assert outcome == Completed(2)
    assert seen[0] == {"returns": int(atomic), "raises": 1, "exits": 5}[leaves]
    assert atomic or seen[1] is State.PROCESSING
    assert rig.deliver(message="other") == Answered(2)


def test_a_plain_call_in_a_forked_process_has_no_work(rig: RunnerRig) -> None:
    """A process that was forked in a plain call learns that it holds nothing."""
    me = os.getpid()

    def body(guard: Guard) -> int:
        pid = os.fork()
        if pid:
            _, status = os.waitpid(pid, 0)
            assert os.waitstatus_to_exitcode(status) == 3
            assert rig.state() is State.PROCESSING
        return 2

    status = 4
    try:
        outcome = rig.deliver(body, queue=None)
    except LeaseLostError:
        status = 3
        if os.getpid() == me:
            raise
    finally:
        if os.getpid() != me:
            os._exit(status)
    assert outcome == Completed(2)


# -- what a body raises -----------------------------------------------------------------------


def test_an_error_without_words_is_failed_as_any_other(rig: RunnerRig) -> None:
    """If `str()` of a body's error raises, its claim still ends, and the record names the class."""

    class WordlessError(Exception):
        def __str__(self) -> str:
            raise AttributeError("no words")

    def body(guard: Guard) -> None:
        raise WordlessError

    for number in range(4):
        with pytest.raises(WordlessError):
            rig.deliver(body, retries=number)
        assert (rig.state(), rig.locks.held()) == (State.FAILED, {})
    view = rig.ledger.view("ship order:1")
    assert view is not None
    assert view.crashes == 0
    assert (view.error or "").startswith("WordlessError: ")


def test_an_exit_without_words_is_a_crash_that_names_its_class(rig: RunnerRig) -> None:
    """If `str()` of an exit raises, the exit counts as a crash, its lease ends at once, and the
    record names the class."""

    class WordlessExit(SystemExit):  # as SystemExit
        def __str__(self) -> str:
            raise AttributeError("no words")

    def body(guard: Guard) -> None:
        raise WordlessExit

    with pytest.raises(WordlessExit):
        rig.deliver(body)
    view = rig.ledger.view("ship order:1")
    assert view is not None
    assert view.state is State.PROCESSING
    assert view.lease_until_s <= time.time()
    assert (view.error or "").startswith("WordlessExit: ")


def test_a_refused_commit_is_in_the_history_of_its_work(rig: RunnerRig) -> None:
    """The history says which holder vanished, and that its late commit was refused."""

    def body(guard: Guard) -> None:
        rig.change("update taskguard_work set lease_until = 1")
        rig.change("update taskguard_keys set lease_until = 1")
        assert isinstance(rig.ledger.claim(request()), Claimed)
        fences.append(guard.fence)
        with guard.transaction():
            pass

    fences: list[int | None] = []
    rig.deliver(body)
    with rig.ledger.database.transaction() as db:
        found = read(db.scalar(sa.select(WORK.c.history)))
    assert [(each.what, each.fence) for each in found] == [
        (Happened.TAKEOVER, fences[0]),
        (Happened.STALE, fences[0]),
    ]
