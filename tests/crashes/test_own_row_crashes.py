"""A task that moves a row of its own, killed wherever it may be; the message comes again.

At every moment the row and taskguard's record say the same; at the end there is one effect, and
the row is SHIPPED.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from support.databases import DATABASES
from support.exploration import Exploration
from support.killing import KillAt, was_killed
from support.own_row_tasks import TASKS
from support.own_rows import EFFECTS, METADATA, ORDERS, Shop, Step, own_row
from taskguard import Guard

TOGETHER = {
    "PAID": {None, "NEW", "FAILED"},
    "SHIPPING": {"PROCESSING"},
    "SHIPPED": {"DONE"},
}


@pytest.fixture(params=DATABASES)
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


@pytest.fixture
def far(url: str, exploration: Exploration) -> Exploration:
    """On PostgreSQL everything, elsewhere as far as this run looks."""
    return replace(exploration, whole=exploration.whole or url.startswith("postgresql"))


def with_transaction(ship: Step, guard: Guard) -> Any:
    return ship.effect(guard)


def in_parts(ship: Step, guard: Guard) -> Any:
    if guard.progress is None:
        with guard.checkpoint("half"):
            pass
    return ship.effect(guard)


def fails_first(ship: Step, guard: Guard) -> Any:
    if guard.attempt == 1:
        raise ZeroDivisionError
    return ship.effect(guard)


def without_transaction(ship: Step, guard: Guard) -> Any:
    return "ship"


@pytest.mark.parametrize("body", [with_transaction, in_parts, fails_first, without_transaction])
def test_killed_around_any_statement_of_its_process(
    url: str, far: Exploration, body: Callable[[Step, Guard], Any]
) -> None:
    """SIGKILL around each statement and before each COMMIT, those of the claim included."""
    shop = Shop(url)
    engine = sa.create_engine(url)
    compiled = Shop(url, engine)
    with contextlib.suppress(ZeroDivisionError):
        _once(compiled, body)  # so that no child has to compile its statements
    compiled.close()
    effects = 0 if body is without_transaction else 1
    kills = 0
    for at in far.numbers(step=5):
        shop.begin_again()
        killed = was_killed(lambda at=at: _deliver(engine, body, at))  # type: ignore[misc]
        status = shop.status
        assert shop.state() in TOGETHER[status], (at, status, shop.state())
        if not killed:
            break
        kills += 1
        shop.expire()
        with contextlib.suppress(ZeroDivisionError):
            _once(shop, body, retries=1)
        assert shop.state() in TOGETHER[shop.status], at
        _once(shop, body, retries=2)
        assert (shop.status, shop.state()) == ("SHIPPED", "DONE"), at
        assert len(shop.effects) == effects, at
    shop.close()
    assert at > 7
    print(f"{kills} kills, one effect each")


def _once(shop: Shop, body: Callable[[Step, Guard], Any], **numbers: int) -> None:
    """One delivery of the message."""
    ship = Step(shop, "ship", own_row())
    ship(lambda guard: body(ship, guard), by=shop.process(), **numbers)


def _deliver(engine: sa.Engine, body: Callable[[Step, Guard], Any], at: int) -> None:
    """In a process that is killed at its boundary number `at`."""
    shop = Shop(engine.url, engine, new=False)
    KillAt(engine, at)
    with contextlib.suppress(ZeroDivisionError):
        _once(shop, body)


@pytest.fixture
def taskguard_ledger(url: str) -> str:
    """Return the URL of the ledger for the plugin."""
    return url


@pytest.fixture
def orders(taskguard_memory: Any) -> Iterator[Any]:
    """The shop's tables, and one paid order."""
    METADATA.create_all(taskguard_memory.engine)

    def put() -> None:
        with taskguard_memory.engine.begin() as db:
            db.execute(sa.delete(ORDERS))
            db.execute(sa.insert(ORDERS).values(id=7, status="PAID"))

    yield put
    METADATA.drop_all(taskguard_memory.engine)


@pytest.mark.parametrize("kind", TASKS)
def test_the_plugin_kills_it_at_every_boundary(
    taskguard_memory: Any, orders: Any, explore_crashes: Any, far: Exploration, kind: str
) -> None:
    """Wherever the task dies, it has one effect, and the row is SHIPPED."""
    if not far.whole:
        pytest.skip("`make explore` has the other databases")
    begun: list[int] = []

    def effects() -> int:
        with taskguard_memory.engine.connect() as db:
            status = db.execute(sa.select(ORDERS.c.status)).scalar_one()
            assert status == ("SHIPPED" if len(begun) % 2 else "PAID")
            begun.append(1)
            count = sa.select(sa.func.count()).select_from(EFFECTS)
            return int(db.execute(count).scalar_one())

    report = explore_crashes(TASKS[kind], (7,), effects=effects, before_each=orders)
    assert "transaction.commit done" in [line.point for line in report.lines]


@pytest.mark.parametrize("kind", TASKS)
def test_each_kind_is_answered_and_overtaken(
    orders: Any, deliver_twice: Any, lose_lease_at: Any, kind: str
) -> None:
    """A second message gets the first one's result. A paused holder gets that of the delivery that
    took over."""
    orders()
    assert deliver_twice(TASKS[kind], (7,)) == ("shipped 7", "shipped 7")
    orders()
    lost = lose_lease_at(TASKS[kind], (7,), at="transaction.begin asked")
    assert (lost.result, lost.overtaker, lost.refused) == ("shipped 7", "shipped 7", True)
