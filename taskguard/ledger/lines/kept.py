"""Strict work that FAILED with a retry to come: it keeps its position, or gives it up.

Guarantees: each change is one conditional statement that names the state, the fence and the owner.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from taskguard.ledger.connections.database import WRITE_LOCK_S, Database
from taskguard.ledger.tables import NO_POSITION, WORK
from taskguard.model.claims import Claim
from taskguard.model.line_states import LineState
from taskguard.model.states import State

__all__ = ["keep", "leave"]


def keep(
    database: Database, claim: Claim, *, retries: int, call: str | None, due_in_s: float
) -> bool:
    """Keep the position of FAILED work: its queue sent its message again, with this number.

    As after a claim, copies of the message with a lower number are superseded.
    """
    again: dict[str, Any] = {} if call is None else {"call": call, "sends": None}
    due = database.now() + int(due_in_s * 1e6)
    return _change_kept(database, claim, retries=retries, due=due, **again)


def leave(database: Database, claim: Claim, *, retries: int) -> bool:
    """Give up the position of FAILED work: its message does not come again.

    A copy of the message with a lower number is superseded. A copy with this number was sent anew.
    """
    return _change_kept(database, claim, retries=retries, due=None, **NO_POSITION)


def _change_kept(database: Database, claim: Claim, **values: Any) -> bool:
    left = sa.and_(
        WORK.c.id == claim.work,
        WORK.c.state == State.FAILED.value,
        WORK.c.fence == claim.fence,
        WORK.c.owner == str(claim.owner),
        WORK.c.line == LineState.KEPT.value,
    )
    with database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
        changed = db.execute(sa.update(WORK).where(left).values(**values))
        return changed.rowcount == 1
