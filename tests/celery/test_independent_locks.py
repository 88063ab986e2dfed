"""Celery workers whose locks a majority of independent servers grants, one of which is frozen."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from support.celery_shop import Shop
from support.independent import Independent, independent
from support.needs import need
from support.waiting import patience_s, wait_until
from taskguard_sandbox.servers import Valkey

# A call that waited for a frozen server would take this long.
SILENCE_S = 60


@pytest.fixture
def five() -> Iterator[Independent]:
    need(Valkey)
    with independent(5) as made:
        yield made


def test_a_frozen_server_delays_no_task(five: Independent, make_shop: Callable[..., Shop]) -> None:
    """Forked children connect for themselves, run each task once, and leave no lock.

    The first server is frozen when a child connects for the first time, the second one later.
    """
    options = f"?socket_timeout={SILENCE_S}&socket_connect_timeout={SILENCE_S}"
    shop = make_shop(SHOP_LOCKS=five.url + options)
    task_id = str(uuid.uuid4())
    with shop.worker(concurrency=4) as worker:
        for number, server in enumerate(five.servers[:2]):
            server.pause()
            began_s = time.monotonic()
            orders = range(10 * number, 10 * number + 8)
            others = [shop.tasks.ship.delay(order) for order in orders]
            assert [each.get(timeout=patience_s()) for each in others] == [
                {"order": n} for n in orders
            ]
            assert time.monotonic() - began_s < SILENCE_S
            server.resume()
        shop.publish_raw(shop.tasks.ship, [42, 0.5], times=10, task_id=task_id)
        wait_until(lambda: worker.handled() >= 26, message="all handled")
        shop.wait_for_quiet()
    assert shop.effects() == Counter(["42", *map(str, [*range(8), *range(10, 18)])])
    for key in ("order:0", "order:10", "order:42"):
        wait_until(lambda: five.owners(key) == [None] * 5)  # noqa: B023
    assert "gave an answer that counts" not in shop.logs()
