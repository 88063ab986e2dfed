"""`pytest_taskguard`: tasks of each kind, delivered twice, overtaken, killed at each boundary."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import taskguard
from pytest_taskguard import EffectsError, Memory
from support import plugin_tasks as tasks
from support.needs import need_redis_in_memory
from support.scripts import run_script
from support.waiting import wait_until
from taskguard import Guard
from taskguard.errors import ConfigurationError, TransactionUsageError
from taskguard.ledger.sql import SqlLedger


@pytest.fixture(autouse=True)
def redis_in_memory() -> None:
    """Skip without the plugin's parts; some tests here make them themselves."""
    need_redis_in_memory()


@pytest.fixture(params=["sqlite", "postgresql"])
def taskguard_ledger(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Override the fixture as users do: a file by its URL, and an Engine of the program's own."""
    if request.param == "sqlite":
        yield request.getfixturevalue("sqlite_url")
        return
    engine = sa.create_engine(request.getfixturevalue("pg_url"))
    yield engine
    engine.dispose()


@pytest.fixture
def rows(taskguard_memory: Memory) -> Any:
    """Return a function that counts the rows that all tasks have written."""
    tasks.ROWS.metadata.create_all(taskguard_memory.engine)

    def count() -> int:
        with taskguard_memory.engine.connect() as db:
            return int(db.execute(sa.select(sa.func.count()).select_from(tasks.ROWS)).scalar_one())

    return count


def plain(item: str, guard: Guard) -> str:
    """Write one row: the function under `tg.guarded`."""
    with guard.transaction() as db:
        db.execute(sa.insert(tasks.ROWS).values(item=item))
    return f"did {item}"


@pytest.fixture
def guarded_plain() -> Any:
    """Return a guarded plain function whose servers are not there."""
    tg = taskguard.connect(
        locks="redis://127.0.0.1:1/0", ledger="postgresql+psycopg://nobody@127.0.0.1:1/nothing"
    )
    return tg.guarded(key="item:<item>")(plain)


@pytest.fixture(params=["celery", "rq", "plain"])
def task(request: pytest.FixtureRequest) -> Any:
    """Return one task of each kind."""
    if request.param == "plain":
        return request.getfixturevalue("guarded_plain")
    return tasks.celery_task if request.param == "celery" else tasks.rq_job


def test_the_second_delivery_gets_the_first_ones_result(
    task: Any, rows: Any, deliver_twice: Any, taskguard_memory: Memory
) -> None:
    """The second delivery has no effect of its own, and an event says so."""
    assert deliver_twice(task, ("a",)) == ("did a", "did a")
    assert rows() == 1
    assert [event.name for event in taskguard_memory.events].count("duplicate") == 1


@pytest.mark.parametrize("task", [tasks.every_message, tasks.rq_every_message])
def test_both_deliveries_are_of_one_message(task: Any, rows: Any, deliver_twice: Any) -> None:
    """If each message is work of its own, two messages have two effects and a copy has none."""
    deliver_twice(task, (), {"item": "a"})
    assert rows() == 1
    deliver_twice(task, ("a",))
    assert rows() == 2


def test_a_holder_that_is_overtaken_is_refused(task: Any, rows: Any, lose_lease_at: Any) -> None:
    """The caller of an overtaken holder gets the result that the other one stored."""
    lost = lose_lease_at(task, ("a",), at="transaction.begin asked")
    assert (lost.result, lost.overtaker, lost.refused) == ("did a", "did a", True)
    assert rows() == 1


def test_a_holder_is_paused_before_its_body_by_default(
    task: Any, rows: Any, lose_lease_at: Any
) -> None:
    """A holder is paused before its body by default, so every task with a ledger can be
    overtaken."""
    assert lose_lease_at(task, ("a",)).refused
    assert rows() == 1


@pytest.mark.parametrize("asks", ["check", "step"])
def test_a_holder_that_looks_at_its_lease_finds_it_lost(
    rows: Any, lose_lease_at: Any, asks: str
) -> None:
    """A paused holder that checks its lease finds it lost, and makes no further call."""
    calls: list[str] = []

    @taskguard.connect(locks="memory://", ledger="sqlite://").guarded(key="item:<item>")
    def careful(item: str, guard: Guard) -> None:
        if asks == "check":
            guard.check()
            calls.append(item)
        else:
            guard.step("call", calls.append, item)

    lose_lease_at(careful, ("a",))
    assert calls == ["a"]


@pytest.mark.parametrize("at", ["transaction.complete_in_block done", "transaction.commit asked"])
def test_an_exclusive_holder_is_an_error(rows: Any, lose_lease_at: Any, at: str) -> None:
    """If a holder's locked rows keep all others out, the error names a boundary where one can
    enter."""
    with pytest.raises(ValueError, match=r"transaction\.begin asked"):
        lose_lease_at(tasks.celery_task, ("a",), at=at)


def test_a_boundary_that_does_not_come_by_is_an_error_with_those_that_do(
    rows: Any, lose_lease_at: Any
) -> None:
    """A misspelt boundary is an error that lists the existing ones, because it would prove
    nothing."""
    with pytest.raises(ValueError, match=r"'ledger\.clam'.*ledger\.claim done, transaction\.begin"):
        lose_lease_at(tasks.celery_task, ("a",), at="ledger.clam")


@pytest.mark.parametrize("taskguard_ledger", ["sqlite"], indirect=True)
def test_inside_a_transaction_of_sqlite_no_message_overtakes(rows: Any, lose_lease_at: Any) -> None:
    """SQLite has one writer at a time. The error names a boundary at which another holder can take
    over."""
    with pytest.raises(ValueError, match=r"transaction\.begin asked"):
        lose_lease_at(tasks.celery_task, ("a",), at="transaction.statement done")


def test_a_right_task_has_one_effect_wherever_it_dies(
    task: Any, rows: Any, explore_crashes: Any
) -> None:
    """Every boundary of the lock server, the ledger and the transaction is a line of the report."""
    report = explore_crashes(task, ("a",), effects=rows)
    points = [line.point for line in report.lines]
    assert points[0] == "(none)"
    for call in ("locks.acquire", "ledger.claim", "transaction.statement", "transaction.commit"):
        assert {f"{call} asked", f"{call} done"} <= set(points)
    assert {line.deliveries for line in report.lines[1:]} == {2}
    assert str(report).count("\n") == len(points)


@pytest.mark.once
def test_retries_within_a_delivery_are_part_of_it(rows: Any, explore_crashes: Any) -> None:
    """With bind, autoretry_for and atomic, the boundaries of the second attempt are killed, too."""
    report = explore_crashes(tasks.retried, ("a",), effects=rows)
    assert "ledger.claim done#2" in [line.point for line in report.lines]


@pytest.mark.once
def test_each_part_of_a_body_has_its_effect_once(rows: Any, explore_crashes: Any) -> None:
    """A body with two parts has two effects, which `expected` says."""
    explore_crashes(tasks.in_parts, ("a",), effects=rows, expected=2)


@pytest.mark.once
def test_what_a_task_finds_changed_is_put_back(
    taskguard_memory: Memory, rows: Any, explore_crashes: Any
) -> None:
    """`before_each` runs before the effects are counted."""

    def clear() -> None:
        with taskguard_memory.engine.begin() as db:
            db.execute(sa.delete(tasks.ROWS))

    report = explore_crashes(tasks.celery_task, ("a",), effects=rows, before_each=clear)
    assert rows() == 1
    assert len(report.lines) > 10


@pytest.mark.once
def test_a_way_that_is_taken_once_only_is_an_error(explore_crashes: Any) -> None:
    """A boundary that occurs only in the first run is an error, because no later run would be
    killed there."""
    done: list[int] = []

    @taskguard.connect(locks="memory://", ledger="sqlite://").guarded(key="item:<item>")
    def cached(item: str, guard: Guard) -> None:
        if not done:
            with guard.checkpoint(1):
                pass
        done.append(1)

    with pytest.raises(ValueError, match="before_each"):
        explore_crashes(cached, ("a",), effects=lambda: 1, expected=0)
    explore_crashes(cached, ("a",), effects=lambda: 1, expected=0, before_each=done.clear)


@pytest.mark.once
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
@pytest.mark.parametrize("taskguard_ledger", ["sqlite"], indirect=True)
def test_no_thread_is_left_for_each_line(rows: Any, explore_crashes: Any) -> None:
    """The watchdogs of earlier runs end with their last lease."""

    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before = threads()
    explore_crashes(tasks.celery_task, ("a",), effects=rows)
    wait_until(lambda: threads() <= before + 1, message=lambda: f"{threads()}")


def test_a_ledger_in_use_is_refused(taskguard_ledger: Any) -> None:
    """A ledger in use is refused, because tests would delete its records. The connection that
    checked it is closed."""
    ledger = SqlLedger(taskguard_ledger)
    ledger.create_schema()
    tg = taskguard.connect(locks="memory://", ledger=ledger)
    tg.guarded(key="item:<item>")(lambda item: None)("a")
    with pytest.raises(ConfigurationError, match=r"record of '.*item:a'.*only the tests use"):
        Memory(taskguard_ledger)
    tg.close()
    gc.collect()  # Python 3.13 and later warn of an unclosed SQLite connection


@pytest.mark.parametrize("database", ["sqlite://", "sqlite:///:memory:"])
def test_a_database_in_memory_is_refused(database: str) -> None:
    """A database in memory is refused, as URL and as Engine: it would end with the killed
    connection."""
    with pytest.raises(ConfigurationError, match="Use a file in tmp_path"):
        Memory(database)
    with pytest.raises(ConfigurationError, match="Use a file in tmp_path"):
        Memory(sa.create_engine(database))


@pytest.mark.once
def test_effects_outside_the_transaction_are_found_out(rows: Any, explore_crashes: Any) -> None:
    """An effect before the transaction happens twice, and one after it not at all. The table marks
    the lines, and the error says how to fix it."""
    calls: list[str] = []

    @taskguard.connect(locks="memory://", ledger="sqlite://").guarded(key="item:<item>")
    def around(item: str, guard: Guard) -> None:
        calls.append("before")
        with guard.transaction() as db:
            db.execute(sa.insert(tasks.ROWS).values(item=item))
        calls.append("after")

    with pytest.raises(EffectsError) as found:
        explore_crashes(around, ("a",), effects=lambda: calls.count("before"))
    text = str(found.value)
    assert re.search(
        r"\nledger\.claim done +2 +1\ntransaction\.begin asked +2 +2  <- not 1\n", text
    )
    assert "Move it inside, or pass `guard.idempotency_key`" in text
    assert "fewer" not in text
    with pytest.raises(EffectsError, match="Too few effects: DONE is committed") as found:
        explore_crashes(around, ("a",), effects=lambda: calls.count("after"))
    assert [line.point for line in found.value.report.wrong] == ["transaction.commit done"]


def test_a_task_that_fails_fails_the_test(explore_crashes: Any, taskguard_memory: Memory) -> None:
    """If the task fails, the test fails with the task's error, not with a table."""

    @taskguard.connect(locks="memory://", ledger="sqlite://").guarded(key="item:<item>")
    def wrong(item: str) -> None:
        raise KeyError(item)

    with pytest.raises(KeyError, match="a"):
        explore_crashes(wrong, ("a",), effects=lambda: 0)


def test_what_is_no_task_is_said(deliver_twice: Any) -> None:
    """An object that is not a task raises an error that says so."""
    with pytest.raises(TypeError, match="neither a Celery task, an RQ job nor a function"):
        deliver_twice("celery_task", ("a",))


@pytest.mark.parametrize("taskguard_ledger", ["sqlite"], indirect=True)
def test_guards_with_locks_only_stay_so(taskguard_memory: Memory) -> None:
    """A test does not give guards without a ledger a transaction that production does not have."""
    tg = taskguard.connect(locks="redis://127.0.0.1:1/0", ledger=None)
    with pytest.raises(ConfigurationError, match="there is no ledger"):
        tg.guarded(key="item:<item>")(plain)("a")
    with tg.lock("item:b") as lease:
        assert taskguard_memory.redis.keys("*item:b*")
        assert lease.fence > 0


def test_afterwards_guards_are_as_they_were_configured(
    taskguard_ledger: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a test, guards have their own configuration again. One that was never configured says
    so again."""
    monkeypatch.delenv("TASKGUARD_LOCKS_URL", raising=False)
    monkeypatch.delenv("TASKGUARD_LEDGER_URL", raising=False)
    memory = Memory(taskguard_ledger)
    before = set(threading.enumerate())
    with memory.process():
        tg = taskguard.connect()
        with tg.lock("item:a"):
            pass
        assert memory.events[0].name == "acquired"
    with pytest.raises(ConfigurationError, match="TASKGUARD_LEDGER_URL"):
        tg.lock("item:a")
    tg.close()
    memory.close()
    with (
        sa.create_engine(taskguard_ledger).connect()
        if isinstance(taskguard_ledger, str)
        else taskguard_ledger.connect() as db
    ):
        assert db.execute(sa.text("select count(*) from taskguard_keys")).scalar_one() == 0
        db.connection.invalidate()
    assert set(threading.enumerate()) <= before  # watchdogs of earlier tests may end meanwhile


@pytest.mark.once
def test_outside_of_a_body_there_is_no_guard_left(rows: Any, explore_crashes: Any) -> None:
    """A body that "died" is no longer the current guard afterwards."""
    explore_crashes(tasks.celery_task, ("a",), effects=rows)
    with pytest.raises(TransactionUsageError):
        taskguard.current_guard()


def test_pytest_loads_nothing_before_a_fixture_is_used() -> None:
    """pytest loads the plugin's modules only when a fixture is used, because every start of pytest
    would pay for them."""
    code = (
        "import sys, pytest_taskguard.plugin as p; "
        "print([n for n in ('sqlalchemy', 'redis', 'fakeredis', 'celery', 'rq', 'taskguard') "
        "if n in sys.modules])"
    )
    assert run_script(code) == "[]"
