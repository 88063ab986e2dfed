"""`order="strict"` with real workers: no message goes before one that waits for its retry."""

from __future__ import annotations

import json
from typing import Any

import pytest
import sqlalchemy as sa

from support.waiting import patience_s, wait_until
from taskguard.ledger.tables import WORK
from taskguard.model.states import State
from taskguard_celery import enqueue


def began(shop: Any) -> list[int]:
    """Return the numbers of the bodies in the order in which they began. Consecutive attempts count
    once."""
    numbers = [int(step.item.split()[1]) for step in shop.steps("began")]
    return [n for at, n in enumerate(numbers) if at == 0 or numbers[at - 1] != n]


def attempts(shop: Any, number: int) -> int:
    return sum(step.item.split()[1] == str(number) for step in shop.steps("began"))


def waits(shop: Any) -> int:
    return len(shop.ledger.waiting())


def heads(shop: Any) -> list[Any]:
    """Return the FAILED work that keeps its position."""
    with shop.engine.connect() as db:
        failed = WORK.c.parked.is_not(None), WORK.c.state == "FAILED"
        return list(db.execute(sa.select(WORK).where(*failed)))


def places(shop: Any) -> list[str]:
    """Return the work that still has a position."""
    with shop.engine.connect() as db:
        select = sa.select(WORK.c.id).where(WORK.c.parked.is_not(None))
        return list(db.execute(select).scalars())


def send_behind(shop: Any, hows: dict[int, str], count: int = 9) -> list[Any]:
    """The first is at work until it may go on, and the others are parked."""
    first = shop.tasks.strictly.delay("a", 0, hows.get(0, ""))
    shop.wait_for_steps("began")
    later = [shop.tasks.strictly.delay("a", n, hows.get(n, "")) for n in range(1, count)]
    wait_until(lambda: waits(shop) == count - 1)
    return [first, *later]


def test_retries_keep_their_place(shop: Any) -> None:
    """Messages keep their order with autoretry_for, with self.retry(), and if one has no retries
    left."""
    keep_their_place(shop)


def test_they_keep_it_on_a_quorum_queue(quorum_shop: Any) -> None:
    """On a quorum queue, where RabbitMQ delays a retry, messages keep their order, too."""
    keep_their_place(quorum_shop)


def keep_their_place(shop: Any) -> None:
    """Run nine messages of a line, four of which fail, one of them for good."""
    with shop.worker(concurrency=3):
        results = send_behind(shop, {0: "fails twice", 3: "retries", 5: "fails", 7: "fails twice"})
        shop.let_go()
        for number, result in enumerate(results):
            if number == 5:
                with pytest.raises(ValueError, match="a 5"):
                    result.get(timeout=patience_s())
            else:
                assert result.get(timeout=patience_s()) == number
    assert began(shop) == list(range(9))
    assert [attempts(shop, number) for number in (0, 3, 5, 7)] == [3, 2, 3, 3]
    assert set(shop.effects().values()) == {1}
    assert len(shop.effects()) == 8
    assert places(shop) == []


@pytest.mark.once
def test_a_retry_that_the_broker_has_lost(shop: Any) -> None:
    """A relay sends a lost retry again when it is overdue. Later messages wait for it."""
    with shop.worker(concurrency=2) as killed:
        results = send_behind(shop, {0: "retries late"}, count=3)
        shop.let_go()
        wait_until(lambda: [each.retries for each in heads(shop)] == [1])
        killed.kill()
    with shop.broker() as broker:
        broker.flushdb()
    with shop.worker(concurrency=2):
        assert [each.get(timeout=patience_s()) for each in results] == [0, 1, 2]
    assert began(shop) == [0, 1, 2]


@pytest.mark.once
def test_one_that_was_revoked_while_it_waits_for_its_retry(shop: Any) -> None:
    """A message that is revoked while it waits for its retry leaves its position, and the next ones
    run."""
    with shop.worker(concurrency=2):
        results = send_behind(shop, {0: "retries late"}, count=3)
        shop.let_go()
        wait_until(lambda: [each.retries for each in heads(shop)] == [1])
        shop.revoke(results[0])
        assert [each.get(timeout=patience_s()) for each in results[1:]] == [1, 2]
        wait_until(lambda: results[0].state == "REVOKED")
    assert began(shop) == [0, 1, 2]
    assert places(shop) == []


@pytest.mark.once
def test_enqueued_in_order(shop: Any) -> None:
    """`enqueue()` gives each message a position before it is sent, so idle workers take them in
    order."""
    with shop.worker(concurrency=3), shop.worker(concurrency=3):
        shop.let_go()
        results = [
            enqueue(shop.tasks.strictly, ("a", number, "retries" if number == 4 else "")).result
            for number in range(20)
        ]
        assert [each.get(timeout=patience_s()) for each in results] == list(range(20))
    assert began(shop) == list(range(20))
    assert set(shop.effects().values()) == {1}
    assert places(shop) == []


@pytest.mark.once
def test_what_was_enqueued_and_the_broker_has_lost(shop: Any) -> None:
    """A relay sends lost enqueued messages within seconds, in their order."""
    shop.let_go()
    lost = [enqueue(shop.tasks.strictly, ("a", number)).result for number in range(3)]
    with shop.broker() as broker:
        broker.flushdb()
    with shop.worker(concurrency=2):
        later = shop.tasks.strictly.delay("a", 3)
        assert [each.get(timeout=patience_s()) for each in (*lost, later)] == list(range(4))
    assert began(shop) == list(range(4))
    assert set(shop.effects().values()) == {1}
    assert places(shop) == []


@pytest.mark.once
@pytest.mark.parametrize(("of", "before_s"), [("message", "0"), ("worker", "1")])
def test_a_head_over_its_hard_time_limit(make_shop: Any, of: str, before_s: str) -> None:
    """Each run over the hard time limit counts as a crash. In the end the work is DEAD, and the
    next ones go on.

    That holds even if handlers of task_prerun take a large part of its time.
    """
    shop = make_shop(SHOP_SETTINGS=json.dumps({"task_time_limit": 3} if of == "worker" else {}))
    options = {"time_limit": 3} if of == "message" else {}
    shop.let_go()
    with shop.worker({"SHOP_PRERUN_S": before_s}, concurrency=2) as worker:
        head = shop.tasks.strictly.apply_async(("a", 0, "hangs"), **options)
        shop.wait_for_steps("began")
        behind = shop.tasks.strictly.delay("a", 1)
        assert behind.get(timeout=patience_s()) == 1
        assert "the hard time limit was over" in worker.text()
    assert attempts(shop, 0) == 3
    [dead] = shop.ledger.list_work(State.DEAD)
    assert head.id in dead.id
    assert dead.crashes == 3
    assert places(shop) == []


@pytest.mark.once
def test_a_retry_for_another_key(shop: Any) -> None:
    """A retry for another key leaves its line at once, and waits in the new line by its send
    time."""
    with shop.worker(concurrency=2):
        results = send_behind(shop, {0: "moves"}, count=3)
        shop.let_go()
        assert [each.get(timeout=patience_s()) for each in results[1:]] == [1, 2]
        other = shop.tasks.strictly.delay("b", 3)
        assert results[0].get(timeout=patience_s()) == 0
        assert other.get(timeout=patience_s()) == 3
    assert [step.item for step in shop.steps("began")] == ["a 0", "a 1", "a 2", "b 0", "b 3"]
    assert set(shop.effects().values()) == {1}
    assert places(shop) == []
