"""Code around the blocks of Python on each page, and checks of their results.

Each page with such blocks has one function. It is a generator. The code before its first `yield`
prepares the first block. The code between two checks one block and prepares the next. The code
after the last checks the end. So a new block fails its test until its result is checked here.

FastAPI and Flask are replaced by modules of a few lines, which register a handler and call it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, get_args
from unittest.mock import MagicMock

import pytest
import sqlalchemy as sa
from rq import Worker
from sqlalchemy import orm
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import taskguard
from taskguard.integration import set_tracer
from taskguard.locks import new_owner
from taskguard.model.states import State

__all__ = ["SURROUNDINGS", "Place"]

SURROUNDINGS: dict[str, Callable[[Place], Iterator[None]]] = {}


@dataclass
class Place:
    """The environment of one page's blocks.

    Attributes:
        names: the module that the blocks are the text of.
        memory: `taskguard_memory`, on which all guards run.
        url: of the ledger's database.
        fixture: gets a fixture of pytest's by its name.
        apps: Celery apps to close at the end.
    """

    names: types.ModuleType
    memory: Any
    url: str
    fixture: Callable[[str], Any]
    apps: list[Any] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.names, name)

    def give(self, **names: Any) -> None:
        """Define names that the page leaves out."""
        vars(self.names).update(names)

    def app(self) -> Any:
        """A Celery app whose broker is this process's memory."""
        from celery import Celery

        self.apps.append(Celery("shop", broker="memory://"))
        self.give(app=self.apps[-1])
        return self.apps[-1]

    def order_and_ship(self) -> None:
        """A table of orders, and a task that ships one of them."""
        from taskguard import Guard
        from taskguard_celery import guarded_task

        app = self.app()
        self.sql("create table orders (id integer primary key, shipped boolean)")

        @app.task(name="shop.ship")
        @guarded_task(key="order:<order_id>")
        def ship(order_id: int, guard: Guard) -> None:
            with guard.transaction() as db:
                db.execute(
                    sa.text("update orders set shipped = true where id = :id"), [{"id": order_id}]
                )

        class Base(DeclarativeBase):
            pass

        class Order(Base):
            __tablename__ = "orders"
            id: Mapped[int] = mapped_column(primary_key=True)

        self.give(ship=ship, Order=Order)

    def sql(self, statement: str) -> list[Any]:
        """The first column of what the database answers."""
        with self.memory.engine.begin() as db:
            done = db.exec_driver_sql(statement)
            return list(done.scalars()) if done.returns_rows else []

    def deliver_all(self, app: Any) -> int:
        """Run the published messages as a worker does. Return their number."""
        count = 0
        with app.connection_for_read() as connection, connection.SimpleQueue("celery") as queue:
            with contextlib.suppress(queue.Empty):
                while True:
                    message = queue.get(block=False)
                    message.ack()
                    task = app.tasks[message.headers["task"]]
                    args, kwargs, _ = message.payload
                    headers = message.headers
                    task.apply(args, kwargs, task_id=headers["id"], headers=headers).get()
                    count += 1
        return count

    def twice(self, task: Any, *args: Any) -> tuple[Any, Any]:
        """One message, delivered twice."""
        answers: tuple[Any, Any] = self.fixture("deliver_twice")(task, args)
        return answers

    def events(self) -> Counter[str]:
        """How often each happened."""
        return Counter(event.name for event in self.memory.events)

    def states(self) -> dict[str, str]:
        """The works on record."""
        with self.memory.engine.connect() as db:
            return dict(db.execute(sa.text("select id, state from taskguard_work")).all())


def around(page: str) -> Callable[[Any], Any]:
    """Register the surroundings of a page."""

    def register(function: Callable[[Place], Iterator[None]]) -> Any:
        SURROUNDINGS[page] = function
        return function

    return register


@around("README.md")
def readme(place: Place) -> Iterator[None]:
    place.sql("create table orders (id integer, receipt text)")
    place.sql("insert into orders (id) values (42)")
    yield  # the module sends nothing when it is imported
    assert place.deliver_all(place.names.app) == 0
    printed = place.fixture("capsys")
    assert place.twice(place.pay, 42, 1999) == ("receipt-1", "receipt-1")
    assert printed.readouterr().out == "charging 1999 cents\n"
    assert place.sql("select receipt from orders") == ["receipt-1"]
    assert place.events()["completed"] == place.events()["duplicate"] == 1


@around("docs/tutorial.md")
def tutorial(place: Place) -> Iterator[None]:
    place.sql("create table shipments (order_id integer)")
    yield
    assert place.twice(place.ship, 42) == ("shipped", "shipped")
    assert place.sql("select order_id from shipments") == [42]
    assert place.names.app.conf.task_reject_on_worker_lost
    place.names.app.tasks.pop("shop.ship")  # the next block replaces it
    yield
    place.names.time = types.SimpleNamespace(sleep=[].append)
    assert place.twice(place.ship, 43) == ("shipped", "shipped")
    assert place.sql("select order_id from shipments") == [42, 43]


@around("docs/how-to/one-at-a-time.md")
def one_at_a_time(place: Place) -> Iterator[None]:
    place.app()
    yield
    place.twice(place.transfer, 1, 7, 8, 100)
    assert place.states() == {"shop.transfer transfer:1": State.DONE}
    assert place.memory.events[0].key == "account:7, account:8"
    yield
    place.report("monday")
    place.report("monday")
    assert place.states()["shop.report report:monday"] == State.DONE
    assert place.events()["completed"] == 2
    yield
    assert place.lease is not None
    assert not place.lock.locked()
    yield
    assert place.start(7)
    assert not place.start(8)
    place.finished(7)
    assert place.start(8)
    yield
    released = [each.key for each in place.memory.events if each.name == "released"]
    assert released[-3:] == ["api:stripe", "catalogue", "catalogue"]


@around("docs/how-to/in-order.md")
def in_order(place: Place) -> Iterator[None]:
    place.app()
    yield
    place.twice(place.book, 7, 100)
    assert place.memory.events[0].key == "account:7"
    assert place.events()["completed"] == 1
    yield
    place.twice(place.transfer, 8, 100)
    assert place.events()["completed"] == 2


@around("docs/how-to/limits.md")
def limits(place: Place) -> Iterator[None]:
    place.app()
    yield
    place.twice(place.sync, 7, 1)
    assert place.memory.events[0].key == "account:7"
    assert place.events()["completed"] == 1


@around("docs/how-to/latest-wins.md")
def latest_wins(place: Place) -> Iterator[None]:
    place.app()
    yield
    place.twice(place.sync, 7)
    assert place.memory.events[0].key == "user:7"
    yield
    place.twice(place.rebuild, "books")
    assert place.events()["completed"] == 2
    assert place.events()["claimed"] == 2
    yield
    place.twice(place.push, 7)
    assert place.events()["completed"] == 3


@around("docs/reference/options.md")
def options(place: Place) -> Iterator[None]:
    place.app()
    yield
    place.twice(place.book, 7, 1)
    assert place.names.IN_EXACT_LINE["order"] == "strict"
    assert place.events()["completed"] == 1


@around("docs/how-to/without-redis.md")
def without_redis(place: Place) -> Iterator[None]:
    yield
    with place.tg.lock("order:1") as lease:
        lease.check()


@around("docs/how-to/enqueue.md")
def enqueue(place: Place) -> Iterator[None]:
    place.order_and_ship()
    place.give(engine=place.memory.engine)
    yield
    assert place.states() == {"shop.ship order:42": State.NEW}
    yield
    assert place.names.enqueued.outcome == "sent"
    assert place.deliver_all(place.names.app) == 2
    assert place.sql("select shipped from orders where id = 42") == [1]


@around("docs/how-to/unique.md")
def unique(place: Place) -> Iterator[None]:
    app = place.app()
    from taskguard_celery import guarded_task

    @app.task(name="shop.index")
    @guarded_task(key="index:<customer_id>")
    def index(customer_id: int, words: str) -> str:
        return words

    place.give(index=index)
    yield
    assert place.states() == {"shop.index index:7": State.NEW}
    assert place.deliver_all(app) == 1
    assert place.states() == {"shop.index index:7": State.DONE}


@around("docs/how-to/unique-until-ended.md")
def unique_until_ended(place: Place) -> Iterator[None]:
    app = place.app()
    yield
    assert place.deliver_all(app) == 2
    assert place.events()["completed"] == place.events()["duplicate"] == 1
    yield
    for round_ in (3, 1):
        for _ in range(round_):
            with orm.Session(place.memory.engine) as session, session.begin():
                place.changed(session, 7)
        assert place.deliver_all(app) == round_
    assert place.events()["completed"] == 3
    assert set(place.states().values()) == {State.DONE}
    assert len(place.states()) == 3


@around("docs/how-to/own-row.md")
def own_row(place: Place) -> Iterator[None]:
    place.app()
    yield
    place.names.orders.create(place.memory.engine)
    place.sql("insert into orders (id, status) values (42, 'PAID')")
    place.twice(place.ship, 42)
    assert place.sql("select status from orders") == ["SHIPPED"]
    assert place.sql("select parcel from orders") == ["P-42"]
    assert place.sql("select fence_token > 0 from orders") == [1]


@around("docs/how-to/long-tasks.md")
def long_tasks(place: Place) -> Iterator[None]:
    lines = [{"line": f"line {number}"} for number in range(1001)]
    place.sql("create table lines (line text)")
    place.app()
    place.give(read_lines=lambda file_id: lines)
    yield

    def written() -> int:
        return int(place.sql("select count(*) from lines")[0])

    explored = place.fixture("explore_crashes")(
        place.import_file, (7,), effects=written, expected=1001
    )
    assert sum("checkpoint" in line.point for line in explored.lines) >= 2


@around("docs/how-to/periodic.md")
def periodic(place: Place) -> Iterator[None]:
    place.app()
    yield
    for hour in (6, 18):
        place.report.apply((datetime(2026, 2, 28, hour, tzinfo=UTC),)).get()
    assert place.states() == {"shop.report report:2026-02-28": State.DONE}
    for _ in range(2):
        place.clean_up.apply().get()
    assert place.events()["completed"] == 3
    place.names.app.loader.import_default_modules()
    for entry in place.names.app.conf.beat_schedule.values():
        assert entry["task"] in place.names.app.tasks
    yield
    leader = place.leader

    def stopped(leadership: taskguard.Leadership) -> None:
        leader.step_down()
        place.follow_the_feed(leadership)

    assert leader.run(stopped) is None


@around("docs/how-to/testing.md")
def testing(place: Place) -> Iterator[None]:
    from taskguard import Guard
    from taskguard_celery import guarded_task

    @place.app().task(name="shop.ship")
    @guarded_task(key="order:<order_id>")
    def ship(order_id: int, guard: Guard) -> str:
        with guard.transaction() as db:
            db.execute(sa.text("insert into shipments values (:id)"), {"id": order_id})
        return "shipped"

    place.give(ship=ship)
    yield
    place.sql("create table shipments (order_id integer)")
    explored = []

    def explore(*args: Any, **options: Any) -> None:
        explored.append(place.fixture("explore_crashes")(*args, **options))

    place.test_an_order_is_shipped_once_wherever_the_worker_dies(place.memory, explore)
    assert len(explored[0].lines) > 10
    place.test_a_duplicate_gets_the_first_result(place.fixture("deliver_twice"))


@around("docs/how-to/lock-provider.md")
def lock_provider(place: Place) -> Iterator[None]:
    yield
    from taskguard.locks import LockProvider

    path = place.fixture("tmp_path") / "locks.db"
    assert isinstance(place.SqliteLocks(path), LockProvider)
    yield
    assert place.open_locks(f"lockfile://{path}", ledger=None).path == str(path)
    module = types.SimpleNamespace(SqliteLocks=place.SqliteLocks)
    place.fixture("monkeypatch").setitem(sys.modules, "lockfile", module)
    yield
    assert place.TestAcquire  # tests/plugin/test_lock_contract.py runs them


@around("docs/how-to/moving-over.md")
def moving_over(place: Place) -> Iterator[None]:
    from rq import Queue

    queue = Queue(connection=place.memory.redis)
    place.give(client=place.memory.redis)

    app = place.app()

    def runs_one_of_two(*args: Any) -> bool:
        """Call `changed` twice, and twice again. Return whether each time one message ran."""
        ran = []
        for _ in range(2):
            before = place.events()["completed"]
            place.changed(*args)
            place.changed(*args)
            ran.append((place.deliver_all(app), place.events()["completed"] - before))
        app.tasks.pop("shop.sync")  # the next block replaces it
        return ran == [(1, 1), (1, 1)]

    yield
    assert app.tasks.pop("shop.sync").once == {"keys": ["account_id"], "graceful": True}
    yield
    assert runs_one_of_two(7)
    yield
    assert app.tasks.pop("shop.sync").once["graceful"]
    yield
    assert app.tasks.pop("shop.sync").unique_on == ["account_id"]
    yield
    assert place.changed(7) == place.changed(7)
    assert place.deliver_all(app) == 1
    assert runs_one_of_two(7)
    yield
    assert [place.changed(queue, 8) for _ in range(2)] == [True, False]
    queue.empty()
    yield
    assert [place.changed(queue, 8) for _ in range(2)] == [True, False]
    assert queue.jobs[0].args == (8,)
    yield
    assert runs_one_of_two(7)
    yield
    before = place.events()["completed"]
    place.changed(7, "red")
    place.changed(7, "blue")
    assert place.deliver_all(app) == 2
    assert place.events()["completed"] == before + 1
    yield
    assert place.ship.apply((42,)).successful()


@around("docs/how-to/changing-a-guard.md")
def changing_a_guard(place: Place) -> Iterator[None]:
    app = place.app()
    from taskguard_celery import guarded_task

    @app.task(name="shop.ship")
    @guarded_task(key="order:<order_id>")
    def former(order_id: int) -> None: ...

    former.apply((42,)).get()
    place.app()
    yield
    place.ship.apply((42,)).get()
    assert place.events()["completed"] == place.events()["duplicate"] == 1
    app = place.app()
    yield
    assert app.conf.taskguard_formerly_namespaces == [""]


@around("docs/how-to/remove.md")
def remove(place: Place) -> Iterator[None]:
    place.app()
    place.sql("create table shipments (order_id integer unique)")
    yield
    place.twice(place.ship, 42)
    assert place.events()["completed"] == place.events()["duplicate"] == 1
    place.app()
    yield
    for order in (42, 43, 43):
        place.ship.apply((order,)).get()
    assert place.sql("select order_id from shipments order by order_id") == [42, 43]
    assert place.events()["completed"] == 1
    yield
    with place.memory.engine.connect() as db:
        assert _tables(db) == []
    for statement in taskguard.ddl_statements(place.url):  # the fixture empties them
        place.sql(statement)


@around("docs/how-to/alembic.md")
def alembic(place: Place) -> Iterator[None]:
    from alembic.migration import MigrationContext
    from alembic.operations import Operations

    context = MagicMock()
    place.give(context=context, connection=None, target_metadata=sa.MetaData())
    yield
    include_name = context.configure.call_args.kwargs["include_name"]
    assert not include_name("taskguard_work", "table", {})
    assert include_name("orders", "table", {})
    engine = sa.create_engine(place.fixture("pg_url"))

    @contextlib.contextmanager
    def operations() -> Iterator[sa.Connection]:
        with engine.begin() as db, Operations.context(MigrationContext.configure(db)):
            yield db

    yield
    yield
    with operations() as db:
        place.upgrade()
        assert len(_tables(db)) == 10
    with operations() as db:
        place.downgrade()
        assert _tables(db) == []
    engine.dispose()


def _tables(db: sa.Connection) -> list[str]:
    return [name for name in sa.inspect(db).get_table_names() if name.startswith("taskguard_")]


@around("docs/how-to/web.md")
def web(place: Place) -> Iterator[None]:
    place.order_and_ship()
    refunds = sa.Table("refunds", sa.MetaData(), sa.Column("payment_id", sa.Integer))
    refunds.create(place.memory.engine)
    place.give(refunds=refunds)
    yield
    assert isinstance(place.api, Routes)
    place.api.ask("/orders/{order_id}", order_id=42)
    assert place.deliver_all(place.names.app) == 1
    for _ in range(2):
        assert place.api.ask("/refunds/{payment_id}", payment_id=7) == "refunded"
    _refuses(place, lambda: place.api.ask("/refunds/{payment_id}", payment_id=8))
    yield
    place.web.ask("/orders/<int:order_id>", order_id=43)
    assert place.deliver_all(place.names.app) == 1
    assert place.sql("select shipped from orders") == [1, 1]
    assert place.web.ask("/refunds/<int:payment_id>", payment_id=7) == "refunded"
    _refuses(place, lambda: place.web.ask("/refunds/<int:payment_id>", payment_id=8))
    assert place.sql("select payment_id from refunds") == [7]
    place.names.engine.dispose()


def _refuses(place: Place, ask: Callable[[], Any]) -> None:
    """Asked in another request while the key is held."""
    from concurrent.futures import ThreadPoolExecutor

    with place.tg.lock("payment:8"), ThreadPoolExecutor(1) as request:
        with pytest.raises(RefusedError) as refused:
            request.submit(ask).result()
    assert refused.value.args[0] == 409


class RefusedError(Exception):
    """Stands for FastAPI's HTTPException, and for the exception of Flask's abort."""

    def __init__(self, status_code: int, headers: dict[str, str] | None = None) -> None:
        super().__init__(status_code)
        assert all(int(value) >= 1 for value in (headers or {}).values())


class Routes:
    """The part of FastAPI and Flask that registers a handler and calls it."""

    def __init__(self, name: str = "") -> None:
        self._handlers: dict[str, Callable[..., Any]] = {}

    def post(self, path: str) -> Callable[[Any], Any]:
        return lambda handler: self._handlers.setdefault(path, handler)

    def ask(self, path: str, **values: Any) -> Any:
        """A request, with the dependencies of its handler."""
        handler = self._handlers[path]
        with contextlib.ExitStack() as stack:
            for name, kind in _annotated(handler):
                for given in get_args(kind)[1:]:  # of an Annotated
                    made = contextlib.contextmanager(given.function)
                    values[name] = stack.enter_context(made())
            return handler(**values)


def _annotated(handler: Callable[..., Any]) -> list[tuple[str, Any]]:
    kinds = handler.__annotations__.items()
    return [(name, kind) for name, kind in kinds if hasattr(kind, "__metadata__")]


@dataclass(frozen=True)
class Depends:
    """FastAPI's word for what a handler needs."""

    function: Callable[..., Any]


def _abort(status: int) -> None:
    raise RefusedError(status)


@around("docs/how-to/asyncio.md")
def awaited(place: Place) -> Iterator[None]:
    place.order_and_ship()
    place.sql("create table refunds (payment_id integer)")
    yield

    async def both() -> list[str]:
        return [await place.handler(7), await place.handler(7)]

    assert asyncio.run(both()) == ["notified", "notified"]
    assert place.sql("select payment_id from refunds") == [7]
    assert place.events()["completed"] == 2
    yield
    asyncio.run(place.restock(7))
    assert "inventory:7" in {each.key for each in place.memory.events if each.name == "released"}
    yield

    async def placed() -> None:
        await place.place(42)
        await place.names.engine.dispose()

    asyncio.run(placed())
    assert place.deliver_all(place.names.app) == 1
    assert place.sql("select shipped from orders") == [True]


@around("docs/how-to/django.md")
def django(place: Place) -> Iterator[None]:
    """In the ledger that Django's settings name: `atomic()` belongs to no other."""
    place.give(INSTALLED_APPS=["django.contrib.auth"])
    yield
    assert place.INSTALLED_APPS[-1] == "taskguard_django"
    from support.django_shop import django_on, set_up

    set_up()
    from django.conf import settings

    import taskguard_celery
    from support.django_orders.models import Order
    from taskguard_django import conf

    settings.TASKGUARD, before = place.TASKGUARD, settings.TASKGUARD
    try:
        assert (conf.locks(), conf.alias()) == ("memory://", "default")
    finally:
        settings.TASKGUARD = before
    app = place.app()
    place.give(Order=Order)
    with django_on(default=place.url):
        yield
        order = Order()
        place.place(order)
        assert place.deliver_all(app) == 1
        assert Order.objects.get(id=order.id).status == "SHIPPED"
        ledger = taskguard_celery.runtime_of(app).ledger
        assert ledger is not None
        assert [work.id for work in ledger.list_work(State.DONE)] == [f"shop.ship order:{order.id}"]


@around("docs/how-to/elsewhere.md")
def elsewhere(place: Place) -> Iterator[None]:
    place.app()
    orders = sa.Table(
        "orders",
        sa.MetaData(),
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("status", sa.Text),
        sa.Column("fence_token", sa.BigInteger),
    )
    other = sa.create_engine("sqlite://")
    orders.create(other)
    with other.begin() as db:
        db.execute(orders.insert().values(id=42))
    asked: list[tuple[str, str]] = []

    def pay(order_id: int, *, idempotency_key: str) -> str:
        asked.append((str(order_id), idempotency_key))
        return "receipt"

    place.give(elsewhere=other, orders=orders, client=place.memory.redis, pay=pay)
    yield
    place.twice(place.ship, 42)
    assert len(asked) == 1
    with other.connect() as db:
        assert db.execute(sa.select(orders.c.status, orders.c.fence_token > 0)).all() == [
            ("shipped", True)
        ]
    other.dispose()


@around("docs/reference/events.md")
def events(place: Place) -> Iterator[None]:
    metrics = MagicMock()
    place.give(metrics=metrics)
    yield
    with place.tg.lock("inventory:42"):
        pass
    assert [call.args[0] for call in metrics.increment.call_args_list][:1] == ["taskguard.acquired"]


@around("docs/how-to/metrics.md")
def metrics(place: Place) -> Iterator[None]:
    client = pytest.importorskip("prometheus_client")
    pytest.importorskip("opentelemetry.metrics")

    def deliver(number: int) -> None:
        @place.tg.guarded(key="order:<order_id>")
        def ship(order_id: int) -> None:
            pass

        ship(number)

    yield
    deliver(1)
    families = {each.name: each for each in client.REGISTRY.collect()}
    counted = families["taskguard_deliveries"].samples
    assert [each.labels["outcome"] for each in counted if each.value == 1] == ["done"]
    for each in list(client.REGISTRY.collect()):
        if each.name.startswith("taskguard_"):
            client.REGISTRY.unregister(client.REGISTRY._names_to_collectors[each.name])
    yield
    deliver(2)
    yield
    place.statsd.close()
    place.give(statsd=MagicMock())
    deliver(3)
    sent = [call.args[0] for call in place.statsd.sendto.call_args_list]
    assert any(re.fullmatch(rb"taskguard\.deliveries\..*ship\.done:1\|c", each) for each in sent)


def stand_ins() -> dict[str, types.ModuleType]:
    """Return modules that replace packages that are not installed."""
    contents: dict[str, dict[str, Any]] = {
        "fastapi": {"FastAPI": Routes, "Depends": Depends, "HTTPException": RefusedError},
        "flask": {"Flask": Routes, "abort": _abort},
    }
    made = {name: types.ModuleType(name) for name in contents}
    for name, module in made.items():
        vars(module).update(contents[name])
    return made


@around("docs/how-to/queue.md")
def queue(place: Place) -> Iterator[None]:
    yield
    names = {name: getattr(place, name) for name in ("Jobs", "guarded_job", "tg", "work")}
    place.fixture("monkeypatch").setitem(sys.modules, "jobqueue", types.SimpleNamespace(**names))
    place.fixture("monkeypatch").chdir(place.fixture("tmp_path"))  # where jobs.db is made
    yield
    printed = place.fixture("capsys")
    yield
    jobs = place.jobs
    try:
        assert printed.readouterr().out.count(": 'shipped'\n") == 2
        assert place.sql("select shipped from orders") == [1]
        assert place.events()["completed"] == place.events()["duplicate"] == 1
        place.tg.runner.locks.acquire(
            ("order:43",), new_owner(), ttl_s=30.0, with_fence=True, wait_s=0.0
        )
        jobs.send(place.ship, 43)
        assert place.work(jobs)
        assert place.events()["deferred"] == 1
        (job,) = jobs.db.execute("select * from jobs").fetchall()
        assert (job["deferrals"], job["retries"], job["due"] > job["sent"]) == (1, 0, True)
    finally:
        jobs.db.close()


@around("docs/how-to/choose.md")
def choose(place: Place) -> Iterator[None]:
    """Five tasks: each recipe has the effects that its text promises."""
    place.app()
    place.sql("create table effects (name text)")
    calls: list[str] = []

    def effect(name: str) -> Any:
        return sa.text("insert into effects values (:name)").bindparams(name=name)

    def pay(invoice_id: int, *, key: str) -> str:
        calls.append(key)
        return f"payment-{invoice_id}"

    place.give(
        pay=pay,
        paid=lambda invoice_id, payment: effect(f"{invoice_id} {payment}"),
        fetch=lambda name: calls.append(str(name)),
        applied=lambda account_id, event_id: effect(f"event {account_id} {event_id}"),
        reported=lambda: effect("report"),
    )
    yield
    assert place.charge.apply((7,)).get() == place.charge.apply((7,)).get() == "payment-7"
    assert len(calls) == 1
    yield
    place.sync.apply((1,))
    place.sync.apply((1,))
    assert calls[1:] == ["1", "1"], "each message runs"
    yield
    place.apply.apply((1, 5))
    place.apply.apply((1, 5))
    yield
    place.call.apply(("north",))
    assert calls[-1] == "north"
    yield
    place.report.apply()
    assert place.sql("select name from effects") == ["7 payment-7", "event 1 5", "report"]


@around("docs/how-to/charge-once.md")
def charge_once(place: Place) -> Iterator[None]:
    """A provider that charges once for each key, and times out if the test says so."""
    place.app()
    for table in (
        "payments (id integer, status text)",
        "orders (id integer, paid boolean)",
        "refunds (id integer)",
    ):
        place.sql(f"create table {table}")
    place.sql("insert into orders (id) values (42)")
    charges: dict[str, int] = {}
    faults = ["times out"]

    def call(cents: int, *, idempotency_key: str) -> str:
        charges.setdefault(idempotency_key, cents)
        if faults:
            raise TimeoutError(faults.pop())
        return "succeeded"

    def call_without_key(cents: int, reference: str) -> None:
        assert reference not in charges
        charges[reference] = cents
        raise TimeoutError

    place.give(
        provider=types.SimpleNamespace(
            TimeoutError=TimeoutError,
            charge=call,
            refund=call,
            find=charges.get,
            charge_without_key=call_without_key,
        )
    )
    yield
    place.charge.retry_backoff = False
    assert place.twice(place.charge, 5, 42, 1999) == ("succeeded", "succeeded")
    assert (list(charges.values()), faults) == ([1999], [])
    assert place.sql("select status from payments") == ["succeeded"]
    with pytest.raises(taskguard.errors.FingerprintMismatchError):
        place.charge.apply((5, 42, 5)).get()
    charges.clear()
    yield
    with pytest.raises(TimeoutError):
        place.charge_by_reference.apply((42, 1999)).get()
    found = charges.pop("order-42")
    with pytest.raises(LookupError):
        place.charge_by_reference.apply((42, 1999)).get()
    charges["order-42"] = found
    place.charge_by_reference.apply((42, 1999)).get()
    assert place.sql("select paid from orders") == [1]
    seen = _progress_after_a_refusal(place)
    assert seen == [None, None]
    yield
    place.twice(place.refund, 9, 42, 500)
    assert sorted(charges.values()) == [500, 1999]
    assert place.sql("select id from refunds") == [9]


def _progress_after_a_refusal(place: Place) -> list[Any]:
    """Return the progress in two attempts. The first one commits that there was no charge."""
    seen: list[Any] = []

    @place.names.app.task
    @place.guarded_task(key="refused:<order_id>")
    def refused(order_id: int, guard: taskguard.Guard) -> None:
        seen.append(guard.progress)
        with guard.checkpoint("asked"):
            pass
        with guard.checkpoint(None):
            pass
        if len(seen) == 1:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        refused.apply((7,)).get()
    refused.apply((7,)).get()
    return seen


@around("docs/how-to/tenants.md")
def tenants(place: Place) -> Iterator[None]:
    """One order number in two tenants, each with a schema of its own."""
    app = place.app()
    for tenant in (7, 8):
        place.sql(f"create schema tenant_{tenant}")
        place.sql(f"create table tenant_{tenant}.orders (id integer, shipped boolean)")
        place.sql(f"insert into tenant_{tenant}.orders values (42, false)")
    yield
    for tenant in (7, 8):
        place.twice(place.ship, tenant, 42)
        assert place.sql(f"select shipped from tenant_{tenant}.orders") == [True]
    assert place.events()["completed"] == 2
    yield
    place.twice(place.export, 7, 1)
    assert place.memory.events[-1].key.startswith("tenant:7")
    yield
    assert app.conf.taskguard_namespace == "shop"


@around("docs/how-to/dashboard.md")
def dashboard(place: Place) -> Iterator[None]:
    from support.dashboard_clients import asgi
    from support.django_shop import set_up

    place.fixture("monkeypatch").delitem(sys.modules, "flask")  # the page needs the real one
    import flask
    from starlette.applications import Starlette

    user = types.SimpleNamespace(is_authenticated=False)
    flask_app = flask.Flask("shop")
    place.give(app=Starlette(), flask_app=flask_app, current_user=user, tg=taskguard.connect())
    yield
    assert asgi(vars(place.names)["app"])("GET", "/taskguard/").status == 403
    yield
    with flask_app.test_client() as client:
        assert client.get("/taskguard/doctor").status_code == 403
        user.is_authenticated = True
        assert client.get("/taskguard/doctor").status_code == 200
    set_up()
    place.give(urlpatterns=[])
    yield
    assert len(place.urlpatterns) == 1


@around("docs/how-to/logs.md")
def logs(place: Place) -> Iterator[None]:
    yield
    logging.getLogger("shop").removeHandler(place.handler)
    pytest.importorskip("structlog")
    yield
    place.structlog.reset_defaults()


@around("docs/how-to/traces.md")
def traces(place: Place) -> Iterator[None]:
    pytest.importorskip("opentelemetry.instrumentation.celery")
    yield
    place.CeleryInstrumentor().uninstrument()
    set_tracer(None)
    yield
    assert issubclass(place.TracedWorker, Worker)
