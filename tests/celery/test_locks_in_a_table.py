"""Celery workers that have no Redis for locks: those are in the ledger's database."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from support.celery_shop import Shop
from support.waiting import patience_s, wait_until
from taskguard.lock_table import TableLocks


@pytest.fixture
def beside(make_shop: Callable[..., Shop]) -> Shop:
    shop = make_shop(SHOP_LOCKS="ledger://")
    TableLocks.beside(shop.ledger).create_table(unlogged=True)
    return shop


def locks_left(shop: Any) -> list[str]:
    """But for what a worker leaves when it starts, and its relay's lease."""
    others = "'the ledger', 'leader:taskguard-relay:celery'"
    with shop.engine.connect() as db:
        left = f"select key from taskguard_locks where owner <> '' and key not in ({others})"
        return list(db.execute(sa.text(left)).scalars())


def test_the_same_message_thirty_times_runs_one_body(beside: Any) -> None:
    """Thirty deliveries of a message have one effect, and leave no lock."""
    task_id = str(uuid.uuid4())
    beside.publish_raw(beside.tasks.ship, [42, 0.5], times=30, task_id=task_id)
    others = [beside.tasks.ship.delay(order) for order in range(5)]
    with beside.worker(concurrency=4) as worker:
        beside.wait_for_effects(6)
        assert [each.get(timeout=patience_s()) for each in others] == [
            {"order": n} for n in range(5)
        ]
        wait_until(lambda: worker.handled() >= 35, message="all handled")
        beside.wait_for_quiet()
    assert beside.effects() == Counter({"42": 1, **{str(order): 1 for order in range(5)}})
    assert len(beside.steps("began")) == 6
    assert locks_left(beside) == []
    assert "lock_unavailable" not in beside.logs()
    assert "no answer" not in beside.logs()


def test_a_worker_whose_table_is_missing_says_so_and_works(make_shop: Any) -> None:
    """If the table is missing, a worker says so at its start and at each lock, and the ledger
    decides."""
    shop = make_shop(SHOP_LOCKS="ledger://")
    with shop.worker():
        assert shop.tasks.ship.delay(1).get(timeout=patience_s()) == {"order": 1}
    assert shop.logs().count("taskguard locks create") >= 2
