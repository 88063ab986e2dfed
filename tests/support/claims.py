"""Claims that a test makes by hand: of the work `ship order:<number>`, on its key.

Each has an owner of its own, as if from another process.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from taskguard.ledger.tables import KEYS, WORK
from taskguard.model.claims import Claimed, ClaimRequest, MessageRef
from taskguard.model.lease import new_owner

__all__ = ["end_leases", "overtake", "request"]


def request(number: int = 1, *, message: MessageRef | None = None, **values: Any) -> ClaimRequest:
    """Return the claim request of message "m". `values` are fields of the request."""
    message = message or MessageRef("m")
    values = {
        "keys": (f"order:{number}",),
        "owner": new_owner(message.id),
        "ttl_s": 30.0,
        "work": f"ship order:{number}",
        "task": "ship",
        **values,
    }
    return ClaimRequest(message=message, **values)


def end_leases(engine: sa.Engine) -> None:
    """Expire all leases, as if their holders had been paused."""
    with engine.begin() as db:
        for table in (KEYS, WORK):
            db.execute(sa.update(table).values(lease_until=1))


def overtake(shop: Any) -> None:
    """Expire the leases in a shop's `engine`, and let another owner take order 1 over."""
    end_leases(shop.engine)
    assert isinstance(shop.ledger.claim(request()), Claimed)
