"""Counts of a process: sent from time to time, kept after failures, and never in the way."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import sqlalchemy as sa

import taskguard
from support.proxy import Mode, Proxy
from support.scripts import run_script
from support.waiting import patience_s, wait_until
from taskguard.clock import SYSTEM_CLOCK
from taskguard.errors import LedgerUnavailableError
from taskguard.events import Delivered, Event, Events
from taskguard.integration import Completed, Delivery, MessageRef, Runner
from taskguard.ledger.sql import SqlLedger
from taskguard.locks import MemoryLocks
from taskguard.metrics import OTHER_TASK, TASKS, zeros_of_task
from taskguard.model.counts import Count, Noted
from taskguard.model.history import Happened
from taskguard.model.lease import Lease, new_owner
from taskguard.model.outcomes import Ended
from taskguard.model.policy import make_policy
from taskguard.run import flush as flushing
from taskguard.run import tally as tallying
from taskguard.run.flush import Flush
from taskguard.run.happenings import MOST
from taskguard.run.tally import Tally

DONE = "deliveries/done"


class NotingLedger:
    """Takes counts, or does what a test says before or after it."""

    def __init__(self) -> None:
        self.rows: list[Count] = []
        self.happened: list[Noted] = []
        self.begun: list[str] = []
        self.calls = 0
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None

    def add_counts(self, rows: Any, *, happened: Any = (), committing: Callable[[], None]) -> None:
        self.calls += 1
        self.before()
        committing()
        self.after()
        self.rows += rows
        self.happened += happened

    def begin_counts(self, tasks: list[str]) -> None:
        self.begun += tasks

    def n(self, what: str = DONE, task: str = "ship") -> float:
        """Return the number of one counter."""
        return sum(row.n for row in self.rows if (row.task, row.what) == (task, what))


@pytest.fixture(autouse=True)
def a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No task has zeros yet."""
    monkeypatch.setattr(flushing, "_begun", set())


@pytest.fixture
def ledger() -> NotingLedger:
    return NotingLedger()


@pytest.fixture
def tally() -> Tally:
    return Tally()


@pytest.fixture
def flush(tally: Tally, ledger: NotingLedger) -> Flush:
    return Flush(tally, ledger)  # type: ignore[arg-type]  # it counts only


def raising(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def count(tally: Tally, times: int = 1, task: str = "ship") -> None:
    for _ in range(times):
        tally.delivery(task, Ended.DONE, 0.2, 0.01)


# -- sending ------------------------------------------------------------------------------------


def test_counts_are_sent_once(tally: Tally, flush: Flush, ledger: NotingLedger) -> None:
    """With the values of each histogram by its buckets."""
    count(tally, 1_000)
    flush.flush()
    flush.flush()
    assert (ledger.n(), ledger.calls) == (1_000, 1)
    assert ledger.n("wait/le/0.5") == ledger.n("hold/le/0.01") == 1_000
    assert ledger.n("wait/sum") == pytest.approx(200)
    assert tally.is_empty


def test_counts_that_were_not_sent_are_added_to_the_next_flush(
    tally: Tally, flush: Flush, ledger: NotingLedger
) -> None:
    """After a minute, because the ledger may be down."""
    ledger.before = raising(LedgerUnavailableError("down"))
    count(tally, 3)
    tally.happened(Noted(what=Happened.DUPLICATE, key="k"))
    flush.flush()
    assert flush.due_at_s - time.monotonic() > 50.0
    ledger.before = lambda: None
    count(tally, 2)
    flush.flush()
    assert ledger.n() == 5
    assert ledger.n("wait/le/0.5") == 5
    assert [noted.n for noted in ledger.happened] == [1]
    assert ledger.n("counts_lost", "") == 0


def test_a_counter_that_was_not_sent_is_one_row_with_its_new_values(
    tally: Tally, pg_url: str
) -> None:
    """PostgreSQL refuses a statement that adds to one row twice, so no flush would work again."""
    ledger = SqlLedger(pg_url)
    ledger.create_schema()
    count(tally, 2)
    tally.put_back(*tally.drain())
    count(tally, 3)
    Flush(tally, ledger).flush()
    totals = {row.what: row.n for row in ledger.counts() if row.task == "ship"}
    assert (totals[DONE], totals["wait/le/0.5"], totals["wait/sum"]) == (5, 5, pytest.approx(1.0))
    ledger.close()


def test_a_time_limit_while_counts_are_drained_loses_none(
    tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are sent by the next flush."""
    count(tally, 3)
    with monkeypatch.context() as patched, pytest.raises(TimeoutError):
        patched.setattr(tallying, "_rows", lambda *_: raising(TimeoutError())())
        tally.drain()
    rows, _ = tally.drain()
    assert {row.what: row.n for row in rows}[DONE] == 3


def test_counts_that_may_have_been_sent_are_not_sent_again(
    tally: Tally, flush: Flush, ledger: NotingLedger
) -> None:
    """They are counted as lost."""
    ledger.after = raising(LedgerUnavailableError("no answer to the COMMIT"))
    count(tally, 3)
    flush.flush()
    ledger.after = lambda: None
    flush.flush()
    assert (ledger.n(), ledger.n("counts_lost", "")) == (0, 3)


@pytest.mark.parametrize("kind", ["an exception", "gevent's"])
def test_a_time_limit_in_a_flush_ends_only_the_flush(
    tally: Tally, flush: Flush, ledger: NotingLedger, kind: str
) -> None:
    """The delivery has ended, so a limit of its task is no failure. gevent's is no Exception."""

    class SoftLimitError(Exception):
        pass

    gevent = pytest.importorskip("gevent") if kind == "gevent's" else None
    ledger.before = raising(SoftLimitError() if gevent is None else gevent.Timeout(1))
    count(tally)
    flush.flush()
    ledger.before = lambda: None
    flush.flush()
    assert ledger.n() == 1


def test_a_shutdown_in_a_flush_goes_on_and_the_counts_stay(
    tally: Tally, flush: Flush, ledger: NotingLedger
) -> None:
    """The next flush is that of the end of the process."""
    ledger.before = raising(SystemExit(0))
    count(tally)
    with pytest.raises(SystemExit):
        flush.flush()
    ledger.before = lambda: None
    flush.flush()
    assert ledger.n() == 1


def test_a_time_limit_while_counts_are_kept_keeps_each_once(
    tally: Tally, flush: Flush, ledger: NotingLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It arrives after the first one was added again."""
    ledger.before = raising(LedgerUnavailableError("down"))
    count(tally, 3)
    heard: list[Any] = []

    def hear(entry: Any) -> None:
        heard.append(entry)
        Tally._hear(tally, entry)
        if len(heard) == 2:
            raise TimeoutError

    with monkeypatch.context() as patched:
        patched.setattr(tally, "_hear", hear)
        flush.flush()
    ledger.before = lambda: None
    flush.flush()
    assert ledger.n() == ledger.n("wait/le/0.5") == 3


def test_a_flush_in_a_flush_sends_nothing(tally: Tally, flush: Flush, ledger: NotingLedger) -> None:
    """A signal's handler may come at any moment."""
    ledger.before = flush.flush
    count(tally)
    flush.flush()
    assert (ledger.n(), ledger.calls) == (1, 1)


def test_a_handler_that_counts_while_counts_are_added_up_waits_for_nothing(tally: Tally) -> None:
    """It interrupts the thread that has the lock."""
    assert tally._adding_up.acquire(False)
    count(tally, 600)
    assert tally.drain() == ([], [])
    tally._adding_up.release()
    rows, _ = tally.drain()
    assert sum(row.n for row in rows if row.what == DONE) == 600


def test_threads_lose_no_count(tally: Tally, flush: Flush, ledger: NotingLedger) -> None:
    """Also while counts are sent."""
    threads = [threading.Thread(target=count, args=(tally, 5_000)) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        flush.flush()
    flush.flush()
    assert ledger.n() == 20_000


def test_tasks_beyond_the_maximum_are_counted_together(
    tally: Tally, flush: Flush, ledger: NotingLedger
) -> None:
    """So that names which a program makes up do not fill the memory."""
    for number in range(TASKS + 50):
        count(tally, 2, f"task{number}")
    flush.flush()
    assert ledger.n(task="task0") == ledger.n(task=f"task{TASKS - 1}") == 2
    assert ledger.n(task=OTHER_TASK) == 100


def test_happenings_of_a_key_are_added_up_and_the_rest_is_counted(
    tally: Tally, flush: Flush, ledger: NotingLedger
) -> None:
    """A process sends a bounded number of rows, and says what it left out."""
    for number in range(MOST + 20):
        for _ in range(3):
            tally.happened(Noted(what=Happened.DUPLICATE, key=f"order:{number}"))
    ledger.before = raising(LedgerUnavailableError("down"))
    flush.flush()
    ledger.before = lambda: None
    flush.flush()
    by_key = {noted.key: noted.n for noted in ledger.happened}
    assert (len(by_key), by_key["order:0"], by_key[""]) == (MOST + 1, 3, 60)
    assert ledger.n("history_dropped", "") == 60


def test_zeros_of_many_tasks_are_written_in_parts(
    flush: Flush, ledger: NotingLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of several hundred take longer than a deadline, and without zeros no count is sent."""
    tasks = [f"task{number}" for number in range(250)]
    begin, calls = ledger.begin_counts, []

    def begin_counts(some: list[str]) -> None:
        calls.append(len(some))
        if len(some) > 50 or len(calls) == 3:
            raise LedgerUnavailableError("no answer in time")
        begin(some)

    monkeypatch.setattr(ledger, "begin_counts", begin_counts)
    flush.begin(tasks)
    flush.due_at_s = time.monotonic()
    flush.begin(tasks)
    assert ledger.begun == tasks


def test_lost_leases_are_counted_by_reason(
    tally: Tally, flush: Flush, ledger: NotingLedger
) -> None:
    """And listed for their key."""
    lease = Lease(
        keys=("k",),
        owner=new_owner("m"),
        ttl_s=30.0,
        clock=SYSTEM_CLOCK,
        taken_at_s=0.0,
        trusted_until_s=30.0,
        fence=7,
    )
    tally.lease_lost("ship", "expired", lease, "it could not be renewed in time")
    flush.flush()
    assert ledger.n("leases_lost/expired") == 1
    [noted] = ledger.happened
    assert (noted.what, noted.key, noted.fence) == (Happened.LEASE_LOST, "k", 7)


# -- processes ------------------------------------------------------------------------------------


def in_a_child(function: Callable[[], int]) -> int:
    """Return what the function returns in a forked child."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = function()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_begins_at_zero(tally: Tally, flush: Flush, ledger: NotingLedger) -> None:
    """Also if another thread of its parent was sending or adding up."""
    count(tally, 300)
    assert tally._adding_up.acquire(False)
    assert flush._mutex.acquire(False)

    def child() -> int:
        count(tally, 2)
        flush.flush()
        return int(ledger.n())

    assert in_a_child(child) == 2
    tally._adding_up.release()
    flush._mutex.release()
    flush.flush()
    assert ledger.n() == 300


def test_a_thread_sends_what_an_idle_process_has_left(
    tally: Tally, flush: Flush, ledger: NotingLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends when nothing is left, and starts again with the next delivery."""
    monkeypatch.setattr(flushing, "_idle_thread", True)
    for times in (1, 2):
        count(tally)
        flush.due_at_s = time.monotonic() + 0.1
        flush.watch()
        wait_until(lambda times=times: ledger.n() == times)
        wait_until(lambda: not flush._watched)


def test_a_count_that_comes_as_the_thread_ends_is_sent_by_another_one(
    ledger: NotingLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread has seen that nothing is left, and counts as running."""
    monkeypatch.setattr(flushing, "_idle_thread", True)
    late: list[None] = [None]

    class Watched(Tally):
        @property
        def is_empty(self) -> bool:
            found = super().is_empty
            if found and late:
                late.pop()
                count(self)
                flush.watch()
                flush.due_at_s = time.monotonic()
            return found

    tally = Watched()
    flush = Flush(tally, ledger)  # type: ignore[arg-type]  # it counts only
    count(tally)
    flush.due_at_s = time.monotonic()
    flush.watch()
    wait_until(lambda: ledger.n() == 2)


def test_a_process_sends_its_counts_when_it_ends(sqlite_url: str) -> None:
    """And zeros for each task with its first delivery."""
    ledger = SqlLedger(sqlite_url)
    ledger.create_schema()
    run_script(
        f"""
import taskguard
tg = taskguard.connect(locks=None, ledger={sqlite_url!r})

@tg.guarded(key="order:<number>")
def ship(number):
    return number

ship(1), ship(1), ship(2)
"""
    )
    found = {(row.task, row.what): row.n for row in ledger.counts()}
    task = "__main__.ship"
    assert found[task, DONE] == 2
    assert found[task, "deliveries/duplicate"] == 1
    assert found[task, "deliveries/dead"] == 0
    assert {what for each, what in found if each == task} == set(zeros_of_task())
    assert found["", "operation/ledger/claim/sum"] > 0
    ledger.close()


# -- deliveries -----------------------------------------------------------------------------------


def delivery(**values: Any) -> Delivery:
    return Delivery(
        **{
            "keys": ("order:1",),
            "work": "ship order:1",
            "task": "ship",
            "message": MessageRef("m"),
            "policy": make_policy({}, task="ship"),
            **values,
        }
    )


def test_a_time_limit_while_a_delivery_is_counted_does_not_fail_it(sqlite_url: str) -> None:
    """DONE is committed by then."""
    ledger = SqlLedger(sqlite_url)
    ledger.create_schema()
    runner = Runner(locks=MemoryLocks(), ledger=ledger, events=Events(lambda event: None))
    runner.counting.tally.delivery = raising(TimeoutError())  # type: ignore[assignment, method-assign]
    assert runner.deliver(delivery(), lambda guard: 7) == Completed(7)
    ledger.close()


def test_names_of_tasks_that_a_program_makes_up_fill_neither_memory_nor_table(
    ledger: NotingLedger,
) -> None:
    """The counters of the rest are those of one task."""
    runner = Runner(locks=None, ledger=ledger)  # type: ignore[arg-type]  # it counts only
    for number in range(TASKS + 5):
        runner.counting.unread(f"task{number}", "m", Ended.FAILED)
    assert len(ledger.begun) == len(runner.counting._tasks) == TASKS


@pytest.mark.parametrize("silent", ["claim", "fail"])
def test_a_call_without_an_answer_puts_the_flush_off(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    """The delivery has waited for the ledger once, and does not wait again to count itself."""
    ledger = SqlLedger(sqlite_url)
    ledger.create_schema()
    runner = Runner(locks=MemoryLocks(), ledger=ledger)
    asked: list[str] = []
    for name in ("add_counts", "begin_counts"):
        monkeypatch.setattr(ledger, name, lambda *_, name=name, **__: asked.append(name))

    def silence(*_: Any, **__: Any) -> Any:
        raise LedgerUnavailableError("no answer")

    monkeypatch.setattr(ledger, silent, silence)
    runner.counting.flush.due_at_s = time.monotonic()
    with pytest.raises((LedgerUnavailableError, ValueError)):
        runner.deliver(delivery(), lambda guard: int("x"))
    assert runner.counting.flush.is_put_off
    assert asked == []
    ledger.close()


def test_without_a_ledger_nothing_is_kept_and_listeners_get_the_event() -> None:
    """Memory does not grow."""
    heard: list[Event] = []
    runner = Runner(locks=MemoryLocks(), ledger=None, events=Events(heard.append))
    runner.deliver(delivery(work=None), lambda guard: None)
    [event] = [each for each in heard if isinstance(each, Delivered)]
    assert (event.outcome, event.attempt, event.key) == ("done", 1, "order:1")
    assert runner.counting.tally.is_empty
    assert runner.counting.flush not in flushing._flushes


def test_a_runtime_that_is_closed_sends_its_counts(sqlite_url: str) -> None:
    """So a program counts right even if it goes on for long, or ends without its exit handlers."""
    tg = taskguard.connect(locks=None, ledger=sqlite_url)
    assert tg.ledger is not None
    tg.ledger.create_schema()

    @tg.guarded(key="order:<n>")
    def ship(n: int) -> None: ...

    ship(1)
    tg.close()
    with closing(SqlLedger(sqlite_url)) as ledger:
        assert {each.n for each in ledger.counts() if each.what == DONE} == {1}


@pytest.fixture
def frozen(pg_url: str) -> Iterator[tuple[Proxy, Runner]]:
    """A runner whose way to PostgreSQL can be frozen."""
    url = sa.make_url(pg_url)
    with Proxy(url.port or 5432) as proxy:
        proxied = url.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
        ledger = SqlLedger(proxied)
        ledger.create_schema()
        yield proxy, Runner(locks=None, ledger=ledger)
        proxy.mode = Mode.PASS
        ledger.close()


def test_a_frozen_ledger_delays_one_delivery_for_a_moment(frozen: tuple[Proxy, Runner]) -> None:
    """A flush has one deadline, and the next one comes a minute later. No count is lost."""
    proxy, runner = frozen
    runner.deliver(delivery(), lambda guard: None)
    flush = runner.counting.flush
    count(runner.counting.tally)
    proxy.mode = Mode.BLACK_HOLE
    began_s = time.monotonic()
    flush.flush()
    assert time.monotonic() - began_s < patience_s()
    assert not flush.is_due
    assert flush.due_at_s - time.monotonic() > flushing.EVERY_S
    proxy.mode = Mode.PASS
    flush.flush()
    ledger: Any = runner.ledger
    totals = {row.what: row.n for row in ledger.counts() if row.task == "ship"}
    assert totals[DONE] == 2


def test_a_commit_without_an_answer_is_added_once_at_most(frozen: tuple[Proxy, Runner]) -> None:
    """It is counted as lost, even if the database has it."""
    proxy, runner = frozen
    runner.deliver(delivery(), lambda guard: None)
    flush = runner.counting.flush
    flush.flush()
    count(runner.counting.tally, 5)
    proxy.lose_reply_to(b"COMMIT\x00", then=Mode.CUT)
    flush.flush()
    assert not proxy.armed
    proxy.mode = Mode.PASS
    wait_until(lambda: flush.flush() or runner.counting.tally.is_empty)
    ledger: Any = runner.ledger
    totals = {(row.task, row.what): row.n for row in ledger.counts()}
    assert totals["ship", DONE] in (1, 6)
    assert totals["", "counts_lost"] == 5
