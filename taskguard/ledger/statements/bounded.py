"""Claims of keys that several may hold at once, or that are not to be begun too often.

A key with `limit=3` has the slots `key#0`, `key#1` and `key#2`: each is a key like any other, with
a fence, an owner and a lease of its own, and whoever holds the key holds one of them. The row of
the key itself has no owner; a claim locks it first, so that claims of one key are decided one after
the other. It says how many slots there were at the last claim, and from when on the rate allows the
next start.

Guarantees: a claim that is granted leaves at most `limit` holders, those of slots that a higher
limit had among them, and of the key itself, from before it had any. A start is charged in the
transaction of its claim, and only there: not if the same owner asks again, and not what is refused.

Does not guarantee that a slot which is free by now is seen: holders end without the key's row. Nor
a fence that grows over all slots: it is the slot's, and its work's.

Read next: `taskguard/model/bounds.py` for the rate, `ledger/lines/room.py` for promotions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import sqlalchemy as sa

from taskguard.ledger.connections.database import Database
from taskguard.ledger.connections.prepared import Prepared
from taskguard.ledger.lines import turn
from taskguard.ledger.statements.claims import LockedClaim
from taskguard.ledger.tables import FREE, KEYS
from taskguard.model.bounds import is_slot, range_of_slots
from taskguard.model.claims import Busy, ClaimRequest
from taskguard.model.states import Decision

__all__ = ["BoundedClaim"]


class BoundedClaim(LockedClaim):
    """One claim with its rows locked: the user's own, then the key, then its slot, then the work.

    Whose key has slots has no row of the user's own: its fence would be that of one slot.
    """

    def __init__(self, database: Database, db: sa.Connection, request: ClaimRequest) -> None:
        assert request.bounds is not None  # noqa: S101
        self.bounds = request.bounds
        self._base = database.once(_statements)
        self._others: list[Any] = []
        if self.bounds.slots:
            request = replace(request, keys=(self._choose(database, db, request),))
        super().__init__(database, db, request)

    def _choose(self, database: Database, db: sa.Connection, request: ClaimRequest) -> str:
        """A slot that this owner has already, or one that is free; else the first of them."""
        key, owner = self.bounds.key, str(request.owner)
        while not database.read(db, self._base.lock, {"its_key": key}):  # a purge may come between
            self._base.make.run(db, {"its_key": key})
        [now_us, first, after] = [database.now_us(db), *range_of_slots(key)]
        rows = database.read(db, self._base.holders, {"key": key, "first": first, "after": after})
        rows = [row for row in rows if row.key == key or is_slot(row.key, of=key)]
        self._others = [row for row in rows if row.owner != owner and row.lease_until > now_us]
        mine = [row.key for row in rows if row.owner == owner]
        taken = {row.key for row in self._others}
        free = [slot for slot in self.bounds.slots if slot not in taken]
        chosen: str = [*mine, *free, *self.bounds.slots][0]
        return chosen

    def _taken(self, by: Any) -> Busy:
        if len(self.bounds.slots) <= 1:
            return super()._taken(by)
        # Any of them would have done: it is nobody's in particular.
        return self._busy(min(row.lease_until for row in (by, *self._others)))

    def _held_up(self, decision: Decision) -> Busy | None:
        if decision is Decision.SAME and all(key.owner == self.owner for key in self.keys):
            return None  # it was charged, and counts among the holders
        room = self.bounds.limit - len(self._others)
        if room <= 0:
            return self._busy(min(row.lease_until for row in self._others))
        if self.request.in_line and turn.is_behind(self.db, self.request, self.now_us, room=room):
            return self._busy(None)
        return self._charge()

    def _last_fences(self) -> list[int]:
        """Its work's, too, which may have been in another slot, by a clock that was set back."""
        fences = super()._last_fences()
        return fences if self.row is None else [*fences, self.row.fence]

    def _charge(self) -> Busy | None:
        """Note the start in the key's row, which is locked; Busy if it is too early for one."""
        [before] = self.database.read(self.db, self._base.lock, {"its_key": self.bounds.key})
        rate, opens_us, early = self.bounds.rate, before.next_start, False
        if rate is not None:
            opens_us = rate.opens_us(before.next_start, self.now_us)
            early = opens_us > self.now_us
        noted: dict[str, Any] = {"next_start": opens_us}
        if not early:
            if rate is not None:
                noted["next_start"] = rate.charged_us(opens_us, self.now_us)
            noted["slots"] = self.bounds.limit if self.bounds.slots else None
            if self.bounds.slots and before.owner == FREE:
                # By its fence a purge knows that it is in use; one who has the key alone needs his.
                noted["fence"] = max(before.fence, self.now_us)
        if any(getattr(before, name) != value for name, value in noted.items()):
            self.db.execute(sa.update(KEYS).where(KEYS.c.key == self.bounds.key).values(**noted))
        return self._busy(opens_us, too_early=True) if early else None


class _Statements(NamedTuple):
    """Of the key's own row, and of all who hold it."""

    make: Prepared
    lock: Prepared
    holders: Prepared


def _statements(database: Database) -> _Statements:
    dialect, sql = database.dialect, database.engine.dialect
    own = KEYS.c.key == sa.bindparam("its_key")
    new = {"key": sa.bindparam("its_key"), "fence": 0, "owner": FREE, "lease_until": 0}
    noted = sa.select(KEYS.c.fence, KEYS.c.owner, KEYS.c.slots, KEYS.c.next_start)
    slots = sa.and_(KEYS.c.key > sa.bindparam("first"), KEYS.c.key < sa.bindparam("after"))
    holders = sa.select(KEYS.c.key, KEYS.c.owner, KEYS.c.lease_until).where(
        sa.or_(KEYS.c.key == sa.bindparam("key"), slots), KEYS.c.owner != FREE
    )
    return _Statements(
        make=Prepared(dialect.insert_missing(KEYS, [new]), sql),
        lock=Prepared(noted.where(own).with_for_update(), sql),
        holders=Prepared(holders, sql),
    )
