"""`limit=` and `rate=` with real workers: how many are at work, and how often one begins."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import sqlalchemy as sa

from support.waiting import patience_s, wait_until
from taskguard.ledger.tables import WORK


def most_at_work(shop: Any, name: str) -> int:
    """The most bodies of a key that were at work at once."""
    moments = [
        (step.at_s, what)
        for what, named in ((1, "began"), (-1, "ended"))
        for step in shop.steps(named)
        if step.item.split()[0] == name
    ]
    inside = most = 0
    for _, what in sorted(moments):
        inside += what
        most = max(most, inside)
    return most


def numbers_of(shop: Any, name: str) -> list[int]:
    """In which order bodies of a key began."""
    items = [step.item.split() for step in shop.steps("began")]
    return [int(number) for key, number in items if key == name]


def starts_us(shop: Any, name: str) -> list[int]:
    """When the works of a key were claimed, by the ledger's clock."""
    with shop.engine.connect() as db:
        select = sa.select(WORK.c.started).where(WORK.c.key == f"queue:{name}")
        return sorted(db.execute(select).scalars())


def is_quiet(shop: Any) -> bool:
    with shop.engine.connect() as db:
        return db.execute(sa.select(WORK.c.id).where(WORK.c.parked.is_not(None))).first() is None


def test_two_at_a_time(shop: Any) -> None:
    """With `limit=2`, two bodies of a key are at work, and never more. Each message runs once, and
    a line keeps its order."""
    tasks = shop.tasks
    results = [
        task.delay(name, number, tasks.UNTIL_GO if number < 2 else 0.1)
        for number in range(20)
        for name, task in (("line", tasks.queue_up_by_two), ("put-off", tasks.by_two))
    ]

    def both_are_full() -> bool:
        at_work = [{*numbers_of(shop, name)} >= {0, 1} for name in ("line", "put-off")]
        return all(at_work) and len(shop.ledger.waiting()) + len(numbers_of(shop, "line")) == 20

    with shop.worker(concurrency=3), shop.worker(concurrency=3):
        wait_until(both_are_full, message="two of each at work, and the others in line")
        shop.let_go()
        assert [each.get(timeout=patience_s()) for each in results] == [
            n for n in range(20) for _ in "ab"
        ]
    assert set(shop.effects().values()) == {1}
    for name in ("line", "put-off"):
        assert most_at_work(shop, name) == 2
    numbers = numbers_of(shop, "line")
    # Neighbours may change places, and a child that pauses lets many go before what it has in hand.
    late = [number for place, number in enumerate(numbers) if abs(place - number) > 6]
    assert len(late) <= 3, numbers
    assert is_quiet(shop)


@pytest.mark.once
@pytest.mark.parametrize("kind", ["queue_up_at_times", "at_times"])
def test_five_in_a_second(shop: Any, kind: str) -> None:
    """With `rate="5/s"`, two starts are at least 0.2 s apart, whether messages wait in line or are
    deferred."""
    with shop.worker(concurrency=4):
        task = getattr(shop.tasks, kind)
        results = [task.delay("a", number, 0.05) for number in range(10)]
        assert [each.get(timeout=patience_s()) for each in results] == list(range(10))
    starts = starts_us(shop, "a")
    assert min(later - one for one, later in pairwise(starts)) >= 200_000
    assert set(shop.effects().values()) == {1}
    wait_until(lambda: is_quiet(shop))
