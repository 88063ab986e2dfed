"""`async def` jobs: RQ awaits them, and so does `@guarded_job`."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import rq

import taskguard
import taskguard_rq
from support import invoices
from support.invoices import (
    Clerk,
    charge_async,
    charge_async_atomically,
    charge_hidden,
    decorated,
    wait_async,
    wait_decorated,
)
from taskguard import Guard
from taskguard.errors import ConfigurationError
from taskguard_rq import guarded_job
from taskguard_rq.marks import marks_of

_RQ = int(rq.VERSION.partition(".")[0])

KINDS = [
    ("taskguard_rq.GuardedWorker", ()),
    ("taskguard_rq.GuardedSimpleWorker", ()),
    ("rq.Worker", ("--with-scheduler",)),
    ("rq.worker.SpawnWorker", ("--with-scheduler",)),
]


def finished(job: Any) -> bool:
    return bool(job.get_status(refresh=True) == "finished")


def failed(job: Any) -> bool:
    return bool(job.get_status(refresh=True) == "failed")


@pytest.fixture
def here(office: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The office, and jobs that are called in this process are guarded by its servers."""
    for name, value in office.environment.items():
        monkeypatch.setenv(name, value)
    yield office
    invoices.close()


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_coroutine_is_awaited_and_done_once(
    office: Any, kind: str, options: tuple[str, ...]
) -> None:
    """A coroutine may run for longer than its lease. Its duplicate waits for it, and gets its
    result."""
    first, second = (office.queue.enqueue(charge_async, 1, waits=True) for _ in range(2))
    for _ in range(2):
        office.worker(kind, *options, SHOP_TTL_S="6")
    office.wait_for(lambda: office.steps("began"), "the body")
    until_s = time.monotonic() + 6
    office.wait_for(lambda: time.monotonic() > until_s, "the end of its first lease")
    office.let_go()
    office.wait_for(lambda: finished(first) and finished(second), "both finished")
    assert office.effects() == Counter({"1": 1})
    assert len(office.steps("began")) == 1
    assert first.return_value() == second.return_value() == {"invoice": 1}


def test_a_coroutine_may_be_atomic_and_return_retry(office: Any) -> None:
    """The transaction is open around the coroutine's loop. If the body returns `Retry`, its writes
    are rolled back."""
    job = office.queue.enqueue(charge_async_atomically, 3, 3)
    office.worker()
    office.wait_for(lambda: finished(job) or failed(job), "ended")
    assert job.return_value() == {"attempt": 3}
    assert office.effects() == Counter({"3": 1})


@pytest.mark.parametrize("kind", ["taskguard_rq.GuardedWorker", "taskguard_rq.GuardedSimpleWorker"])
def test_a_coroutine_that_takes_too_long_is_failed_by_its_timeout(office: Any, kind: str) -> None:
    """A time-out cancels the coroutine, so that it can clean up. The record has RQ's own error."""
    job = office.queue.enqueue(wait_async, 4, job_timeout=10)
    office.worker(kind)
    office.wait_for(lambda: failed(job), "failed")
    assert len(office.steps("cancelled")) == 1
    view = office.ledger.view("support.invoices.wait_async invoice:4")
    assert (view.state.value, view.crashes) == ("FAILED", 0)
    assert view.error.startswith("JobTimeoutException")


def test_a_coroutine_whose_lease_is_lost_is_cancelled_and_runs_again(office: Any) -> None:
    """With `on_lost="interrupt"`, a waiting coroutine is cancelled if the ledger says that another
    holder has its key."""
    job = office.queue.enqueue(wait_async, 5)
    office.worker()
    office.wait_for(lambda: office.steps("began"), "began")
    with office.engine.begin() as db:
        for table in ("taskguard_work", "taskguard_keys"):
            db.exec_driver_sql(f"update {table} set owner = 'another'")
    office.wait_for(lambda: office.steps("cancelled"), "cancelled")
    office.wait_for(lambda: finished(job), "finished")
    assert office.effects() == Counter({"5": 1})


def test_a_coroutine_that_a_decorator_hid_is_awaited(office: Any) -> None:
    """RQ awaits a returned coroutine, even if the decorated function is not async."""
    jobs = [office.queue.enqueue(charge_hidden, 6) for _ in range(2)]
    office.worker()
    office.wait_for(lambda: all(map(finished, jobs)), "finished")
    assert office.effects() == Counter({"6": 1})
    assert len(office.steps("began")) == 1


def test_decorated_functions_and_methods_are_their_jobs_own_deliveries(office: Any) -> None:
    """A job of a decorated function or of a method is deferred while its key is held. A plain call
    would fail. An async decorator awaits the job, and a time-out cancels it."""
    functions = {7: decorated, 8: wait_decorated, 9: Clerk().charge}
    seconds = {7: (0.0,), 8: (0.0,), 9: ()}
    office.worker()
    with contextlib.ExitStack() as stack:
        for number in functions:
            stack.enter_context(office.holding(f"invoice:{number}"))
        jobs = [
            office.queue.enqueue(function, number, *seconds[number])
            for number, function in functions.items()
        ]
        office.wait_for(
            lambda: all(failed(job) or marks_of(job).deferrals >= 1 for job in jobs), "put off"
        )
    office.wait_for(lambda: all(finished(job) or failed(job) for job in jobs), "ended")
    assert all(map(finished, jobs))
    assert jobs[0].return_value() == {"invoice": 7}
    assert office.effects() == Counter("789")
    late = office.queue.enqueue(wait_decorated, 10, 600.0, job_timeout=10)
    office.wait_for(lambda: failed(late), "failed")
    # RQ before 3 leaves the loop that it made for such a job, and cancels nothing in it.
    cancelled = ["10"] if _RQ >= 3 else []
    assert [item for item, _ in office.steps("cancelled")] == cancelled


def test_called_by_anybody_else_it_is_awaited(here: Any) -> None:
    """A script or another loop can await several guarded coroutines at once. Each work is done
    once."""
    where: Any = inspect if sys.version_info >= (3, 12) else asyncio
    assert where.iscoroutinefunction(charge_async)

    async def main() -> list[dict[str, int]]:
        return await asyncio.gather(*(charge_async(n, 0.1) for n in (10, 11, 12)))

    assert asyncio.run(main()) == [{"invoice": n} for n in (10, 11, 12)]
    assert asyncio.run(charge_async(10)) == {"invoice": 10}
    assert here.effects() == Counter({"10": 1, "11": 1, "12": 1})
    assert len(here.steps("began")) == 3


def test_a_caller_that_is_cancelled_cancels_the_body_and_waits_for_it(here: Any) -> None:
    """If the caller is cancelled, the body is cancelled, and the work is FAILED. A later call does
    it."""

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait_async(13), 2)

    asyncio.run(main())
    assert len(here.steps("cancelled")) == 1
    view = here.ledger.view("support.invoices.wait_async invoice:13")
    assert view.state.value == "FAILED"
    asyncio.run(wait_async(13))
    assert here.effects() == Counter({"13": 1})


def test_claim_and_completion_do_not_hold_up_a_loop(here: Any) -> None:
    """Claim and completion run in the body's thread, and in no event loop."""
    seen: list[tuple[str, bool, int]] = []

    def note(event: Any) -> None:
        if event.name in ("claimed", "completed"):
            loop = asyncio._get_running_loop() is not None
            seen.append((event.name, loop, threading.get_ident()))

    taskguard_rq.configure(listeners=[note])

    @guarded_job(key="n:<n>")
    async def plain(n: int) -> int:
        seen.append(("body", asyncio.get_running_loop() is not None, threading.get_ident()))
        return n

    async def main() -> None:
        await plain(1)

    asyncio.run(main())
    assert [(name, loop) for name, loop, _ in seen] == [
        ("claimed", False),
        ("body", True),
        ("completed", False),
    ]
    threads = {thread for _, _, thread in seen}
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_a_hidden_coroutine_within_a_loop_is_refused(here: Any) -> None:
    """A hidden coroutine cannot run inside a running loop. The call raises, and the work is not
    DONE."""

    async def main() -> None:
        with pytest.raises(ConfigurationError, match="async def"):
            charge_hidden(14)

    asyncio.run(main())
    assert here.effects() == Counter()


def test_a_step_takes_no_coroutine_function(here: Any) -> None:
    """`guard.step()` refuses a coroutine function before it calls it. In a thread it calls a plain
    function."""

    async def pay() -> int:
        return 1

    calls: list[str] = []

    @guarded_job(key="n:<n>")
    async def steps(n: int, guard: Guard) -> Any:
        with pytest.raises(TypeError, match="to_thread"):
            guard.step("pay", pay)
        assert await asyncio.to_thread(taskguard.current_guard) is guard
        return await asyncio.to_thread(guard.step, "plain", calls.append, "called")

    asyncio.run(steps(1))
    assert calls == ["called"]


def test_async_generators_are_refused() -> None:
    """An async generator is refused at decoration, because RQ does not iterate it."""

    async def wrong(n: int) -> Any:
        yield n

    with pytest.raises(ConfigurationError, match="generator"):
        guarded_job(key="n:<n>")(wrong)
