"""`@tg.guarded` on an `async def`, and `tg.arun()`: guarded functions beside an event loop."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import sqlalchemy as sa

import taskguard
from support.waiting import patience_s
from taskguard import Guard, SqlLedger, TaskGuard
from taskguard.errors import KeyAlreadyHeldError, KeyBusyError, LeaseLostError
from taskguard.events import Event


@pytest.fixture
def heard() -> list[Event]:
    return []


@pytest.fixture(params=["redis and a ledger", "redis"])
def tg(
    request: pytest.FixtureRequest, redis_url: str, sqlite_url: str, heard: list[Event]
) -> Iterator[TaskGuard]:
    ledger = sqlite_url if "ledger" in request.param else None
    if ledger is not None:
        with closing(SqlLedger(ledger)) as tables:
            tables.create_schema()
    with closing(
        taskguard.connect(locks=redis_url, ledger=ledger, listeners=[heard.append])
    ) as made:
        yield made


def run(main: Any) -> Any:
    """Run a coroutine, which must not take forever."""
    return asyncio.run(asyncio.wait_for(main, patience_s()))


async def until(condition: Any) -> None:
    """Wait in a coroutine: it goes on only if the event loop does."""
    while not condition():  # noqa: ASYNC110  # no event says so
        await asyncio.sleep(0.001)


def states(url: str) -> list[str]:
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.connect() as db:
        return list(db.scalars(sa.text("select state from taskguard_work")))


def test_it_stays_a_coroutine_function_whose_body_runs_in_the_callers_loop(tg: TaskGuard) -> None:
    """Its body has the guard, runs once, and a later call gets the stored result."""
    runs: list[Any] = []

    @tg.guarded(key="order:<order>")
    async def ship(order: int, guard: Guard) -> str:
        runs.append((asyncio.get_running_loop(), threading.get_ident()))
        assert taskguard.current_guard() is guard
        assert guard.key == f"order:{order}"
        await asyncio.sleep(0)
        return "shipped"

    assert inspect.iscoroutinefunction(ship)

    async def main() -> None:
        call: Any = ship
        assert [await call(7), await call(order=7)] == ["shipped", "shipped"]
        assert runs[0] == (asyncio.get_running_loop(), threading.get_ident())

    run(main())
    assert len(runs) == (2 if tg.ledger is None else 1)


def test_a_second_caller_is_refused_or_waits(tg: TaskGuard) -> None:
    """While one coroutine runs the body, another one is refused, or waits beside the loop."""

    @tg.guarded(key="a", once_per="message")
    async def refused() -> None:
        raise AssertionError

    @tg.guarded(key="a", once_per="message", busy="wait", wait_s=60)
    async def work(begun: asyncio.Event, may_end: asyncio.Event) -> int:
        begun.set()
        await may_end.wait()
        return 7

    async def main() -> None:
        begun, may_end = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(work(begun, may_end))
        await begun.wait()
        with pytest.raises(KeyBusyError):
            await refused()
        begun.clear()
        second = asyncio.create_task(work(begun, may_end))
        await asyncio.sleep(0.05)
        assert not begun.is_set()
        may_end.set()
        assert (await first, await second) == (7, 7)

    run(main())


def test_an_error_of_the_body_arrives(tg: TaskGuard, sqlite_url: str, heard: list[Event]) -> None:
    """The caller gets the body's exception, and the work is FAILED."""

    @tg.guarded(key="a")
    async def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(fail())
    assert [event.name for event in heard].count("failed") == 1
    if tg.ledger is not None:
        assert states(sqlite_url) == ["FAILED"]


def test_a_cancelled_caller_cancels_the_body(tg: TaskGuard) -> None:
    """The caller ends after its body and after the release of the key. The next call runs."""
    begun: list[bool] = []
    ended: list[str] = []

    @tg.guarded(key="a")
    async def work(forever: bool) -> str:
        begun.append(forever)
        try:
            await asyncio.sleep(3600 if forever else 0)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            ended.append("cancelled")
            raise
        return "done"

    async def main() -> None:
        task = asyncio.create_task(work(True))
        await until(lambda: bool(begun))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == ["cancelled"]
        assert await work(False) == "done"

    run(main())


def test_a_caller_that_is_cancelled_while_it_waits_runs_nothing(tg: TaskGuard) -> None:
    """It ends at once, and a newcomer gets the key as soon as it is free."""
    runs: list[str] = []

    @tg.guarded(key="a", busy="wait", wait_s=60)
    async def work() -> None:
        runs.append("work")

    async def main() -> None:
        async with tg.lock("a"):
            task = asyncio.create_task(work())
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.sleep(0.05)
        async with tg.lock("a"):
            pass

    run(main())
    assert runs == []


@pytest.mark.parametrize("scheduled", [False, True], ids=["before", "scheduled"])
def test_a_caller_that_is_cancelled_before_the_body_begins_gives_the_work_back(
    tg: TaskGuard,
    sqlite_url: str,
    heard: list[Event],
    monkeypatch: pytest.MonkeyPatch,
    scheduled: bool,
) -> None:
    """The work is NEW and has no failure, also if the event loop was about to begin the body. The
    next call runs it."""
    runs: list[str] = []

    @tg.guarded(key="a")
    async def work() -> str:
        runs.append("work")
        return "done"

    async def main() -> None:
        loop, granted = asyncio.get_running_loop(), threading.Event()
        going_on, begins = threading.Event(), threading.Event()

        def hold_up(event: Event) -> None:
            if event.name == "acquired":
                granted.set()
                assert going_on.wait(patience_s())

        def call_soon(function: Any, *args: Any, **options: Any) -> Any:
            handle = plain(function, *args, **options)
            if going_on.is_set():
                begins.set()
            return handle

        plain = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", call_soon)
        tg.runner.events.listen(hold_up)
        task = asyncio.create_task(work())
        await until(granted.is_set)
        if scheduled:
            going_on.set()
            assert begins.wait(patience_s())  # the loop stands still until the body is scheduled
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        going_on.set()
        await until(lambda: "released" in [event.name for event in heard])
        assert runs == []
        if tg.ledger is not None:
            assert states(sqlite_url) == ["NEW"]
        assert await work() == "done"

    run(main())
    assert runs == ["work"]
    assert "failed" not in [event.name for event in heard]


def test_a_call_for_a_key_that_its_caller_holds_is_refused(tg: TaskGuard) -> None:
    """It would wait for itself: within a lock, and within another body."""

    @tg.guarded(key="a", busy="wait", wait_s=60)
    async def inner() -> None:
        raise AssertionError

    @tg.guarded(key="a")
    async def outer() -> None:
        await inner()

    @tg.guarded(key="b")
    async def around() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(inner())

    async def main() -> None:
        with pytest.raises(KeyAlreadyHeldError):
            await outer()
        async with tg.lock("a"):
            with pytest.raises(KeyAlreadyHeldError):
                await inner()
            with pytest.raises(ExceptionGroup) as caught:
                await around()
            assert isinstance(caught.value.exceptions[0], KeyAlreadyHeldError)

    run(main())


def test_a_lost_lease_interrupts_the_body(tg: TaskGuard) -> None:
    """With `on_lost="interrupt"` the body is cancelled, and the caller gets LeaseLostError."""

    @tg.guarded(key="a", ttl_s=0.3, on_lost="interrupt", max_hold_s=0.3)
    async def work() -> None:
        await asyncio.sleep(3600)

    with pytest.raises(LeaseLostError):
        run(work())


def test_a_plain_function_runs_in_a_thread(tg: TaskGuard) -> None:
    """`arun()` returns its result, and the event loop goes on. Its body has the context of its
    caller."""
    begun, may_end = threading.Event(), threading.Event()

    @tg.guarded(key="order:<order>")
    def ship(order: int, guard: Guard) -> int:
        assert taskguard.current_guard() is guard
        begun.set()
        assert may_end.wait(patience_s())
        return order

    @tg.guarded(key="a")
    async def awaited() -> None:
        raise AssertionError

    async def main() -> None:
        call: Any = ship
        task = asyncio.create_task(tg.arun(call, order=7))
        await until(begun.is_set)
        may_end.set()
        assert await task == 7
        async with tg.lock("order:8"):
            with pytest.raises(KeyAlreadyHeldError):
                await tg.arun(call, 8)
        with pytest.raises(TypeError, match="await it without arun"):
            await tg.arun(awaited)

    run(main())
