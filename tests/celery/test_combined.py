"""Options that go together, with real workers: `latest` with a rate, a strict line with a rate."""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
import sqlalchemy as sa
from celery.exceptions import TaskRevokedError

from support.waiting import patience_s
from taskguard.ledger.tables import WORK
from taskguard_celery import enqueue

pytestmark = pytest.mark.once


def starts_us(shop: Any) -> list[int]:
    """When work was claimed last, by the ledger's clock."""
    with shop.engine.connect() as db:
        began = sa.select(WORK.c.started).where(WORK.c.key == "queue:a", WORK.c.attempts > 0)
        return sorted(db.execute(began).scalars())


@pytest.mark.parametrize("task", ["latest_at_times", "supersede_at_times"])
def test_the_latest_at_a_rate(shop: Any, task: str) -> None:
    """Some run, two in a second, and the last of them; every other caller hears that it never
    does."""
    with shop.worker(concurrency=4):
        results = []
        for number in range(30):
            results.append(getattr(shop.tasks, task).delay("a", number))
            time.sleep(0.1)
        for each in results:
            with suppress(TaskRevokedError):
                each.get(timeout=patience_s())
        shop.wait_for_quiet()
    ran = [number for number, each in enumerate(results) if each.state == "SUCCESS"]
    assert {each.state for each in results} == {"SUCCESS", "REVOKED"}
    assert ran[-1] == 29
    assert dict(shop.effects()) == {f"a {number}": 1 for number in ran}
    assert min(later - one for one, later in pairwise(starts_us(shop))) >= 500_000


def test_a_strict_line_at_a_rate(shop: Any) -> None:
    """In the order in which they were enqueued, five in a second; a retry keeps its position."""
    with shop.worker(concurrency=4):
        results = [
            enqueue(shop.tasks.strictly_at_times, ("a", number, number == 4)).result
            for number in range(12)
        ]
        assert [each.get(timeout=patience_s()) for each in results] == list(range(12))
    began = [int(step.item.split()[1]) for step in shop.steps("began")]
    assert began == [0, 1, 2, 3, 4, *range(4, 12)]
    assert min(later - one for one, later in pairwise(starts_us(shop))) >= 200_000
    assert set(shop.effects().values()) == {1}
