"""A Celery app for tests with real workers, configured by environment variables alone.

Every body writes its effect into `effects`, which has no unique index. It writes its steps into
`steps`, outside any transaction, so that a test sees where each body is, and when.

Tests import it anew for each shop. So no task is `shared`: Celery would register the tasks of every
earlier import in every later app, under the same names.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import sys
import time
from typing import Any

import sqlalchemy as sa
from celery import Celery, Task
from celery.exceptions import Reject
from celery.signals import task_prerun
from kombu import Exchange, Queue
from kombu.exceptions import OperationalError

from support import deploys, shop_shared
from support.request_ids import request_id
from taskguard import Guard
from taskguard.errors import LeaseLostError
from taskguard.ledger.sql import SqlLedger
from taskguard_celery import enqueue, guarded_task, safe_defaults
from taskguard_celery.message import message_of

URL = os.environ["SHOP_DATABASE"]
LEDGER_URL = os.environ.get("SHOP_LEDGER", URL)
TTL_S = float(os.environ.get("SHOP_TTL_S", "2"))
UNTIL_GO = -1.0  # instead of a number of seconds


class App(Celery):
    """Publishes nothing while the file that SHOP_OUTAGE names exists; what it has, it consumes."""

    def send_task(self, *args: Any, **options: Any) -> Any:
        if os.path.exists(os.environ.get("SHOP_OUTAGE", "")):  # noqa: PTH110  # "" is no path
            raise OperationalError("the broker takes no message")
        return super().send_task(*args, **options)


app = App("shop", broker=os.environ["SHOP_BROKER"], backend=os.environ["SHOP_BACKEND"])
app.conf.update(
    taskguard_locks_url=os.environ["SHOP_LOCKS"],
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
    task_default_queue=os.environ.get("SHOP_QUEUE", "shop"),
)
if LEDGER_URL:
    app.conf.taskguard_ledger_url = LEDGER_URL
if "SHOP_IDLE_S" in os.environ:
    idle_s = float(os.environ["SHOP_IDLE_S"])
    app.conf.taskguard_ledger = SqlLedger(LEDGER_URL, idle_in_transaction_s=idle_s)
if not os.environ["SHOP_BROKER"].startswith("amqp"):
    app.conf.broker_transport_options = {
        "visibility_timeout": float(os.environ.get("SHOP_VISIBILITY_S", "60")),
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }
else:
    app.conf.broker_transport_options = {"confirm_publish": True}
app.conf.update(json.loads(os.environ.get("SHOP_SETTINGS", "{}")))
if "SHOP_DELIVERY_LIMIT" in os.environ:
    # As an application declares it that leaves task_default_queue_type alone.
    name = app.conf.task_default_queue
    limit = int(os.environ["SHOP_DELIVERY_LIMIT"])
    arguments = {"x-queue-type": "quorum", "x-delivery-limit": limit}
    exchange = Exchange(name, type="topic")
    app.conf.task_queues = [Queue(name, exchange, routing_key=name, queue_arguments=arguments)]
if "SHOP_SAFE" in os.environ:
    safe_defaults(app)

if "SHOP_PRERUN_S" in os.environ:
    prerun_s = float(os.environ["SHOP_PRERUN_S"])
    task_prerun.connect(lambda **_: time.sleep(prerun_s), weak=False)

task = functools.partial(app.task, shared=False)
_engines: dict[int, sa.Engine] = {}


def engine() -> sa.Engine:
    """Return the engine, one for each process, also for bodies in several threads."""
    if os.getpid() not in _engines:
        # Pinged first: where a test restarts the database, a body's step must not fail.
        return _engines.setdefault(os.getpid(), sa.create_engine(URL, pool_pre_ping=True))
    return _engines[os.getpid()]


def take(seconds: float, go: str = "go") -> None:
    """Take `seconds`; UNTIL_GO: wait for a step `go`."""
    while seconds == UNTIL_GO and not _may_go(go):
        time.sleep(0.05)
    time.sleep(max(seconds, 0.0))


def step(item: object, name: str) -> None:
    """Record that the body has reached this point, at once and visible to all."""
    with engine().begin() as db:
        db.execute(
            sa.text("insert into steps (item, name, pid) values (:item, :name, :pid)"),
            {"item": str(item), "name": name, "pid": os.getpid()},
        )


def effect(db: Any, item: object, guard: Guard) -> None:
    """Write the effect, which must happen once."""
    db.execute(
        sa.text("insert into effects values (:item, :fence)"),
        {"item": str(item), "fence": guard.fence},
    )


@task(name="shop.ship")
@guarded_task(key="order:<order>", ttl_s=TTL_S)
def ship(order: int, seconds: float = 0.0, *, guard: Guard) -> dict[str, int]:
    """Take `seconds`, then ship; later attempts take no time."""
    step(order, "began")
    if guard.attempt == 1:
        take(seconds)
    with guard.transaction() as db:
        effect(db, order, guard)
        guard.result = {"order": order}
    return {"order": order}


@task(name="shop.recover")
@guarded_task(key="order:<order>", ttl_s=TTL_S, recoverable=True)
def recover(order: int, seconds: float = 0.0, *, guard: Guard) -> int:
    """Do as `ship` does, with a stored call."""
    step(order, "began")
    if guard.attempt == 1:
        time.sleep(seconds)
    with guard.transaction() as db:
        effect(db, order, guard)
        guard.result = order
    return order


@task(name="shop.queue_up")
@guarded_task(key="queue:<name>", once_per="message", busy="park", ttl_s=TTL_S)
def queue_up(name: str, number: int, seconds: float = 0.0, *, guard: Guard) -> int:
    """Wait in line for the key, and take `seconds`; later attempts take no time."""
    return _take_turn(name, number, seconds, guard)


@task(name="shop.reject")
@guarded_task(key="queue:<name>", once_per="message", busy="park", ttl_s=TTL_S)
def reject(name: str, number: int, seconds: float = 0.0, *, guard: Guard) -> int:
    """Do as `queue_up` does, and have the broker take the message out of its queue."""
    _take_turn(name, number, seconds, guard)
    raise Reject("not wanted", requeue=False)


@task(name="shop.by_two")
@guarded_task(key="queue:<name>", once_per="message", limit=2, ttl_s=TTL_S)
def by_two(name: str, number: int, seconds: float = 0.0, *, guard: Guard) -> int:
    """Run two at a time. A third delivery is deferred."""
    return _take_turn(name, number, seconds, guard)


@task(name="shop.queue_up_by_two")
@guarded_task(key="queue:<name>", once_per="message", busy="park", limit=2, ttl_s=TTL_S)
def queue_up_by_two(name: str, number: int, seconds: float = 0.0, *, guard: Guard) -> int:
    """Run two at a time, with the others in line."""
    return _take_turn(name, number, seconds, guard)


@task(name="shop.at_times")
@guarded_task(key="queue:<name>", once_per="message", rate="5/s", ttl_s=TTL_S)
def at_times(name: str, number: int, seconds: float = 0.0, *, guard: Guard) -> int:
    """Run five in a second. A delivery that comes too early is deferred."""
    return _take_turn(name, number, seconds, guard)


@task(name="shop.queue_up_at_times")
@guarded_task(key="queue:<name>", once_per="message", busy="park", limit=4, rate="5/s", ttl_s=TTL_S)
def queue_up_at_times(name: str, number: int, seconds: float = 0.0, *, guard: Guard) -> int:
    """Run five in a second, with the others in line."""
    return _take_turn(name, number, seconds, guard)


@task(name="shop.by_priority")
@guarded_task(
    key="queue:<name>",
    once_per="message",
    busy="park",
    order="priority",
    max_waiting=9,
    ttl_s=TTL_S,
)
def by_priority(name: str, number: int, seconds: float = 0.0, *, guard: Guard) -> int:
    """Wait in a line of at most nine messages, ordered by priority."""
    return _take_turn(name, number, seconds, guard)


@task(
    name="shop.strictly",
    bind=True,
    autoretry_for=(ValueError,),
    max_retries=2,
    default_retry_delay=1,
)
@guarded_task(key="queue:<name>", once_per="message", busy="park", order="strict", ttl_s=TTL_S)
def strictly(self: Task, name: str, number: int, how: str = "", *, guard: Guard) -> int:
    """Work in a line in which no message goes before a retry. `how` says how it ends at first."""
    item = f"{name} {number}"
    step(item, "began")
    while guard.attempt == 1 and number == 0 and not _may_go():
        time.sleep(0.05)
    step(item, "ended")
    if how == "fails" or (how == "fails twice" and guard.attempt < 3):
        raise ValueError(item)
    if how.startswith("retries") and guard.attempt == 1:
        raise self.retry(countdown=10 if how == "retries late" else 3)
    while how == "hangs":
        time.sleep(0.05)
    if how == "moves":
        raise self.retry(args=("b", number), countdown=5)
    if how == "dies" and guard.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with guard.transaction() as db:
        effect(db, item, guard)
    return number


def _take_turn(name: str, number: int, seconds: float, guard: Guard) -> int:
    step(f"{name} {number}", "began")
    if guard.attempt == 1 or seconds == UNTIL_GO:
        take(seconds)
    with guard.transaction() as db:
        effect(db, f"{name} {number}", guard)
        guard.result = number
        # Not after the COMMIT, which lets the next body begin.
        step(f"{name} {number}", "ended")
    return number


def _newest(name: str, number: int, seconds: float, guard: Guard) -> int:
    """Take `seconds`, or wait for a step "go" or the loss of the lease. A later attempt takes no
    time."""
    step(f"{name} {number}", "began")
    until_s = time.monotonic() + (seconds if guard.attempt == 1 else 0.0)
    while time.monotonic() < until_s and not _may_go():
        if guard.lost.wait(0.05):
            step(f"{name} {number}", "lost")
            break
    with guard.transaction() as db:
        effect(db, f"{name} {number}", guard)
        guard.result = number
    return number


@task(name="shop.latest")
@guarded_task(key="newest:<name>", once_per="message", busy="latest", ttl_s=TTL_S)
def latest(name: str, number: int, seconds: float = 0.0, *, guard: Guard) -> int:
    """Run the newest waiting message next."""
    return _newest(name, number, seconds, guard)


@task(name="shop.supersede", autoretry_for=(Exception,), max_retries=2, default_retry_delay=0.1)
@guarded_task(key="newest:<name>", once_per="message", busy="supersede", ttl_s=TTL_S)
def supersede(name: str, number: int, seconds: float = 0.0, *, guard: Guard) -> int:
    """Take the key from an older message that runs."""
    return _newest(name, number, seconds, guard)


@task(name="shop.supersede_at_once")
@guarded_task(
    key="newest:<name>", once_per="message", busy="supersede", ttl_s=TTL_S, on_lost="interrupt"
)
def supersede_at_once(name: str, number: int, seconds: float = 0.0, *, guard: Guard) -> int:
    """Do as `supersede` does. The body is interrupted."""
    step(f"{name} {number}", "began")
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        time.sleep(0.02)
    with guard.transaction() as db:
        effect(db, f"{name} {number}", guard)
        guard.result = number
    return number


@task(name="shop.add_up")
@guarded_task(key="sum", once_per="message", ttl_s=TTL_S)
def add_up(numbers: list[int]) -> int:
    """The body of a chord."""
    return sum(numbers)


def _may_go(go: str = "go") -> bool:
    select = sa.text("select 1 from steps where name = :name")
    with engine().connect() as db:
        return db.execute(select, {"name": go}).first() is not None


@task(name="shop.index")
@guarded_task(key="order:<order>", ttl_s=TTL_S)
def index(order: int, words: str, waits: bool = False, *, guard: Guard) -> str:
    """Its effect says with which arguments it ran. The first attempt may wait for a step "go"."""
    step(order, "began")
    while waits and guard.attempt == 1 and not _may_go():
        time.sleep(0.05)
    with guard.transaction() as db:
        effect(db, f"{order} {words}", guard)
        guard.result = words
    return words


def _sync(account: str, words: str, go: str, guard: Guard) -> str:
    """Work that runs again once it has ended. Words that begin with "fails" fail."""
    step(account, f"began {words}")
    while go and not _may_go(go):
        time.sleep(0.05)
    if words.startswith("fails"):
        raise ValueError(words)
    with guard.transaction() as db:
        effect(db, f"{account} {words}", guard)
        guard.result = words
    return words


@task(name="shop.sync")
@guarded_task(key="account:<account>", once_per="run", ttl_s=TTL_S)
def sync(account: str, words: str, go: str = "", *, guard: Guard) -> str:
    """Runs again once it has ended."""
    return _sync(account, words, go, guard)


@task(name="shop.sync_or_skip")
@guarded_task(key="account:<account>", once_per="run", busy="skip", ttl_s=TTL_S)
def sync_or_skip(account: str, words: str, go: str = "", *, guard: Guard) -> str:
    """Runs again once it has ended, and is dropped if other work holds its key."""
    return _sync(account, words, go, guard)


@task(name="shop.sync_or_raise")
@guarded_task(key="account:<account>", once_per="run", busy="raise", ttl_s=TTL_S)
def sync_or_raise(account: str, words: str, go: str = "", *, guard: Guard) -> str:
    """Runs again once it has ended, and fails if other work holds its key."""
    return _sync(account, words, go, guard)


@task(name="shop.sync_in_line")
@guarded_task(key="account:<account>", once_per="run", busy="park", ttl_s=TTL_S)
def sync_in_line(account: str, words: str, go: str = "", *, guard: Guard) -> str:
    """Runs again once it has ended, and waits in the line of its key."""
    return _sync(account, words, go, guard)


@task(name="shop.sync_retried", autoretry_for=(Exception,), max_retries=1, default_retry_delay=1)
@guarded_task(key="account:<account>", once_per="run", ttl_s=TTL_S)
def sync_retried(account: str, words: str, go: str = "", *, guard: Guard) -> str:
    """Runs again once it has ended. After any error it is retried once."""
    return _sync(account, words, go, guard)


@task(name="shop.number", autoretry_for=(ValueError,), max_retries=1, default_retry_delay=2)
@guarded_task(key="order:<order>", busy="park", ttl_s=TTL_S)
def number(order: int, value: int) -> int:
    """Returns its second argument; a negative one fails."""
    if value < 0:
        raise ValueError(value)
    return value


@task(name="shop.index_each")
@guarded_task(key="order:<order>", once_per="message", ttl_s=TTL_S)
def index_each(order: int) -> None:
    """Each of its messages is work of its own."""
    step(order, "began")


@task(name="shop.deployed")
@guarded_task(**deploys.guard_of("order:<order>"), ttl_s=TTL_S)
def deployed(order: int, lingers: str = "", *, guard: Guard) -> str:
    """Guarded as its deploy says."""
    return deploys.work(step, effect, order, lingers, guard)


@task(name="shop.deployed_in_line")
@guarded_task(
    **deploys.guard_of("queue:<name>"),
    once_per="message",
    busy="park",
    order="strict",
    ttl_s=TTL_S,
)
def deployed_in_line(name: str, number: int, *, guard: Guard) -> int:
    """Guarded as its deploy says, in a line; each attempt of number 0 waits until it may go on."""
    return _take_turn(name, number, UNTIL_GO if number == 0 else 0.0, guard)


@task(name="shop.ship_and_bill")
@guarded_task(key="order:<order>", ttl_s=TTL_S)
def ship_and_bill(order: int, guard: Guard) -> str:
    """Enqueues `recover` as part of its own transaction; returns that task's id."""
    with guard.transaction() as db:
        effect(db, f"shipped {order}", guard)
        billed = enqueue(recover, (order + 1000,), session=db)
        guard.result = billed.result.id
    return ""


@task(name="shop.unless_busy", ignore_result=True)
@guarded_task(key="order:<order>", once_per="message", busy="skip", ttl_s=TTL_S)
def unless_busy(order: int, *, guard: Guard) -> int:
    """Does nothing if its key is taken."""
    with guard.transaction() as db:
        effect(db, order, guard)
    return order


@task(name="shop.leave")
@guarded_task(key="order:<order>", ttl_s=TTL_S, max_crashes=3)
def leave(order: int, how: str, *, guard: Guard) -> None:
    """Ends without an Exception, as argparse does, or a cancelled event loop."""
    step(order, "began")
    if how == "exit":
        sys.exit("usage: leave")
    raise asyncio.CancelledError("by itself")


@task(name="shop.hold")
@guarded_task(key="order:<order>", ttl_s=TTL_S)
def hold(order: int, seconds: float, again: float = 0.0, *, guard: Guard) -> None:
    """Takes `seconds` inside the transaction, after its write; later attempts take `again`, and
    wait for a "go again"."""
    with guard.transaction() as db:
        effect(db, order, guard)
        if guard.attempt == 1:
            step(order, "wrote")
            take(seconds)
        else:
            step(order, "wrote again")
            take(again, "go again")


@task(name="shop.freeze")
@guarded_task(key="order:<order>", ttl_s=TTL_S)
def freeze(order: int, guard: Guard) -> None:
    """The first attempt stops its own process just before COMMIT, with all row locks taken."""
    with guard.transaction() as db:
        effect(db, order, guard)
        step(order, "wrote")
        if guard.attempt == 1:

            def stop(_: Any) -> None:
                os.kill(os.getpid(), signal.SIGSTOP)

            sa.event.listen(db, "commit", stop)


@task(name="shop.spin")
@guarded_task(key="order:<order>", ttl_s=TTL_S)
def spin(order: int, seconds: float, guard: Guard) -> None:
    """Computes for `seconds` without ever letting another greenlet run."""
    step(order, "began")
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        pass
    with guard.transaction() as db:
        effect(db, order, guard)


@task(name="shop.die")
@guarded_task(key="order:<order>", ttl_s=TTL_S, max_crashes=2)
def die(order: int, guard: Guard) -> None:
    """Kills the process that runs it, each time."""
    step(order, "began")
    os.kill(os.getpid(), 9)


@task(name="shop.odd")
@guarded_task(key="order:<order>", ttl_s=TTL_S)
def odd(order: int, guard: Guard) -> Any:
    """Its result is not JSON."""
    with guard.transaction() as db:
        effect(db, order, guard)
    return object()


@task(name="shop.add")
@guarded_task(key="add:<x>", once_per="message", ttl_s=TTL_S)
def add(x: int, y: int) -> int:
    """For canvas."""
    step(x, "added")
    return x + y


@task(name="shop.total")
def total(values: list[int]) -> int:
    """A chord's body, not guarded."""
    return sum(values)


@task(name="shop.broken")
@guarded_task(key="order:<order>", ttl_s=TTL_S)
def broken(order: int) -> None:
    """Fails each time."""
    raise ValueError(f"order {order} cannot be shipped")


@task(name="shop.complain")
def complain(request: Any, error: BaseException, traceback: Any) -> None:
    """An error link, not guarded."""
    step(request.id, "complained")


@task(name="shop.instead", bind=True)
@guarded_task(key="instead:<x>", once_per="message", ttl_s=TTL_S)
def instead(self: Task, x: int) -> None:
    """Replace itself by `add`, with the same key."""
    step(x, "replaced")
    raise self.replace(instead_of_it.s(x))


@task(name="shop.instead_of_it")
@guarded_task(key="instead:<x>", once_per="message", ttl_s=TTL_S)
def instead_of_it(x: int) -> int:
    """Same task id and same key as what it replaces."""
    step(x, "in its place")
    return x + 1


@task(name="shop.flaky", bind=True, max_retries=3)
@guarded_task(key="order:<order>", ttl_s=TTL_S)
def flaky(self: Task, order: int, guard: Guard) -> int:
    """Fails twice by self.retry."""
    step(order, "began")
    if self.request.retries < 2:
        raise self.retry(countdown=0.1)
    with guard.transaction() as db:
        effect(db, order, guard)
    return int(self.request.retries)


@task(name="shop.auto", autoretry_for=(ValueError,), max_retries=3, default_retry_delay=0.1)
@guarded_task(key="order:<order>", ttl_s=TTL_S)
def auto(order: int, guard: Guard) -> int:
    """Fails once; autoretry_for does the rest."""
    step(order, "began")
    if guard.attempt == 1:
        raise ValueError("once")
    with guard.transaction() as db:
        effect(db, order, guard)
    return guard.attempt


@task(name="shop.stubborn", autoretry_for=(Exception,), max_retries=2, default_retry_delay=0.1)
@guarded_task(key="order:<order>", ttl_s=TTL_S)
def stubborn(order: int, guard: Guard) -> int:
    """Ship; autoretry_for takes every exception for a failure of the body."""
    step(order, "began")
    with guard.transaction() as db:
        effect(db, order, guard)
    return order


@task(name="shop.nap", bind=True, autoretry_for=(ValueError,))
@guarded_task(key="order:<order>", ttl_s=TTL_S)
def nap(self: Task, order: int, seconds: float, *, guard: Guard) -> None:
    """Do as `ship` does, in a function that Celery wraps and passes the task to (`bind=True`)."""
    step(order, "began")
    time.sleep(seconds)
    with guard.transaction() as db:
        effect(db, order, guard)


@task(name="shop.nest")
@guarded_task(key="order:<order>", ttl_s=TTL_S)
def nest(order: int, guard: Guard) -> int:
    """Calls itself for the orders below, and adds them up."""
    below = nest.run(order - 1) if order > 1 else 0
    with guard.transaction() as db:
        effect(db, order, guard)
        guard.result = order + below
    return order + int(below)


class Careless(Task):  # type: ignore[misc]  # Celery has no types
    """Replaces the headers of all its messages."""

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        options["headers"] = {"mine": 1}
        return super().apply_async(args, kwargs, **options)


@task(name="shop.careless", bind=True, base=Careless, max_retries=2)
@guarded_task(key="queue:<name>", once_per="message", busy="park", order="strict", ttl_s=TTL_S)
def careless(self: Task, name: str, number: int, seconds: float, *, guard: Guard) -> str:
    """Is retried once, with other headers; then notes the request it runs for."""
    if not self.request.retries:
        step(number, "began")
        take(seconds)
        raise self.retry(headers={"mine": 2}, countdown=0)
    with guard.transaction() as db:
        effect(db, f"{name} {number} {request_id.get()}", guard)
    return request_id.get()


@task(name="shop.patient")
@guarded_task(key="order:<order>", ttl_s=TTL_S, on_lost="interrupt", max_crashes=100)
def patient(order: int, guard: Guard) -> None:
    """The first attempt loops until it is interrupted."""
    step(order, "began")
    try:
        while guard.attempt == 1:
            time.sleep(0.02)
    except LeaseLostError:
        step(order, "interrupted")
        raise
    with guard.transaction() as db:
        effect(db, order, guard)


def tick_of(request: Any, entry: str) -> str:
    """The tick that a message was sent for; `entry` if for none."""
    return message_of(request).tick or entry


@task(name="shop.tick", bind=True, ignore_result=True)
@guarded_task(key="tick:<entry>", once_per="tick", ttl_s=TTL_S)
def tick(self: Task, entry: str, guard: Guard) -> None:
    """Once for each tick of its entry; what is no tick is an item of its own name."""
    with guard.transaction() as db:
        effect(db, tick_of(self.request, entry), guard)


@task(name="shop.each", bind=True, ignore_result=True)
def each(self: Task, entry: str) -> None:
    """Once for each message that beat sent, with nothing to guard it."""
    step(tick_of(self.request, entry), "came")


stamp = shop_shared.stamp

try:
    import pydantic
except ImportError:  # the test that needs it says so
    pass
else:

    class Order(pydantic.BaseModel):  # type: ignore[misc,unused-ignore]
        """A model that a message carries as a dict."""

        number: int
        lines: list[str] = []

    @task(name="shop.model", pydantic=True)
    @guarded_task(key="order:<order.number>", ttl_s=TTL_S)
    def model(order: Order, *, guard: Guard) -> Order:
        """Takes a model and returns one."""
        with guard.transaction() as db:
            effect(db, order.number, guard)
        return order

    @task(name="shop.queue_up_models", pydantic=True)
    @guarded_task(key="queue:<order.number>", once_per="message", busy="park", ttl_s=TTL_S)
    def queue_up_models(order: Order, seconds: float = 0.0, *, guard: Guard) -> int:
        """Stands in line for the key that a model names."""
        return _take_turn("model", order.number, seconds, guard)
