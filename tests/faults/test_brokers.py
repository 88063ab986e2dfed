"""Fault 26: RabbitMQ is restarted in the middle of bodies, or takes a consumer for dead.

Every accepted message reaches DONE, with one effect.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

import pytest

from support.celery_shop import Shop
from support.needs import need
from support.waiting import patience_s, wait_until
from taskguard_sandbox.servers import NewestRabbitMQ, RabbitMQ

pytestmark = pytest.mark.debian

# Two workers of one name would quarrel over its queue.
SETTINGS = '{"worker_enable_remote_control": false}'


class HastyRabbitMQ(RabbitMQ):
    """Takes a consumer for dead that has not acknowledged for 3 s, and looks each second."""

    def _environment(self) -> dict[str, str]:
        name = str(self.folder / "advanced.config")
        return super()._environment() | {"RABBITMQ_ADVANCED_CONFIG_FILE": name}

    def _prepare(self) -> None:
        super()._prepare()
        settings = "[{rabbit, [{channel_tick_interval, 1000}, {consumer_timeout, 3000}]}].\n"
        (self.folder / "advanced.config").write_text(settings)


def is_done(shop: Shop, order: int) -> bool:
    view = shop.ledger.view(f"shop.ship order:{order}")
    return view is not None and view.state.value == "DONE"


@pytest.mark.parametrize("kind", [RabbitMQ, NewestRabbitMQ])
def test_a_restart_loses_nothing(make_shop: Callable[..., Shop], kind: type[RabbitMQ]) -> None:
    """After a restart with running bodies and waiting messages, deliveries come again, and all work
    is done once."""
    need(kind)
    with kind() as broker:
        shop = make_shop(SHOP_BROKER=broker.url, SHOP_SETTINGS=SETTINGS)
        orders = range(4)
        with shop.worker(concurrency=2):
            for order in orders:
                shop.tasks.ship.delay(order, 2.0)
            shop.wait_for_steps("began", 2)
            broker.restart()
            # As a supervisor would: a worker that lost its broker may end.
            with shop.worker(concurrency=2):
                wait_until(
                    lambda: all(is_done(shop, order) for order in orders),
                    message="all done",
                )
        assert shop.effects() == Counter({str(order): 1 for order in orders})


@pytest.mark.parametrize("retries", [False, True])
def test_a_body_longer_than_the_consumer_timeout_has_one_effect(
    make_shop: Callable[..., Shop], retries: bool
) -> None:
    """RabbitMQ closes the worker's channel, and the worker ends once its bodies have ended.

    With broker_channel_error_retry it connects again. The message comes again, and is put off, or
    answered.
    """
    need(RabbitMQ)
    with HastyRabbitMQ() as broker:
        settings = {**json.loads(SETTINGS), "broker_channel_error_retry": retries}
        shop = make_shop(SHOP_BROKER=broker.url, SHOP_SETTINGS=json.dumps(settings))
        result = shop.tasks.ship.delay(1, 15.0)
        workers = shop.worker(concurrency=1), shop.worker(concurrency=1)
        with workers[0], workers[1]:
            shop.wait_for_steps("began")
            wait_until(
                lambda: "has timed out waiting for delivery acknowledgement" in broker.log,
                message="the consumer is given up",
            )
            assert result.get(timeout=patience_s()) == {"order": 1}
            wait_until(
                lambda: "answered as a duplicate: done" in shop.logs(),
                message="the message that came again is answered",
            )
            ended = "Unrecoverable error: PreconditionFailed"
            assert (ended in shop.logs()) is not retries
            wait_until(
                lambda: retries or any(each.process.poll() is not None for each in workers),
                message="the end of the worker that was given up",
            )
    assert shop.effects() == Counter({"1": 1})
    assert len(shop.steps("began")) == 1
