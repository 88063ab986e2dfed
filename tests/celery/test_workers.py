"""Real Celery workers on real servers, with messages delivered again and workers killed."""

from __future__ import annotations

import os
import signal
import uuid
from collections import Counter
from typing import Any

from celery import chain, chord

from support.waiting import wait_until


def test_the_same_message_fifty_times_runs_one_body(shop: Any) -> None:
    """All answered, one effect."""
    task_id = str(uuid.uuid4())
    shop.publish_raw(shop.tasks.ship, [42, 0.5], times=50, task_id=task_id)
    with shop.worker(concurrency=4) as worker:
        shop.wait_for_effects(1)
        wait_until(
            lambda: worker.text().count("succeeded") + worker.text().count("ignored") >= 50,
            timeout_s=60,
            message="all fifty handled",
        )
    assert shop.effects() == Counter({"42": 1})
    assert len(shop.steps("began")) == 1


def test_many_orders_many_times_each_ships_once_and_everybody_is_answered(shop: Any) -> None:
    """Different messages for one key: the later ones get the stored result."""
    results = [shop.tasks.ship.delay(order) for order in range(10) for _ in range(3)]
    with shop.worker():
        answers = [result.get(timeout=60) for result in results]
    assert answers == [{"order": order} for order in range(10) for _ in range(3)]
    assert shop.effects() == Counter({str(order): 1 for order in range(10)})


def test_a_killed_pool_child_is_replaced_and_its_work_done_again(shop: Any) -> None:
    """SIGKILL in the body: the message comes back, waits for the lease, and is done once."""
    shop.tasks.ship.delay(7, 30)
    with shop.worker() as worker:
        shop.wait_for_steps("began")
        (_, pid) = shop.steps("began")[0]
        shop.tasks.ship.delay(7, 0)
        os.kill(pid, signal.SIGKILL)
        # The redelivered message sleeps in its body again; the other one may win as well.
        shop.wait_for_effects(1, timeout_s=90)
        assert worker.process.poll() is None
    assert shop.effects() == Counter({"7": 1})


def test_a_paused_child_is_refused_and_its_message_answered(shop: Any) -> None:
    """SIGSTOP beyond the lease, SIGCONT: one effect, one stale commit refused, no failure."""
    task_id = str(uuid.uuid4())
    result = shop.tasks.hold.apply_async([5, 1.0], task_id=task_id)
    with shop.worker() as worker:
        shop.wait_for_steps("wrote")
        (_, pid) = shop.steps("wrote")[0]
        os.kill(pid, signal.SIGSTOP)
        other = shop.tasks.hold.delay(5, 0)
        other.get(timeout=60)
        os.kill(pid, signal.SIGCONT)
        wait_until(
            lambda: "stale commit refused" in worker.text(), timeout_s=60, message="the refusal"
        )
        result.get(timeout=60)
        assert "raised unexpected" not in worker.text()
    assert shop.effects() == Counter({"5": 1})


def test_a_redelivery_during_the_body_does_not_run_twice_nor_get_lost(make_shop: Any) -> None:
    """Visibility timeout 2 s, body 5 s: redelivered meanwhile; then the original is killed."""
    shop = make_shop(SHOP_VISIBILITY_S="2")
    shop.tasks.ship.apply_async([9, 5.0])
    with shop.worker() as first:
        shop.wait_for_steps("began")
        with shop.worker() as second:
            wait_until(
                lambda: "deferred" in first.text() + second.text(),
                timeout_s=60,
                message="the redelivery is put off",
            )
            first.kill()
            shop.wait_for_effects(1, timeout_s=90)
    assert shop.effects() == Counter({"9": 1})


def test_a_task_that_kills_its_worker_is_dead_after_max_crashes(shop: Any) -> None:
    """And the queue goes on."""
    shop.tasks.die.delay(13)
    with shop.worker() as worker:
        wait_until(lambda: "is DEAD" in worker.text(), timeout_s=90, message="DEAD")
        assert shop.tasks.ship.delay(1).get(timeout=60) == {"order": 1}
    assert len(shop.steps("began")) <= 2 + 1


def test_a_warm_shutdown_finishes_and_a_cold_one_gives_back(shop: Any) -> None:
    """After SIGQUIT the work is done by another worker without waiting for the lease."""
    shop.tasks.ship.delay(3, 20)
    with shop.worker() as worker:
        shop.wait_for_steps("began")
        worker.signal(signal.SIGQUIT)
        worker.wait()
    view = shop.ledger.view("shop.ship order:3")
    assert view is not None
    assert view.state in ("NEW", "PROCESSING")
    shop.tasks.ship.delay(3, 0)
    with shop.worker():
        shop.wait_for_effects(1, timeout_s=90)
    assert shop.effects() == Counter({"3": 1})


def test_chain_and_chord_go_on_over_duplicates(shop: Any) -> None:
    """A duplicate of DONE returns the stored result, so that the next step gets it."""
    tasks = shop.tasks
    with shop.worker():
        result = chain(tasks.add.s(1, 2), tasks.add.s(4), tasks.add.s(5)).apply_async()
        assert result.get(timeout=60) == 12
        header = [tasks.add.s(100 + number, number) for number in range(5)]
        assert chord(header)(tasks.total.s()).get(timeout=60) == sum(
            100 + 2 * number for number in range(5)
        )
        task_id = str(uuid.uuid4())
        first = tasks.add.apply_async((50, 1), task_id=task_id)
        assert first.get(timeout=60) == 51
        again = tasks.add.apply_async((50, 1), task_id=task_id)
        wait_until(lambda: again.get(timeout=60) == 51, timeout_s=60, message="the same answer")
    assert [item for item, _ in shop.steps("added")].count("50") == 1


def test_the_tasks_own_retries_still_work(shop: Any) -> None:
    """self.retry with bind=True, and autoretry_for."""
    with shop.worker():
        assert shop.tasks.flaky.delay(21).get(timeout=60) == 2
        assert shop.tasks.auto.delay(22).get(timeout=60) == 2
    assert shop.effects() == Counter({"21": 1, "22": 1})
