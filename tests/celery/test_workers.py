"""Prefork workers: messages delivered again, retries, shutdown, revoke."""

from __future__ import annotations

import signal
import uuid
from collections import Counter
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from support.waiting import patience_s, wait_until


def test_the_same_message_fifty_times_runs_one_body(shop: Any) -> None:
    """Fifty deliveries of a message run one body, and leave no message."""
    task_id = str(uuid.uuid4())
    shop.publish_raw(shop.tasks.ship, [42, 0.5], times=50, task_id=task_id)
    with shop.worker(concurrency=4) as worker:
        shop.wait_for_effects(1)
        wait_until(lambda: worker.handled() >= 50, message="all fifty handled")
        shop.wait_for_quiet()
    assert shop.effects() == Counter({"42": 1})
    assert len(shop.steps("began")) == 1


def test_a_warm_shutdown_finishes_the_body(shop: Any) -> None:
    """After SIGTERM a worker finishes and acknowledges its message."""
    result = shop.tasks.ship.delay(3, 2)
    with shop.worker() as worker:
        shop.wait_for_steps("began")
        worker.signal(signal.SIGTERM)
        worker.wait()
    assert result.get(timeout=patience_s()) == {"order": 3}
    assert shop.effects() == Counter({"3": 1})
    shop.wait_for_quiet()


def test_a_cold_shutdown_gives_the_work_back(shop: Any) -> None:
    """After SIGQUIT the work is done by another worker without waiting for the lease."""
    shop.tasks.ship.delay(3, 20)
    with shop.worker() as worker:
        shop.wait_for_steps("began")
        worker.signal(signal.SIGQUIT)
        worker.wait()
    assert shop.work("shop.ship", 3).state == "NEW"
    shop.tasks.ship.delay(3)
    with shop.worker():
        shop.wait_for_effects(1)
    assert shop.effects() == Counter({"3": 1})
    assert shop.work("shop.ship", 3).crashes == 0


def test_the_tasks_own_retries_still_work(shop: Any) -> None:
    """`self.retry()` and `autoretry_for` work in a guarded task."""
    with shop.worker():
        assert shop.tasks.flaky.delay(21).get(timeout=patience_s()) == 2
        assert shop.tasks.auto.delay(22).get(timeout=patience_s()) == 2
    assert shop.effects() == Counter({"21": 1, "22": 1})


@pytest.mark.parametrize("name", ["ship", "nap"])
def test_revoked_work_is_never_run_again(shop: Any, name: str) -> None:
    """If running work is revoked with `terminate=True`, it is FAILED for good, and a later message
    runs nothing."""
    task = getattr(shop.tasks, name)
    with shop.worker() as worker:
        result = task.delay(4, 60)
        shop.wait_for_steps("began")
        result.revoke(terminate=True)
        with pytest.raises(TaskRevokedError):
            result.get(timeout=patience_s())
        wait_until(lambda: shop.work(task.name, 4).final, message="FAILED for good")
        task.delay(4, 0)
        wait_until(lambda: "as a duplicate: revoked" in worker.text(), message="dropped")
        shop.wait_for_quiet()
    assert shop.work(task.name, 4).state == "FAILED"
    assert len(shop.steps("began")) == 1
    assert not shop.effects()
