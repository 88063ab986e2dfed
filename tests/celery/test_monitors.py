"""Celery's events that Flower and other monitors get for messages that wait for their key."""

from __future__ import annotations

from collections import Counter
from typing import Any

import taskguard
from support.ear import Ear
from support.waiting import patience_s, wait_until


def test_a_deferral_is_one_more_reception_and_start_of_the_same_task(make_shop: Any) -> None:
    """Monitors see a deferral as another reception and start of one task, without a retry or a
    failure."""
    shop = make_shop(SHOP_SETTINGS='{"worker_send_task_events": true}')
    locks, ledger = shop.environment["SHOP_LOCKS"], shop.environment["SHOP_DATABASE"]
    other = taskguard.connect(locks=locks, ledger=ledger)
    with shop.worker() as worker, Ear(shop.tasks.app) as ear:
        with other.lock("order:7"):
            message = shop.tasks.ship.apply_async([7])
            wait_until(lambda: worker.text().count("deferred") >= 2, message="put off twice")
        shop.wait_for_effects(1)
        wait_until(lambda: "task-succeeded" in ear.of(message.id), message="succeeded")
    other.close()
    kinds = Counter(ear.of(message.id))
    deferrals = worker.text().count("deferred")
    assert deferrals >= 2
    assert kinds == {
        "task-received": deferrals + 1,
        "task-started": deferrals + 1,
        "task-succeeded": 1,
    }
    assert {event["uuid"] for event in ear.heard if "uuid" in event} == {message.id}


def test_while_it_is_parked_it_has_begun_and_not_ended(make_shop: Any) -> None:
    """A message that waits in the ledger sends neither an end nor a retry. Afterwards it sends one
    success."""
    shop = make_shop(SHOP_SETTINGS='{"worker_send_task_events": true}')
    task = shop.tasks.queue_up
    with shop.worker(), Ear(shop.tasks.app) as ear:
        first = task.delay("a", 0, shop.tasks.UNTIL_GO)
        shop.wait_for_steps("began")
        parked = task.delay("a", 1)
        wait_until(lambda: len(shop.ledger.waiting()) == 1, message="it waits")
        wait_until(lambda: "task-started" in ear.of(parked.id), message="started")
        assert ear.of(parked.id) == ["task-received", "task-started"]
        shop.let_go()
        assert [each.get(timeout=patience_s()) for each in (first, parked)] == [0, 1]
        wait_until(lambda: "task-succeeded" in ear.of(parked.id), message="succeeded")
    kinds = Counter(ear.of(parked.id))
    assert kinds == {"task-received": 2, "task-started": 2, "task-succeeded": 1}
