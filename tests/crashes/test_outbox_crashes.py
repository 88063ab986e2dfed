"""Producers and sweeps are killed at each point: committed work runs, once.

No message is sent of a transaction that did not commit.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import orm

import taskguard
from support.databases import DATABASES
from support.exploration import Exploration
from support.killing import KillAt, was_killed
from taskguard import Guard
from taskguard.integration import Delivery, MessageRef, Sweeper, enqueue_in
from taskguard.ledger.sql import SqlLedger
from taskguard.model.policy import make_policy
from taskguard.outbox.enqueue import Duplicate

TABLES = ("taskguard_keys", "taskguard_work", "taskguard_messages", "orders", "effects")


class OutboxRig:
    """Orders, and a queue that is a file: sent messages outlive their sender."""

    def __init__(self, engine: sa.Engine, queue: Path) -> None:
        self.engine = engine
        self.ledger = SqlLedger(self.engine)
        self.runtime = taskguard.connect(locks="memory://", ledger=self.ledger)
        self.queue = queue
        self.policy = make_policy({}, task="ship", busy="raise")

    def delivery(self, order: str, message: MessageRef, call: str | None = None) -> Delivery:
        work = f"ship {order}"
        return Delivery(
            keys=(order,), work=work, task="ship", message=message, policy=self.policy, call=call
        )

    def order(self, order: str, words: str | None = None) -> None:
        """Store the order and its message in one transaction. `words` replace those that wait."""
        words = words or order
        call = json.dumps({"queue": "test", "order": order, "words": words, "message": f"m{words}"})
        delivery = self.delivery(order, MessageRef(f"m{words}"), call)
        duplicate: Duplicate = "answer" if words == order else "replace"
        with orm.Session(self.engine) as session, session.begin():
            session.execute(sa.text("insert into orders values (:name)"), {"name": words})
            enqueue_in(session, self.runtime, delivery, self.send, duplicate=duplicate)

    def send(self, call: dict[str, Any], message: MessageRef) -> None:
        sent = [call["order"], call["words"], message.id, message.retries, message.deferrals]
        with self.queue.open("a") as file:
            file.write(json.dumps(sent))
            file.write("\n")

    def sweep(self) -> None:
        """Sweep after every lease has expired and everything is due."""
        leases = "update taskguard_{} set lease_until = 1 where lease_until > 0"
        self.change(
            "update taskguard_work set due = 1 where due is not null",
            *map(leases.format, ("work", "keys")),
        )
        Sweeper(self.runtime, {"test": self.send}, batch=2).sweep()

    def work_off(self) -> None:
        """Run every message that was sent, as a worker."""
        for line in self.queue.read_text().splitlines():
            order, words, *message = json.loads(line)
            delivery = self.delivery(order, MessageRef(*message))
            self.runtime.runner.deliver(delivery, partial(_ship, words))

    def rows(self, table: str) -> Counter[str]:
        with self.engine.connect() as db:
            return Counter(db.execute(sa.text(f"select name from {table}")).scalars())

    def change(self, *statements: str) -> None:
        with self.engine.begin() as db:
            for statement in statements:
                db.execute(sa.text(statement))

    def begin_again(self) -> None:
        self.change(*map("delete from {}".format, TABLES))
        self.queue.write_text("")

    def close(self) -> None:
        self.runtime.close()
        self.engine.dispose()


def _ship(words: str, guard: Guard) -> None:
    with guard.transaction() as db:
        db.execute(sa.text("insert into effects values (:name)"), {"name": words})


@pytest.fixture(params=DATABASES)
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


@pytest.fixture
def rig(url: str, tmp_path: Path) -> Any:
    made = OutboxRig(sa.create_engine(url), tmp_path / "queue")
    made.ledger.create_schema()
    made.change(*map("create table {} (name varchar(20))".format, ("orders", "effects")))
    yield made
    made.close()


def _killed_at(rig: OutboxRig, at: int, what: str, *args: Any) -> bool:
    """Return whether a process that runs it was killed at this point."""
    if rig.engine.name == "sqlite":
        rig.engine.dispose()  # a child must not inherit an open file of SQLite's

    def run() -> None:
        rig.engine.dispose(close=False)  # the connections are the parent's
        mine = OutboxRig(rig.engine, rig.queue)
        kill = KillAt(mine.engine, at)
        mine.send = kill.around(mine.send)  # type: ignore[method-assign]
        getattr(mine, what)(*args)

    return was_killed(run)


def test_a_producer_that_is_killed_loses_no_order(rig: OutboxRig) -> None:
    """A producer is killed around each statement, its COMMIT and its message. Either the order
    exists and is shipped once, or it does not exist and no message does."""
    at, sent = 0, Counter[str]()
    while True:
        at += 1
        rig.begin_again()
        killed = _killed_at(rig, at, "order", "a")
        orders = rig.rows("orders")
        sent[f"{orders['a']} orders, {len(rig.queue.read_text().splitlines())} messages"] += 1
        rig.sweep()
        rig.work_off()
        assert rig.rows("effects") == orders, at
        if not killed:
            break
    assert set(sent) == {"0 orders, 0 messages", "1 orders, 0 messages", "1 orders, 1 messages"}
    print(f"{at - 1} kills: {dict(sent)}")


@pytest.mark.parametrize("sent", ["sent", "lost"])
def test_a_producer_that_is_killed_replaces_all_of_a_call_or_nothing(
    rig: OutboxRig, sent: str
) -> None:
    """A producer is killed around each statement, its COMMIT and its message. One of the two
    messages runs, once.

    It is the newer one if its order exists, whether or not either message arrived.
    """
    at, seen = 0, Counter[str]()
    while True:
        at += 1
        rig.begin_again()
        rig.order("a")
        if sent == "lost":
            rig.queue.write_text("")
        killed = _killed_at(rig, at, "order", "a", "newer")
        newest = "newer" if rig.rows("orders")["newer"] else "a"
        seen[newest] += 1
        rig.work_off()  # the older message arrives before the sweep sends any
        rig.sweep()
        rig.work_off()
        assert rig.rows("effects") == Counter({newest: 1}), at
        if not killed:
            break
    assert set(seen) == {"a", "newer"}
    print(f"{at - 1} kills: {dict(seen)}")


def test_a_sweep_that_is_killed_loses_no_order(rig: OutboxRig, exploration: Exploration) -> None:
    """A sweep is killed around each statement and each message. The next sweep goes on, and no
    order is lost.

    PostgreSQL runs at all points, the others at those within this run's limit.
    """
    wanted = Counter("abc")
    kills = 0
    for at in exploration.numbers(step=1 if rig.engine.name == "postgresql" else 7):
        rig.begin_again()
        for order in wanted:
            rig.order(order)
        rig.queue.write_text("")  # the broker has lost all messages
        killed = _killed_at(rig, at, "sweep")
        rig.sweep()
        rig.work_off()
        rig.work_off()
        assert rig.rows("effects") == wanted, at
        if not killed:
            break
        kills += 1
    assert at > 20
    print(f"{kills} kills")
