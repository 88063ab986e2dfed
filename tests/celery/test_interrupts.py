"""A body that is interrupted when its lease is lost."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import sqlalchemy as sa

from support.waiting import patience_s, wait_until


def take_away(shop: Any, order: int) -> None:
    """Change the ledger as if another holder had taken the key over, and vanished."""
    with shop.engine.begin() as db:
        for table in ("taskguard_keys", "taskguard_work"):
            statement = (
                f"update {table} set fence = fence + 1, owner = 'x/x', lease_until = 0"
                " where key = :key"
            )
            db.execute(sa.text(statement), {"key": f"order:{order}"})


@pytest.mark.usefixtures("short_leases")
@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_body_that_is_to_be_interrupted_ends_when_its_lease_is_lost(shop: Any, pool: str) -> None:
    """With `on_lost="interrupt"`, LeaseLostError ends the body's loop, and the work is done
    again."""
    result = shop.tasks.patient.delay(1)
    with shop.worker(pool=pool) as worker:
        shop.wait_for_steps("began")
        take_away(shop, 1)
        shop.wait_for_steps("interrupted")
        shop.wait_for_effects(1)
        assert result.get(timeout=patience_s()) is None
        wait_until(lambda: "lost after" in worker.text(), message="the event")
    assert shop.effects() == Counter({"1": 1})
