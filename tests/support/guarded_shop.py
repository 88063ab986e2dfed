"""Guarded plain functions on a ledger, their effects and states in reach."""

from __future__ import annotations

import math
from typing import Any

import sqlalchemy as sa

import taskguard
from taskguard.errors import ConfigurationError
from taskguard.events import Event, log_event
from taskguard.ledger.sql import SqlLedger
from taskguard.model.delivery import Delivery, MessageRef
from taskguard.model.policy import Policy
from taskguard.run.guard import Guard

__all__ = ["GuardedShop", "NotingQueue", "write"]


class GuardedShop:
    """A database with a table of effects, and `taskguard.connect()` on it, without a lock server.

    `ledger` is what the ledger is made of, if not of the URL: an Engine, or the URL of a proxy.
    `locks` is its lock server. `events` is what happened.
    """

    def __init__(self, url: str, ledger: Any = None, *, locks: Any = None) -> None:
        self.engine = sa.create_engine(url)
        self.ledger = SqlLedger(ledger or url)
        self.ledger.create_schema()
        with self.engine.begin() as db:
            # No unique index: a double effect has to be seen.
            db.execute(sa.text("create table if not exists effects (item text)"))
        self.events: list[Event] = []
        listeners = (log_event, self.events.append)
        self.tg = taskguard.connect(locks=locks, ledger=self.ledger, listeners=listeners)

    def deliver(
        self,
        body: Any,
        queue: NotingQueue | None = None,
        *,
        deferrals: int = 0,
        orders: tuple[type[Exception], ...] = (),
    ) -> Any:
        """One delivery of the message "m" about order:1, by a queue that notes deferrals."""
        return self.tg.runner.deliver(
            Delivery(
                keys=("order:1",),
                work="ship order:1",
                task="ship",
                message=MessageRef("m", 0, deferrals),
                policy=Policy(),
                queue=queue or NotingQueue(),
                orders=orders,
            ),
            body,
        )

    def refuses(self, on: Any, match: str) -> None:
        """Deliver a body whose `guard.transaction(on)` has to be refused before its block."""
        import pytest  # a process that has little of a processor imports this module

        def body(guard: Guard) -> None:
            with guard.transaction(on):
                raise AssertionError("unreachable")

        with pytest.raises(ConfigurationError, match=match):
            self.deliver(body)

    @property
    def effects(self) -> list[str]:
        return self._column("select item from effects")

    @property
    def states(self) -> list[str]:
        return self._column("select state from taskguard_work")

    @property
    def happened(self) -> list[str]:
        """The names of the events."""
        return [event.name for event in self.events]

    def _column(self, select: str) -> list[str]:
        with self.engine.connect() as db:
            return sorted(db.execute(sa.text(select)).scalars())

    def close(self) -> None:
        self.tg.close()
        self.engine.dispose()


class NotingQueue:
    """Takes every message that is put off and notes its number of deferrals."""

    max_delay_s = 30.0
    new_message_per_deferral = True
    longest_wait_s = math.inf

    def __init__(self) -> None:
        self.deferrals: list[int] = []

    def retries_in_s(self, error: BaseException) -> float | None:
        return 0.0

    def publish_again(self, deferrals: int, delay_s: float) -> None:
        del delay_s
        self.deferrals.append(deferrals)


def write(db: Any, item: str = "x") -> None:
    """An effect."""
    db.execute(sa.text("insert into effects values (:item)"), {"item": item})
