"""Shows records to operators: `ports.Records`. `actions.py` changes them."""

from __future__ import annotations

import sqlalchemy as sa

from taskguard.ledger.connections.retrying import retried
from taskguard.ledger.decisions import view_of
from taskguard.ledger.lines import reading
from taskguard.ledger.parts.base import Part
from taskguard.ledger.tables import FREE, KEYS, WORK
from taskguard.locks.base import Holder
from taskguard.model.bounds import is_slot, range_of_slots
from taskguard.model.claims import LEADER_TASK
from taskguard.model.lease import Owner
from taskguard.model.policy import MOST_ROWS, check_number
from taskguard.model.records import Waiting, WorkView
from taskguard.model.states import State

__all__ = ["SqlRecords"]


class SqlRecords(Part):
    """Records of work and keys, as an operator reads them."""

    @retried
    def list_work(self, state: State, *, limit: int = 100) -> list[WorkView]:
        """Return the records of work in a state, the last started first, without leaders."""
        check_number("limit", limit, at_least=1, at_most=MOST_ROWS, whole=True)
        leaders = sa.and_(WORK.c.task == LEADER_TASK, WORK.c.key.contains("leader:"))
        select = sa.select(WORK).where(WORK.c.state == state.value, sa.not_(leaders))
        with self._database.transaction() as db:
            found = db.execute(select.order_by(WORK.c.started.desc()).limit(limit)).all()
        return [view_of(row) for row in found]

    @retried
    def waiting(self, key: str | None = None, *, limit: int = 100) -> list[Waiting]:
        """Return the messages in the line of a key, or in all lines, in their order."""
        check_number("limit", limit, at_least=1, at_most=MOST_ROWS, whole=True)
        return reading.waiting(self._database, key, limit=limit)

    @retried
    def holders(self, key: str) -> list[Holder]:
        """Return the holders of a key, or of its slots, whose leases have not expired."""
        first, after = range_of_slots(key)
        slots = sa.and_(KEYS.c.key > first, KEYS.c.key < after)
        select = sa.select(KEYS.c.key, KEYS.c.owner, KEYS.c.fence, KEYS.c.lease_until).where(
            sa.or_(KEYS.c.key == key, slots), KEYS.c.owner != FREE
        )
        with self._database.transaction() as db:
            now_us = self._database.now_us(db)
            rows = db.execute(select.order_by(KEYS.c.key)).all()
        return [
            Holder(row.key, Owner.parse(row.owner), row.fence, (row.lease_until - now_us) / 1e6)
            for row in rows
            if row.lease_until > now_us and (row.key == key or is_slot(row.key, of=key))
        ]
