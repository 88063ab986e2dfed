"""Without a worker: eager mode, `.apply()`, and calling the task like a function."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from taskguard.errors import KeyBusyError, LedgerUnavailableError
from taskguard_celery import runtime_of


@pytest.fixture
def eager_shop(make_shop: Any) -> Any:
    """A shop whose tasks run where they are sent."""
    return make_shop(SHOP_SETTINGS='{"task_always_eager": true, "task_eager_propagates": true}')


def test_eager_calls_are_guarded(eager_shop: Any) -> None:
    """The second order of the same number is answered with the stored result."""
    ship = eager_shop.tasks.ship
    assert ship.delay(1).get() == {"order": 1}
    assert ship.delay(1).get() == {"order": 1}
    assert eager_shop.effects() == Counter({"1": 1})


def test_apply_and_plain_calls_are_guarded(shop: Any) -> None:
    """Both go the same way as a message."""
    assert shop.tasks.ship.apply((2,)).get() == {"order": 2}
    assert shop.tasks.ship(2) == {"order": 2}
    assert shop.tasks.ship.run(2) == {"order": 2}
    assert shop.effects() == Counter({"2": 1})


def test_eager_retries_go_on(shop: Any) -> None:
    """bind=True and autoretry_for, as on a worker."""
    assert shop.tasks.flaky.apply((3,)).get() == 2
    assert shop.tasks.auto.apply((4,)).get() == 2
    assert shop.effects() == Counter({"3": 1, "4": 1})


def test_a_taken_key_is_an_error_where_nothing_can_be_put_off(eager_shop: Any) -> None:
    """Nothing was run, and the caller is told."""
    with (
        runtime_of(eager_shop.tasks.app).lock("order:5"),
        ThreadPoolExecutor(1) as another,
        pytest.raises(KeyBusyError, match="order:5"),
    ):
        another.submit(eager_shop.tasks.ship.delay, 5).result()
    assert not eager_shop.effects()


def test_a_body_that_calls_its_own_task_calls_a_function(shop: Any) -> None:
    """It is work of its own, not the message in hand once more."""
    assert shop.tasks.nest.apply((3,)).get() == 6
    assert shop.effects() == Counter({"3": 1, "2": 1, "1": 1})


def test_an_absent_database_is_an_error_where_nothing_can_be_put_off(make_shop: Any) -> None:
    """Instead of running without it."""
    shop = make_shop(SHOP_LEDGER="postgresql+psycopg://shop@127.0.0.1:1/shop")
    with pytest.raises(LedgerUnavailableError):
        shop.tasks.ship.apply((6,), throw=True)
    assert not shop.effects()


def test_arguments_are_checked_before_anything_is_sent(shop: Any) -> None:
    """By the function's signature without `guard`."""
    with pytest.raises(TypeError):
        shop.tasks.ship.delay()
    with pytest.raises(TypeError):
        shop.tasks.ship.delay(1, guard=None)
