"""RQ jobs for tests with real workers, configured by environment variables alone."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from rq import Queue, Retry, get_current_job
from rq.job import Job

import taskguard
from support import deploys
from taskguard import Guard
from taskguard.errors import LeaseLostError, TransactionRetryError
from taskguard_rq import enqueue, guarded_job
from taskguard_rq.marks import marks_of

TTL_S = float(os.environ.get("SHOP_TTL_S", "10"))

_engines: dict[int, sa.Engine] = {}


def engine() -> sa.Engine:
    """Return the engine, one for each process, also for bodies in several threads."""
    if os.getpid() not in _engines:
        made = sa.create_engine(os.environ["TASKGUARD_LEDGER_URL"])
        return _engines.setdefault(os.getpid(), made)
    return _engines[os.getpid()]


def close() -> None:
    """Close it: the next body in this process uses the database of the environment at that time."""
    for made in _engines.values():
        made.dispose()
    _engines.clear()


def step(item: object, name: str) -> None:
    """Record that the body has reached this point, at once and visible to all."""
    with engine().begin() as db:
        db.execute(
            sa.text("insert into steps values (:item, :name, :pid)"),
            {"item": str(item), "name": name, "pid": os.getpid()},
        )


def effect(db: Any, item: object, guard: Guard) -> None:
    """Write the effect, which must happen once."""
    db.execute(
        sa.text("insert into effects values (:item, :fence)"),
        {"item": str(item), "fence": guard.fence},
    )


@guarded_job(key="invoice:<invoice>", ttl_s=TTL_S)
def charge(invoice: int, seconds: float = 0.0, *, guard: Guard) -> dict[str, int]:
    """Take `seconds`, then charge; later attempts take no time."""
    step(invoice, "began")
    if guard.attempt == 1:
        time.sleep(seconds)
    with guard.transaction() as db:
        effect(db, invoice, guard)
        guard.result = {"invoice": invoice}
    return {"invoice": invoice}


@guarded_job(key="invoice:<invoice>", ttl_s=TTL_S, recoverable=True)
def recover(invoice: int, seconds: float = 0.0, *, guard: Guard) -> None:
    """Do as `charge` does, with a stored message."""
    step(invoice, "began")
    if guard.attempt == 1:
        time.sleep(seconds)
    with guard.transaction() as db:
        effect(db, invoice, guard)


@guarded_job(**deploys.guard_of("invoice:<invoice>"), ttl_s=TTL_S)
def deployed(invoice: int, lingers: str = "", *, guard: Guard) -> str:
    """Guarded as its deploy says."""
    return deploys.work(step, effect, invoice, lingers, guard)


@guarded_job(key="invoice:<invoice>", ttl_s=TTL_S)
def outlast(invoice: int, guard: Guard) -> None:
    """Goes on after the database ended its block, for longer than its job may take."""
    step(invoice, "began")
    with contextlib.suppress(TransactionRetryError), guard.transaction():
        raise TransactionRetryError("a deadlock", key=guard.key)
    time.sleep(30)


@guarded_job(key="invoice:<invoice>", ttl_s=TTL_S, busy="wait", wait_s=600)
def charge_patiently(invoice: int, guard: Guard) -> None:
    """Waits for its key for longer than its job may take."""
    with guard.transaction() as db:
        effect(db, invoice, guard)


@guarded_job(key="invoice:<invoice>", ttl_s=TTL_S)
def ask_again(invoice: int, attempts: int, *, most: int = 5, guard: Guard) -> object:
    """Returns `Retry` until its attempt number `attempts`, which charges."""
    step(invoice, "began")
    if guard.attempt < attempts:
        return Retry(max=most)
    with guard.transaction() as db:
        effect(db, invoice, guard)
    return {"attempt": guard.attempt}


@guarded_job(key="invoice:<invoice>", ttl_s=TTL_S, atomic=True)
def ask_again_atomically(invoice: int, attempts: int, *, guard: Guard) -> object:
    """Do as `ask_again` does, but write in the body's transaction before returning `Retry`."""
    step(invoice, "began")
    effect(guard.db, invoice, guard)
    return Retry(max=5) if guard.attempt < attempts else {"attempt": guard.attempt}


@guarded_job(key="invoice:<invoice>", ttl_s=TTL_S)
def charge_and_ask_again(invoice: int, *, guard: Guard) -> object:
    """Returns `Retry` although its work is done."""
    step(invoice, "began")
    with guard.transaction() as db:
        effect(db, invoice, guard)
    return Retry(max=5)


@guarded_job(key="invoice:<invoice>", ttl_s=TTL_S, max_crashes=3)
def leave(invoice: int, how: str, *, guard: Guard) -> None:
    """Ends without an Exception, as argparse does, or a cancelled event loop."""
    step(invoice, "began")
    if how == "exit":
        sys.exit("usage: leave")
    raise asyncio.CancelledError("by itself")


def ask_for(invoice: int, attempts: int) -> object:
    """A job that is not guarded, and calls one that is."""
    return ask_again(invoice, attempts)  # type: ignore[call-arg]  # the guard is ours


@guarded_job(key="invoice:<invoice>", ttl_s=TTL_S, max_crashes=2)
def die(invoice: int, guard: Guard) -> None:
    """Kills the process that runs it, each time."""
    step(invoice, "began")
    os.kill(os.getpid(), 9)


@guarded_job(key="invoice:<invoice>", ttl_s=TTL_S)
def hold(invoice: int, seconds: float, *, guard: Guard) -> None:
    """Takes `seconds` inside the transaction, after its write; the second attempt does not."""
    with guard.transaction() as db:
        effect(db, invoice, guard)
        step(invoice, "wrote")
        if guard.attempt == 1:
            time.sleep(seconds)


@guarded_job(key="account:<account>", once_per="message", ttl_s=TTL_S)
def book(account: int, guard: Guard) -> None:
    """Once for each message."""
    with guard.transaction() as db:
        effect(db, account, guard)


@guarded_job(key="account:<account>", once_per="message", ttl_s=TTL_S)
def book_again(account: int, times: int, *, guard: Guard) -> str:
    """Enqueues its next message, which runs where it is sent. Returns that job's id."""
    queue = Queue("invoices", connection=get_current_job().connection, is_async=False)
    with guard.transaction() as db:
        effect(db, f"{account} {times}", guard)
    return str(enqueue(queue, book_again, (account, times - 1)).job.id) if times else ""


@guarded_job(key="account:<account>", once_per="message", busy="skip", ttl_s=TTL_S)
def book_unless_busy(account: int, guard: Guard) -> int:
    """Does nothing if its key is taken."""
    with guard.transaction() as db:
        effect(db, account, guard)
    return account


@guarded_job(key="queue:<name>", once_per="message", busy="park", ttl_s=TTL_S)
def queue_up(name: str, number: int, waits: bool = False, *, guard: Guard) -> int:
    """Wait in line for the key. The first attempt may wait for a step "go"."""
    item = f"{name} {number}"
    step(item, "began")
    while waits and guard.attempt == 1 and not _may_go():
        time.sleep(0.05)
    with guard.transaction() as db:
        effect(db, item, guard)
    return number


@guarded_job(key="queue:<name>", once_per="message", busy="park", order="priority", ttl_s=TTL_S)
def by_priority(name: str, number: int, *, guard: Guard) -> int:
    """Wait in a line that is ordered by the queue's priority."""
    with guard.transaction() as db:
        step(f"{name} {number}", "began")
        effect(db, f"{name} {number}", guard)
    return number


@guarded_job(key="queue:<name>", once_per="message", busy="park", order="strict", ttl_s=TTL_S)
def strictly(name: str, number: int, how: str = "", *, guard: Guard) -> object:
    """Work in a line in which no message goes before a retry. `how` says how it ends at first."""
    item = f"{name} {number}"
    step(item, "began")
    while guard.attempt == 1 and number == 0 and not _may_go():
        time.sleep(0.05)
    if how == "fails" or (how == "fails once" and guard.attempt == 1):
        raise ValueError(item)
    if how == "always Retry" or (how == "returns Retry" and guard.attempt == 1):
        return Retry(max=2, interval=1)
    if how == "moves":
        job = get_current_job()
        assert job is not None
        job.args = ("b", number)
        raise ValueError(item)
    if how == "always dies" or (how == "dies" and guard.attempt == 1):
        os.kill(os.getpid(), 9)
    with guard.transaction() as db:
        effect(db, item, guard)
    return number


@guarded_job(key="queue:<name>", once_per="message", busy="latest", ttl_s=TTL_S)
def latest(name: str, number: int, seconds: float = 0.0, *, guard: Guard) -> int:
    """Run the newest waiting message next."""
    return _newest(name, number, seconds, guard)


@guarded_job(key="queue:<name>", once_per="message", busy="supersede", ttl_s=TTL_S)
def supersede(name: str, number: int, seconds: float = 0.0, *, guard: Guard) -> int:
    """Take the key from an older message that runs."""
    return _newest(name, number, seconds, guard)


@guarded_job(
    key="queue:<name>", once_per="message", busy="supersede", ttl_s=TTL_S, on_lost="interrupt"
)
def supersede_at_once(name: str, number: int, seconds: float = 0.0, *, guard: Guard) -> int:
    """Do as `supersede` does. The body is interrupted, and does not check its lease."""
    step(f"{name} {number}", "began")
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        time.sleep(0.02)
    with guard.transaction() as db:
        effect(db, f"{name} {number}", guard)
    return number


def _newest(name: str, number: int, seconds: float, guard: Guard) -> int:
    """Take `seconds`, or wait for a step "go" or the loss of the lease. A later attempt takes no
    time."""
    item = f"{name} {number}"
    step(item, "began")
    until_s = time.monotonic() + (seconds if guard.attempt == 1 else 0.0)
    while time.monotonic() < until_s and not _may_go():
        if guard.lost.wait(0.05):
            step(item, "lost")
            break
    with guard.transaction() as db:
        effect(db, item, guard)
    return number


@guarded_job(key="newest:<invoice>", busy="park", ttl_s=TTL_S)
def index_in_line(invoice: int, words: str, waits: bool = False, *, guard: Guard) -> str:
    """Do as `index` does, in line behind the holder of its key."""
    return index.__wrapped__(invoice, words, waits, guard=guard)  # type: ignore[no-any-return]


@guarded_job(key="account:<account>", once_per="run", ttl_s=TTL_S)
def sync(account: str, words: str, waits: bool = False, *, guard: Guard) -> str:
    """Runs again once it has ended. Words that begin with "fails" fail."""
    step(account, f"began {words}")
    while waits and not _may_go():
        time.sleep(0.05)
    if words.startswith("fails") and guard.attempt == 1:
        raise ValueError(words)
    with guard.transaction() as db:
        effect(db, f"{account} {words}", guard)
        guard.result = words
    return words


@guarded_job(key="day:<day>", once_per="message", message_id=lambda job: job.meta["day"])
def report(day: str, guard: Guard) -> None:
    """Its messages are work of their own if their sender gives them different days."""
    with guard.transaction() as db:
        effect(db, day, guard)


@guarded_job(key="invoice:<invoice>", ttl_s=TTL_S)
def strange(invoice: int | None, guard: Guard) -> object:
    """Returns what is not JSON."""
    with guard.transaction() as db:
        effect(db, invoice, guard)
    return object


def _around(function: Callable[..., Any]) -> Callable[..., Any]:
    """Somebody else's decorator, a timer for example."""

    @functools.wraps(function)
    def around(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return around


@_around
@guarded_job(key="invoice:<invoice>", ttl_s=TTL_S)
def decorated(invoice: int, seconds: float, *, guard: Guard) -> dict[str, int]:
    """Do as `charge` does, with a decorator around the guard."""
    step(invoice, "began")
    time.sleep(seconds)
    with guard.transaction() as db:
        effect(db, invoice, guard)
        guard.result = {"invoice": invoice}
    return {"invoice": invoice}


@guarded_job(key="invoice:<invoice>", ttl_s=TTL_S, on_lost="interrupt", max_crashes=100)
def patient(invoice: int, guard: Guard) -> None:
    """The first attempt loops until it is interrupted."""
    step(invoice, "began")
    try:
        while guard.attempt == 1:
            time.sleep(0.02)
    except LeaseLostError:
        step(invoice, "interrupted")
        raise
    with guard.transaction() as db:
        effect(db, invoice, guard)


@guarded_job(key="invoice:<invoice>", ttl_s=TTL_S)
async def charge_async(
    invoice: int, seconds: float = 0.0, waits: bool = False, *, guard: Guard
) -> dict[str, int]:
    """Do as `charge` does, in an event loop. Another asyncio task writes. Maybe wait for "go"."""
    step(invoice, "began")
    if guard.attempt == 1:
        await asyncio.sleep(seconds)
    while waits and guard.attempt == 1 and not _may_go():  # noqa: ASYNC110  # a row says so
        await asyncio.sleep(0.05)

    async def write() -> None:
        assert taskguard.current_guard() is guard
        with guard.transaction() as db:
            effect(db, invoice, guard)

    await asyncio.create_task(write())
    return {"invoice": invoice}


@guarded_job(key="invoice:<invoice>", ttl_s=TTL_S, atomic=True)
async def charge_async_atomically(invoice: int, attempts: int, *, guard: Guard) -> object:
    """Do as `ask_again_atomically` does, with the write in another thread."""
    step(invoice, "began")
    await asyncio.to_thread(effect, guard.db, invoice, guard)
    return Retry(max=5) if guard.attempt < attempts else {"attempt": guard.attempt}


@guarded_job(key="invoice:<invoice>", ttl_s=TTL_S, on_lost="interrupt", max_crashes=100)
async def wait_async(invoice: int, *, guard: Guard) -> None:
    """The first attempt waits until it is cancelled."""
    step(invoice, "began")
    try:
        if guard.attempt == 1:
            await asyncio.sleep(600)
    except asyncio.CancelledError:
        step(invoice, "cancelled")
        raise
    with guard.transaction() as db:
        effect(db, invoice, guard)


@_around
@guarded_job(key="invoice:<invoice>", ttl_s=TTL_S)
@_around
async def charge_hidden(invoice: int, *, guard: Guard) -> None:
    """A coroutine function that no longer looks like one."""
    step(invoice, "began")
    with guard.transaction() as db:
        effect(db, invoice, guard)


def _awaiting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def awaiting(*args: Any, **kwargs: Any) -> Any:
        return await function(*args, **kwargs)

    return awaiting


@_awaiting
@guarded_job(key="invoice:<invoice>", ttl_s=TTL_S)
async def wait_decorated(invoice: int, seconds: float, *, guard: Guard) -> None:
    """An async decorator around the guard."""
    step(invoice, "began")
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        step(invoice, "cancelled")
        raise
    with guard.transaction() as db:
        effect(db, invoice, guard)


class Clerk:
    """Jobs may be methods."""

    @guarded_job(key="invoice:<invoice>", ttl_s=TTL_S)
    def charge(self, invoice: int, *, guard: Guard) -> None:
        """Takes no time."""
        step(invoice, "began")
        with guard.transaction() as db:
            effect(db, invoice, guard)


@guarded_job(key="tick", once_per="tick", ttl_s=TTL_S)
def tick(guard: Guard) -> None:
    """Once for each tick of `rq cron`."""
    job = get_current_job()
    assert job is not None
    with guard.transaction() as db:
        effect(db, marks_of(job).tick or "by hand", guard)


@guarded_job(key="tick", once_per="tick", ttl_s=TTL_S)
def tick_again(guard: Guard) -> Retry | None:
    """Clear the job's meta and return `Retry` in the first attempt, and write in the second."""
    job = get_current_job()
    assert job is not None
    if guard.attempt == 1:
        job.meta = {}
        job.save_meta()  # type: ignore[no-untyped-call]
        return Retry(max=1)
    with guard.transaction() as db:
        effect(db, "ticked", guard)
    return None


def extend_rq() -> None:
    """Add the current request to each enqueued job, as extensions of RQ do."""
    enqueue = Queue._enqueue_job

    def enqueue_for_request(self: Queue, job: Job, *args: Any, **options: Any) -> Job:
        if at_work_for:
            job.meta = {**job.meta, "request": at_work_for[-1]}
        return enqueue(self, job, *args, **options)

    Queue._enqueue_job = enqueue_for_request  # type: ignore[method-assign]


at_work_for: list[str] = []
if "INVOICES_EXTENSION" in os.environ:
    extend_rq()


@guarded_job(key="queue:<name>", once_per="message", busy="park", ttl_s=TTL_S)
def for_request(name: str, number: int, *, guard: Guard) -> None:
    """Notes the request on whose behalf it runs, and clears the job's meta."""
    job = get_current_job()
    assert job is not None
    at_work_for.append(job.meta["request"])
    job.meta = {}
    job.save_meta()  # type: ignore[no-untyped-call]
    step(number, "began")
    while number == 0 and not _may_go():
        time.sleep(0.05)
    with guard.transaction() as db:
        effect(db, f"{name} {number} {at_work_for[-1]}", guard)


def each() -> None:
    """Once for each job, with nothing to guard it."""
    job = get_current_job()
    assert job is not None
    step(marks_of(job).tick, "came")


@guarded_job(key="invoice:<invoice>", ttl_s=TTL_S)
def index(invoice: int, words: str, waits: bool = False, *, guard: Guard) -> str:
    """Its effect says with which arguments it ran. The first attempt may wait for a step "go"."""
    step(invoice, "began")
    while waits and guard.attempt == 1 and not _may_go():
        time.sleep(0.05)
    with guard.transaction() as db:
        effect(db, f"{invoice} {words}", guard)
        guard.result = words
    return words


def _refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(name: str, number: int, how: str = "") -> Any:
        if how == "refused":
            step(f"{name} {number}", "refused")
            raise PermissionError(number)
        return function(name, number)

    return wrapper


@_refusing
@guarded_job(key="queue:<name>", once_per="message", busy="park", order="strict", ttl_s=TTL_S)
def strictly_under_a_decorator(name: str, number: int, how: str = "", *, guard: Guard) -> None:
    """A decorator over its guard may refuse it."""
    with guard.transaction() as db:
        effect(db, f"{name} {number}", guard)


def _may_go() -> bool:
    with engine().connect() as db:
        return db.execute(sa.text("select 1 from steps where name = 'go'")).first() is not None


@guarded_job(key="invoice:<invoice>", once_per="message", ttl_s=TTL_S)
def index_each(invoice: int) -> None:
    """Each of its messages is work of its own."""
    step(invoice, "began")
