"""Servers emptied, stopped and started in the middle of bodies, under prefork workers."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import redis

from support.needs import need
from support.sentinel import groups
from support.waiting import patience_s, wait_until
from taskguard_sandbox.servers import DebianRedis


@pytest.mark.once
def test_an_emptied_lock_server_changes_nothing(make_shop: Any, spare_valkey: Any) -> None:
    """After FLUSHALL in the middle of bodies, the ledger's leases keep the keys. The lock server's
    owners are the workers' logged ids."""
    shop = make_shop(SHOP_LOCKS=spare_valkey.url)
    with shop.worker(concurrency=3) as one, shop.worker(concurrency=3) as other:
        first = [shop.tasks.ship.delay(order, shop.tasks.UNTIL_GO) for order in range(4)]
        shop.wait_for_steps("began", 4)
        with redis.Redis.from_url(spare_valkey.url) as client:
            held = [client.get(key).decode() for key in client.keys("taskguard:{order:*}")]
            client.flushall()
        started = re.findall(r"worker (\w{8}) is .*, pid \d+ on ", one.text() + other.text())
        assert len(held) == 4
        assert {owner[:8] for owner in held} <= set(started)
        assert len(set(started)) == 2
        again = [shop.tasks.ship.delay(order) for order in range(4)]
        wait_until(lambda: "deferred" in one.text() + other.text(), message="put off")
        shop.let_go()
        for result in [*first, *again]:
            result.get(timeout=patience_s())
    assert shop.effects() == Counter({str(order): 1 for order in range(4)})
    assert [shop.work("shop.ship", order).attempts for order in range(4)] == [1] * 4


@pytest.mark.once
def test_work_goes_on_while_the_spare_valkey_is_away(make_shop: Any, spare_valkey: Any) -> None:
    """If the lock server is down, the ledger decides, and the log says so."""
    shop = make_shop(SHOP_LOCKS=spare_valkey.url)
    first = [shop.tasks.ship.delay(order, 3.0) for order in range(2)]
    with shop.worker(concurrency=4) as worker:
        shop.wait_for_steps("began", 2)
        spare_valkey.kill()
        again = [shop.tasks.ship.delay(order) for order in range(4)]
        for result in [*first, *again]:
            result.get(timeout=patience_s())
        assert "lock server gave no answer" in worker.text()
        assert "lost after" not in worker.text()
        spare_valkey.start()
        assert shop.tasks.ship.delay(9).get(timeout=patience_s()) == {"order": 9}
    assert shop.effects() == Counter({str(order): 1 for order in (0, 1, 2, 3, 9)})


@pytest.mark.debian
def test_a_failover_of_the_lock_server_changes_nothing(make_shop: Any) -> None:
    """If Sentinel replaces a killed master in the middle of bodies, no lease is lost. Later work
    has its locks at the new master."""
    need(DebianRedis)
    with groups() as group:
        shop, replica = make_shop(SHOP_LOCKS=group.url), group.replica
        first = [shop.tasks.ship.delay(order, 5.0) for order in range(2)]
        with shop.worker(concurrency=4) as worker:
            shop.wait_for_steps("began", 2)
            group.master.kill()
            again = [shop.tasks.ship.delay(order) for order in range(4)]
            for result in [*first, *again]:
                result.get(timeout=patience_s())
            group.wait_for_promotion(replica)
            before = worker.text().count("lock server gave no answer")
            assert before > 0
            assert shop.tasks.ship.delay(9).get(timeout=patience_s()) == {"order": 9}
            assert worker.text().count("lock server gave no answer") == before
            assert "lost after" not in worker.text()
    assert shop.effects() == Counter({str(order): 1 for order in (0, 1, 2, 3, 9)})


@pytest.mark.usefixtures("short_leases")
@pytest.mark.once
def test_nothing_is_lost_while_the_database_is_away(make_shop: Any, database_server: Any) -> None:
    """If the database stops in bodies and transactions, all work is done once after its start."""
    shop = make_shop(SHOP_DATABASE=database_server.create_database("shop"))
    results = [shop.tasks.ship.delay(1, 6.0), shop.tasks.hold.delay(2, 6.0)]
    with shop.worker() as worker:
        shop.wait_for_steps("began")
        shop.wait_for_steps("wrote")
        results += [shop.tasks.ship.delay(order) for order in (1, 3, 4)]
        shop.engine.dispose()
        database_server.halt()
        wait_until(lambda: worker.text().count(" deferred: ") >= 4, message="deliveries deferred")
        database_server.start()
        for result in results:
            result.get(timeout=patience_s())
        assert "raised unexpected" not in worker.text()
    assert shop.effects() == Counter({"1": 1, "2": 1, "3": 1, "4": 1})


def test_nothing_is_lost_while_the_broker_is_away(make_shop: Any, spare_valkey: Any) -> None:
    """If the broker stops in a body, the message comes again, and has one effect."""
    shop = make_shop(SHOP_BROKER=spare_valkey.url, SHOP_VISIBILITY_S="2")
    first = shop.tasks.ship.delay(1, 2.0)
    with shop.worker():
        shop.wait_for_steps("began")
        spare_valkey.halt()
        assert first.get(timeout=patience_s()) == {"order": 1}
        spare_valkey.start()
        others = [shop.tasks.ship.delay(order) for order in (1, 2)]
        # As a supervisor would: kombu 5.7 may end a worker that has a message in hand.
        with shop.worker():
            assert [other.get(timeout=patience_s())["order"] for other in others] == [1, 2]
            shop.wait_for_quiet()
    assert shop.effects() == Counter({"1": 1, "2": 1})


def test_a_task_that_retries_after_any_error_is_not_lost_while_nothing_can_be_published(
    shop: Any,
) -> None:
    """With `autoretry_for=(Exception,)`, a delivery that cannot be deferred goes back to the
    queue."""
    outage = shop.folder / "outage"
    with shop.worker({"SHOP_OUTAGE": str(outage)}) as worker:
        first = shop.tasks.ship.delay(5, shop.tasks.UNTIL_GO)
        shop.wait_for_steps("began")
        outage.touch()
        second = shop.tasks.stubborn.delay(5)
        wait_until(
            lambda: worker.text().count("could not be deferred") > 1,
            message="a delivery of what went back",
        )
        outage.unlink()
        shop.let_go()
        assert first.get(timeout=patience_s()) == {"order": 5}
        assert second.get(timeout=patience_s()) == 5
    assert shop.effects() == Counter({"5": 2})
