"""The shop's tasks, killed at every boundary of a delivery, without any server."""

from __future__ import annotations

from typing import Any

import pytest
import shop
import sqlalchemy as sa

from pytest_taskguard import EffectsError, Memory


@pytest.fixture(autouse=True)
def tables(taskguard_memory: Memory) -> None:
    """The shop's own tables are beside those of the guards."""
    shop.metadata.create_all(taskguard_memory.engine)


def test_an_order_is_shipped_once_wherever_the_worker_dies(
    taskguard_memory: Memory, explore_crashes: Any
) -> None:
    """One row, whatever the boundary."""

    def rows() -> int:
        with taskguard_memory.engine.connect() as db:
            return int(db.execute(sa.text("select count(*) from shipments")).scalar_one())

    print(explore_crashes(shop.ship, (42,), effects=rows))


def test_a_call_before_the_transaction_is_found_out(explore_crashes: Any) -> None:
    """Twice, if the worker dies between the call and the commit."""
    with pytest.raises(EffectsError, match="ship_early") as found:
        explore_crashes(shop.ship_early, (42,), effects=lambda: len(shop.parcels))
    assert {line.effects for line in found.value.report.wrong} == {2}


def test_a_call_after_the_transaction_is_found_out(explore_crashes: Any) -> None:
    """Never, if the worker dies between the commit and the call."""
    with pytest.raises(EffectsError, match="ship_late") as found:
        explore_crashes(shop.ship_late, (42,), effects=lambda: len(shop.parcels))
    assert {line.effects for line in found.value.report.wrong} == {0}


def test_the_second_delivery_of_an_order_is_answered(
    taskguard_memory: Memory, deliver_twice: Any
) -> None:
    """And the events say so."""
    assert deliver_twice(shop.ship, (42,)) == (None, None)
    assert "duplicate" in [event.name for event in taskguard_memory.events]


def test_a_holder_that_comes_too_late_is_refused(lose_lease_at: Any) -> None:
    """Paused in its body until another has shipped the order, it cannot commit."""
    assert lose_lease_at(shop.ship, (42,), at="transaction.begin asked").refused
