"""Lines of a typed program that mypy and pyright accept, and lines with `# refused` that they
reject."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, assert_type

import sqlalchemy as sa
from celery import Task
from rq import Queue, Retry
from sqlalchemy.orm import Session

import taskguard
import taskguard_celery
import taskguard_rq
from taskguard import Former, Guard, GuardedRow, TaskOptions
from taskguard.integration import OutcomeOfEnqueue
from taskguard_celery import guarded_task
from taskguard_django import row
from taskguard_rq import guarded_job

tg = taskguard.connect()


@tg.guarded(key="report:<day>")
def report(day: str, guard: Guard) -> int:
    return guard.fence


@tg.guarded(key="account:<account>")
def transfer(account: int, amount: int, guard: Guard) -> bool:
    return amount > 0


@tg.guarded(key="account:<a>")
def of_five(a: int, b: int, c: int, d: int, e: int, guard: Guard) -> int:
    return a


@tg.guarded(key="nightly")
def nightly(guard: Guard) -> None: ...


@tg.guarded(key="order:<order_id>")
async def awaited(order_id: int, guard: Guard) -> str:
    assert_type(await tg.arun(report, "monday"), int)
    assert_type(await tg.arun(without, 7, note="fast"), int)
    await tg.arun(without, "7")  # refused
    async with tg.lock("a") as lease:
        assert_type(lease.fence, int)
    return str(await awaited(7)) + await awaited("7")  # refused


@tg.guarded(key="order:<order_id>")
def by_name(order_id: int, note: str = "", *, guard: Guard) -> int:
    return order_id


@tg.guarded(key="order:<order_id>")
def without(order_id: int, note: str = "") -> int:
    return order_id


@guarded_task(key="order:<order_id>")
def ship(order_id: int, guard: Guard) -> str:
    with guard.transaction() as db:
        assert_type(db, sa.Connection)
        assert_type(guard.db, sa.Connection)
        db.execute("not a statement")  # refused
    return "shipped"


@guarded_job(key="invoice:<invoice_id>", busy="skip")
def charge(invoice_id: int, guard: Guard) -> str:
    with Session(sa.create_engine("sqlite://")) as session, guard.transaction(session) as same:
        assert_type(same, Session)
    with guard.checkpoint({"part": 1}) as db:
        assert_type(db, sa.Connection)
    assert_type(guard.step("pay", pay, invoice_id, cents=3), str)
    guard.step("pay", pay)  # refused
    guard.step("pay", pay, "1", cents=3)  # refused
    return "charged"


def pay(invoice_id: int, *, cents: int) -> str:
    return f"{invoice_id}: {cents}"


class ByClass:
    """A task's class."""

    @guarded_task(key="order:<order_id>")
    def run(self, order_id: int, guard: Guard) -> str:
        return "done"


assert_type(report("monday"), int)
assert_type(report(day="monday"), int)
report(1)  # refused
report("monday", 2)  # refused
assert_type(transfer(1, 2), bool)
assert_type(transfer(1, amount=2), bool)
assert_type(transfer(account=1, amount=2), bool)
transfer("1", 2)  # refused
transfer(1, 2, 3)  # refused
assert_type(of_five(1, 2, 3, d=4, e=5), int)
nightly()
nightly(1)  # refused
assert_type(by_name(1), int)
assert_type(by_name(1, note="x"), int)
assert_type(without(1, note="x"), int)
without("1")  # refused
without()  # refused
without(1, day=2)  # refused
assert_type(ship(1), str)
ship("1")  # refused
assert_type(charge(1), str)
assert_type(ByClass().run(1), str)


# The options of the decorators. Nothing here is decorated: each line is one call.
SHARED: TaskOptions = {"busy": "park", "ttl_s": 60}
ANY: dict[str, Any] = {"busy": "park", "ttl_s": 60}
WIDE: dict[str, object] = {"busy": "park", "ttl_s": 60}


def options(row: GuardedRow, busy: str) -> None:
    guarded_task(key="k", busy="park", order="strict", once_per="message", max_waiting=9)
    guarded_task(key=["a", lambda order_id: f"b:{order_id}"], once_per="<order_id>", ttl_s=5)
    guarded_task(key="k", row=row, formerly=Former(key="x"), fingerprint="<amount>", work=None)
    guarded_task(key="k", on_lost="interrupt", max_hold_s=None, atomic=True, namespace="eu")
    guarded_task(key="k", limit=3, rate="100/m", burst=2, recoverable=True, max_crashes=1)
    guarded_task(key="k", formerly=[Former(task="a"), Former(once_per="tick")], retention_s=1e6)
    guarded_task(key="k", order="fifo")  # refused
    guarded_task(key="k", busy="drop")  # refused
    guarded_task(key="k", busy=busy)  # refused
    guarded_task(key="k", bussy="park")  # refused
    guarded_task(key="k", on_lost="kill")  # refused
    guarded_task(key="k", ttl_s="30")  # refused
    guarded_task(key="k", limit=1.5)  # refused
    guarded_task(key="k", message_id=str)  # refused
    guarded_task(key=1)  # refused
    guarded_task(busy="park")  # refused
    guarded_job(key="k", busy="latest", once_per="message", message_id=lambda job: str(job.id))
    guarded_job(key="k", busy="newest")  # refused
    guarded_job(key="k", order="fifo")  # refused
    guarded_job(key="k", message_id=1)  # refused
    tg.guarded(key="k", busy="wait", wait_s=5, once_per="<a>")
    tg.guarded(key="k", busy="retry")  # refused
    tg.guarded(key="k", order="strict")  # refused
    tg.guarded(key="k", wait="5")  # refused
    Former(once_per=1)  # refused


def rows(model: Any) -> None:
    paid = row(model, id="<a>", state="s", fence="f", new=1, processing=2, done=3, dead=4)
    assert_type(paid, GuardedRow)
    row(model, id="<a>", state="s", fence="f", new=1, processing=2)  # refused
    states: dict[str, Any] = {"new": 1, "processing": 2, "done": 3}
    row(model, id="<a>", state="s", fence="f", on_missing="x", **states)  # refused


def dictionaries() -> None:
    guarded_task(key="k", **SHARED)
    merged: TaskOptions = {**SHARED, "order": "strict"}
    guarded_task(key="k", **merged)
    guarded_task(key="k", order="strict", **ANY)
    guarded_job(key="k", **SHARED)
    guarded_job(key="k", **ANY)
    tg.guarded(key="k", **ANY)
    guarded_task(key="k", order="strict", **SHARED)  # refused
    guarded_task(key="k", **WIDE)  # refused
    tg.guarded(key="k", **SHARED)  # refused


def enqueued(ship: Task, queue: Queue, session: Session, word: str) -> None:
    one = taskguard_celery.enqueue(ship, (42,), session=session, priority=9, queue="high")
    assert_type(one.outcome, OutcomeOfEnqueue)
    taskguard_celery.enqueue(ship, (42,), duplicate="replace", delay_s=30)
    taskguard_celery.enqueue(ship, (42,), eta=datetime.now(UTC), headers={"tenant": "a"})
    taskguard_celery.enqueue(ship, (42,), **ANY)
    print(taskguard_celery.enqueue(ship, (42,), duplicate="skip").outcome)  # refused
    taskguard_celery.enqueue(ship, (42,), duplicate="drop")  # refused
    taskguard_celery.enqueue(ship, (42,), duplicate=word)  # refused
    taskguard_celery.enqueue(ship, (42,), expires=60)  # refused
    taskguard_celery.enqueue(ship, (42,), priority="high")  # refused
    taskguard_celery.enqueue(ship, (42,), countdwn=1)  # refused
    taskguard_rq.enqueue(queue, pay, (42,), retry=Retry(max=3), result_ttl=600, meta={"a": 1})
    taskguard_rq.enqueue(queue, pay, (42,), duplicate="attach", **ANY)
    taskguard_rq.enqueue(queue, pay, (42,), duplicate="attached")  # refused
    taskguard_rq.enqueue(queue, pay, (42,), ttl=60)  # refused
    taskguard_rq.enqueue(queue, pay, (42,), depends_on="x")  # refused
    taskguard_rq.enqueue(queue, pay, (42,), result_ttl="600")  # refused
