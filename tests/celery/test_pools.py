"""Pools of threads and greenlets, and none at all: what prefork does, they do."""

from __future__ import annotations

import signal
import uuid
from collections import Counter
from typing import Any

import pytest

from support.waiting import patience_s, wait_until

POOLS = ["threads", "gevent", "solo"]


@pytest.mark.parametrize("pool", POOLS)
def test_duplicates_give_one_effect(shop: Any, pool: str) -> None:
    """Ten messages of one order run one body in each pool."""
    task_id = str(uuid.uuid4())
    shop.publish_raw(shop.tasks.ship, [42, 0.5], times=9, task_id=task_id)
    other = shop.tasks.ship.delay(42)
    with shop.worker(pool=pool, concurrency=5) as worker:
        assert other.get(timeout=patience_s()) == {"order": 42}
        wait_until(lambda: worker.handled() >= 10, message="all handled")
        shop.wait_for_quiet()
    assert shop.effects() == Counter({"42": 1})
    assert len(shop.steps("began")) == 1


@pytest.mark.usefixtures("short_leases")
def test_a_paused_worker_is_refused_and_its_message_answered(shop: Any) -> None:
    """A worker is paused beyond its lease, and another one does the work. The late commit is
    refused."""
    first = shop.tasks.hold.delay(5, shop.tasks.UNTIL_GO)
    # One message at a time: a worker that asks for more may be given one while it is paused.
    with shop.worker(pool="gevent", concurrency=1) as paused:
        shop.wait_for_steps("wrote")
        paused.signal(signal.SIGSTOP)
        second = shop.tasks.hold.delay(5, 0)
        with shop.worker(pool="gevent") as worker:
            second.get(timeout=patience_s())
            assert "takes over order:5" in worker.text()
        shop.let_go()
        paused.signal(signal.SIGCONT)
        wait_until(lambda: "stale commit refused" in paused.text(), message="the refusal")
        first.get(timeout=patience_s())
        assert "raised unexpected" not in paused.text()
    assert shop.effects() == Counter({"5": 1})


@pytest.mark.usefixtures("short_leases")
@pytest.mark.once
def test_a_killed_workers_messages_are_done_by_another(make_shop: Any) -> None:
    """Several bodies die with their process. After the visibility timeout another worker does
    them."""
    shop = make_shop(SHOP_VISIBILITY_S="2")
    results = [shop.tasks.ship.delay(order, 60) for order in range(3)]
    with shop.worker(pool="threads", concurrency=3) as killed:
        began = shop.wait_for_steps("began", 3)
        assert {step.pid for step in began} == {killed.pid}
        killed.kill()
    with shop.worker(pool="threads", concurrency=3):
        assert [result.get(timeout=patience_s())["order"] for result in results] == [0, 1, 2]
    assert shop.effects() == Counter({"0": 1, "1": 1, "2": 1})


def test_a_greenlet_that_never_yields_keeps_its_lease(make_shop: Any) -> None:
    """The watchdog is a native thread, so it renews while a greenlet does not yield."""
    shop = make_shop(SHOP_TTL_S="6")
    # One message at a time: a worker that asks for more may be given one and not see it.
    with (
        shop.worker(pool="gevent", concurrency=1) as worker,
        shop.worker(pool="threads", queue="other") as other,
    ):
        spinning = shop.tasks.spin.delay(6, 9.0)
        shop.wait_for_steps("began")
        shop.tasks.spin.apply_async((6, 0.0), queue="other")
        wait_until(lambda: "deferred" in other.text(), message="put off")
        spinning.get(timeout=patience_s())
        wait_until(lambda: "answered as a duplicate" in other.text())
        shop.wait_for_quiet()
        assert "lost after" not in worker.text()
    assert shop.effects() == Counter({"6": 1})
    assert shop.work("shop.spin", 6).attempts == 1
