"""Producers and sweeps are killed at each point: committed work runs, once.

No message is sent of a transaction that did not commit.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from support.databases import DATABASES
from support.exploration import Exploration
from support.outbox_rig import OutboxRig, killed_at


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


def test_a_producer_that_is_killed_loses_no_order(rig: OutboxRig) -> None:
    """A producer is killed around each statement, its COMMIT and its message. Either the order
    exists and is shipped once, or it does not exist and no message does."""
    at, sent = 0, Counter[str]()
    while True:
        at += 1
        rig.begin_again()
        killed = killed_at(rig, at, "order", "a")
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
        killed = killed_at(rig, at, "order", "a", "newer")
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
        killed = killed_at(rig, at, "sweep")
        rig.sweep()
        rig.work_off()
        rig.work_off()
        assert rig.rows("effects") == wanted, at
        if not killed:
            break
        kills += 1
    assert at > 20
    print(f"{kills} kills")
