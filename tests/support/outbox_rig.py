"""Killed producers and sweeps: orders, their messages, and a queue that is a file."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import orm

import taskguard
from support.killing import KillAt, was_killed
from taskguard import Guard
from taskguard.integration import Delivery, MessageRef, Sweeper, enqueue_in
from taskguard.ledger.sql import SqlLedger
from taskguard.model.policy import make_policy
from taskguard.outbox.enqueue import Duplicate

__all__ = ["OutboxRig", "killed_at"]

TABLES = (
    "taskguard_keys",
    "taskguard_work",
    "taskguard_messages",
    "taskguard_runs",
    "orders",
    "effects",
)


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

    def be_killed(self, kill: KillAt) -> None:
        """Count the sending of a message among the boundaries, too."""
        self.send = kill.around(self.send)  # type: ignore[method-assign]

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


def killed_at(rig: OutboxRig, at: int, what: str, *args: Any, statements: bool = True) -> bool:
    """Return whether a process that runs it was killed at this point.

    `statements`: False counts only points around COMMITs and messages.
    """
    if rig.engine.name == "sqlite":
        rig.engine.dispose()  # a child must not inherit an open file of SQLite's

    def run() -> None:
        rig.engine.dispose(close=False)  # the connections are the parent's
        mine = type(rig)(rig.engine, rig.queue)
        mine.be_killed(KillAt(mine.engine, at, statements=statements))
        getattr(mine, what)(*args)

    return was_killed(run)
