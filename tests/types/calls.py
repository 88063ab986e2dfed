"""What mypy and pyright take of a typed program, and what they do not: lines with `# refused`."""

from __future__ import annotations

from typing import assert_type

import sqlalchemy as sa
from sqlalchemy.orm import Session

import taskguard
from taskguard import Guard
from taskguard_celery import guarded_task
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


class Task:
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
assert_type(Task().run(1), str)
