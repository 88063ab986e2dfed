"""Claims as a test makes them by hand: of the work `ship order:<number>`, on its key.

Guarantees that each is an owner's of its own, as from another process.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from taskguard.ledger.tables import KEYS, WORK
from taskguard.model.claims import Claimed, ClaimRequest, MessageRef
from taskguard.model.lease import new_owner

__all__ = ["end_leases", "overtake", "request"]


def request(number: int = 1, *, message: MessageRef | None = None, **values: Any) -> ClaimRequest:
    """What a delivery of the message "m" asks for; `values` are fields of the request."""
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
    """Every holder looks as if it had been paused for longer than its lease."""
    with engine.begin() as db:
        for table in (KEYS, WORK):
            db.execute(sa.update(table).values(lease_until=1))


def overtake(shop: Any) -> None:
    """The leases in a shop's `engine` run out, and somebody else takes order 1 over."""
    end_leases(shop.engine)
    assert isinstance(shop.ledger.claim(request()), Claimed)
