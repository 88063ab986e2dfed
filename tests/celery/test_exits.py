"""Bodies that end their process or are cancelled without a request to stop."""

from __future__ import annotations

from typing import Any

import kombu
import pytest

from support.waiting import patience_s, wait_until


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_body_that_exits_is_dead_after_max_crashes(shop: Any, pool: str) -> None:
    """Each `sys.exit()` counts as a crash. The record says how the bodies ended."""
    if kombu.VERSION < (5, 7):
        pytest.skip("kombu before 5.7 looks for expired deliveries only every 100 s")
    shop.tasks.leave.delay(1, "exit")
    # Celery's threads leave the message to the visibility timeout.
    with shop.worker({"SHOP_VISIBILITY_S": "2"}, pool=pool) as worker:
        wait_until(lambda: "is DEAD" in worker.text(), message="DEAD")
        other = shop.tasks.ship.delay(2)
        assert other.get(timeout=patience_s()) == {"order": 2}
    assert len(shop.steps("began")) == 3 + 1
    work = shop.work("shop.leave", 1)
    assert (work.state, work.crashes, work.error) == ("DEAD", 3, "SystemExit: usage: leave")


def test_a_cancelled_body_is_a_failure_and_ends_no_worker(shop: Any) -> None:
    """asyncio.CancelledError makes the work FAILED, and does not end the child."""
    result = shop.tasks.leave.delay(3, "cancelled")
    with shop.worker() as worker:
        wait_until(lambda: shop.steps("began"), message="the body")
        wait_until(lambda: result.state == "FAILURE", message="FAILURE")
        shop.wait_for_quiet()
        assert "WorkerLostError" not in worker.text()
    assert len(shop.steps("began")) == 1
    work = shop.work("shop.leave", 3)
    assert (work.state, work.crashes) == ("FAILED", 0)
    assert work.error.startswith("CancelledError")
