"""A shop whose orders carry their own state: tasks that move it, and a queue that only notes."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from support.guarded_shop import NotingQueue
from taskguard import GuardedRow
from taskguard.events import Event, Events
from taskguard.integration import GuardedFunction, MessageRef
from taskguard.ledger.sql import SqlLedger
from taskguard.locks.memory import MemoryLocks
from taskguard.run.guard import Guard
from taskguard.run.runner import Runner

__all__ = ["EFFECTS", "METADATA", "ORDERS", "Shop", "Step", "own_row"]

METADATA = sa.MetaData()
ORDERS = sa.Table(
    "orders",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("status", sa.String(10), nullable=False),
    sa.Column("fence_token", sa.BigInteger),
    sa.Column("note", sa.Text),
)
# No unique index: a double effect has to be seen.
EFFECTS = sa.Table("effects", METADATA, sa.Column("item", sa.Text))


def own_row(**values: Any) -> GuardedRow:
    """A row of `orders`, PAID -> SHIPPING -> SHIPPED."""
    options: dict[str, Any] = {
        "id": "<order_id>",
        "state": ORDERS.c.status,
        "fence": "fence_token",
        "new": "PAID",
        "processing": "SHIPPING",
        "done": "SHIPPED",
        **values,
    }
    return GuardedRow(options.pop("table", ORDERS), **options)


class Step:
    """A task on an order. Its body is given with each delivery; by default it has one effect."""

    def __init__(self, shop: Shop, name: str, row: GuardedRow | None, **options: Any) -> None:
        self.shop = shop
        self.name = name

        def body(order_id: int, amount: int = 0) -> None:
            """Only its parameters count; what it does is given with each delivery."""

        fixed = {name: options.pop(name) for name in ("once_per", "fingerprint") if name in options}
        self.compiled = GuardedFunction(body, key="order:<order_id>", row=row, **options, **fixed)

    def effect(self, guard: Guard) -> str:
        with guard.transaction() as db:
            db.execute(sa.insert(EFFECTS).values(item=f"{self.name} {guard.key}"))
        return self.name

    def __call__(
        self,
        body: Callable[[Guard], Any] | None = None,
        *,
        order: Any = 7,
        message: str = "m",
        by: Runner | None = None,
        queue: bool = True,
        published_at_s: float | None = None,
        **arguments: Any,
    ) -> Any:
        """One delivery, as another process would have it."""
        numbers = {name: arguments.pop(name, 0) for name in ("retries", "deferrals")}
        delivery = self.compiled.delivery(
            (order,),
            arguments,
            namespace="",
            task=self.name,
            message=MessageRef(message, **numbers),
            queue=self.shop.queue if queue else None,
            published_at_s=published_at_s,
        )
        runner = by or self.shop.runner
        run = body or self.effect
        return contextvars.Context().run(runner.deliver, delivery, run)

    def request(self, message: str, *, call: Any, order: Any = 7) -> Any:
        """Return the request that enqueueing it would write."""
        delivery = self.compiled.delivery(
            (order,),
            {},
            namespace="",
            task=self.name,
            message=MessageRef(message),
            call=call,
        )
        return self.shop.runner.request(delivery)


class Shop:
    """A database with orders, a ledger on it, and what happened.

    `new`: create the tables and an order. False: they exist.
    """

    def __init__(self, url: str, ledger: Any = None, *, new: bool = True, **options: Any) -> None:
        self.url = url
        self.engine = sa.create_engine(url)
        self.ledger = SqlLedger(ledger or url, **options)
        self.queue = NotingQueue()
        self.events: list[Event] = []
        self.runner = self.process()
        if new:
            METADATA.create_all(self.engine)
            self.ledger.create_schema()
            self.put(7, "PAID")

    def begin_again(self) -> None:
        """Delete everything but one order. Close SQLite, whose open file no child may inherit."""
        tables = (
            "taskguard_keys",
            "taskguard_work",
            "taskguard_messages",
            "taskguard_runs",
            "effects",
            "orders",
        )
        self.change(*map("delete from {}".format, tables))
        self.put(7, "PAID")
        if self.engine.name == "sqlite":
            self.close()

    def process(self) -> Runner:
        """A runner that knows of no lease but by the ledger, as one elsewhere."""
        return Runner(locks=MemoryLocks(), ledger=self.ledger, events=Events(self.events.append))

    def step(self, name: str = "ship", **options: Any) -> Step:
        """A task; options of the row and of the task by name.

        Its lease is long: what a test lets run out is not to be renewed a moment later.
        """
        names = ("once_per", "fingerprint", "max_crashes", "retention_s", "ttl_s", "atomic")
        task = {each: options.pop(each) for each in names if each in options}
        return Step(self, name, own_row(**options), **{"ttl_s": 600.0, **task})

    def put(self, order: int, status: str, fence: int | None = None) -> None:
        """The order as its owner writes it, by whatever way: it has no transaction of ours."""
        with self.engine.begin() as db:
            changed = db.execute(
                sa.update(ORDERS).where(ORDERS.c.id == order).values(status=status)
            )
            if changed.rowcount == 0:
                values = {"id": order, "status": status, "fence_token": fence}
                db.execute(sa.insert(ORDERS).values(**values))

    def change(self, *statements: str) -> None:
        """Run them in one transaction."""
        with self.engine.begin() as db:
            for statement in statements:
                db.execute(sa.text(statement))

    def expire(self) -> None:
        """Holders were paused for longer than their leases."""
        leases = "update taskguard_{} set lease_until = 1 where lease_until > 0"
        self.change(*map(leases.format, ("keys", "work")))

    def order(self, order: int = 7) -> Any:
        with self.engine.connect() as db:
            return db.execute(sa.select(ORDERS).where(ORDERS.c.id == order)).first()

    @property
    def status(self) -> str:
        return str(self.order().status)

    @property
    def effects(self) -> list[str]:
        with self.engine.connect() as db:
            return sorted(db.execute(sa.select(EFFECTS.c.item)).scalars())

    def state(self, work: str = "ship order:7") -> str | None:
        view = self.ledger.view(work)
        return None if view is None else view.state.value

    @property
    def reasons(self) -> list[str]:
        """Return the reasons of events without a body."""
        return [event.reason for event in self.events if hasattr(event, "reason")]

    def close(self) -> None:
        self.ledger.close()
        self.engine.dispose()
