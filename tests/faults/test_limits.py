"""Faults 27 and 28 where they reach a body in a Celery child: time limits and a soft shutdown."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable

import celery
import pytest

from support.celery_shop import Shop
from support.waiting import patience_s, wait_until


@pytest.mark.parametrize("limit", ["soft_time_limit", "time_limit"])
def test_work_beyond_its_time_limit_can_be_done_again(
    make_shop: Callable[..., Shop], limit: str
) -> None:
    """After a soft time limit the work is FAILED at once. After a hard one its child is killed, and
    the lease expires. The next message does the work."""
    shop = make_shop()
    with shop.worker(concurrency=1):
        result = shop.tasks.ship.apply_async((1, 60.0), **{limit: 5})
        shop.wait_for_steps("began")
        with pytest.raises(Exception, match="TimeLimitExceeded"):
            result.get(timeout=patience_s())
        if limit == "soft_time_limit":
            assert shop.work("shop.ship", 1).state == "FAILED"
        assert shop.tasks.ship.delay(1).get(timeout=patience_s()) == {"order": 1}
    assert shop.effects() == Counter({"1": 1})


def test_a_soft_shutdown_gives_the_work_back(make_shop: Callable[..., Shop]) -> None:
    """If a body does not end within a soft shutdown, its work is NEW without a crash, and another
    worker does it."""
    if celery.VERSION < (5, 5):
        pytest.skip("Celery before 5.5 knows no soft shutdown")
    shop = make_shop(SHOP_SETTINGS='{"worker_soft_shutdown_timeout": 1}')
    shop.tasks.ship.delay(3, 60.0)
    with shop.worker(concurrency=1) as worker:
        shop.wait_for_steps("began")
        worker.signal(signal.SIGQUIT)
        worker.wait()
    assert shop.work("shop.ship", 3).state == "NEW"
    with shop.worker(concurrency=1):
        wait_until(shop.effects, message="done by another")
    assert shop.effects() == Counter({"3": 1})
    assert shop.work("shop.ship", 3).crashes == 0
