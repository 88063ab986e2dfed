"""Work whose message is due now, whatever time it was given."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

__all__ = ["make_due"]


def make_due(rig: Any) -> None:
    """All work of a shop's or an office's whose message has a time."""
    with rig.engine.begin() as db:
        db.execute(sa.text("update taskguard_work set due = 1 where due is not null"))
