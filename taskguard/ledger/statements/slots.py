"""The slots of a key that several deliveries may hold at once: which one a claim may get.

A key with `limit=3` has the slots `key#0`, `key#1` and `key#2`. Each slot is a key like any other,
with its own fence, owner and lease. Each holder of the key holds one slot. The row of the key
itself has no owner. A claim locks this row first, so that claims of one key are decided one after
the other. The row has the number of slots at the last claim, and the time of the next start by its
rate.

Guarantees: a granted claim leaves at most `limit` holders. Holders of slots of a higher limit
count. So does a holder of the key itself, from before it had slots.

Does not guarantee that a claim sees a slot that has just become free, because a holder ends without
a lock on the key's row. Does not guarantee that fences grow over all slots of a key: they grow for
each slot, and for each work.

Read next: `gates.py` for the reasons to refuse a claim, `lines/room.py` for promotions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import sqlalchemy as sa

from taskguard.ledger.connections.database import Database
from taskguard.ledger.connections.prepared import Prepared
from taskguard.ledger.tables import FREE, KEYS
from taskguard.model.bounds import Bounds, is_slot, range_of_slots
from taskguard.model.claims import ClaimRequest

__all__ = ["Chosen", "choose"]


class Chosen(NamedTuple):
    """A request for one slot, the locked row of the key, and the rows of the other holders."""

    request: ClaimRequest
    base: Any
    others: Sequence[Any]


def choose(database: Database, db: sa.Connection, request: ClaimRequest, bounds: Bounds) -> Chosen:
    """Lock the key's row, and choose a slot.

    It is a slot that this owner already has, or else a free one, or else the first one.
    """
    statements, key, owner = database.once(_statements), bounds.key, str(request.owner)
    found = database.read(db, statements.lock, {"its_key": key})
    while not found:  # a purge may come between the two
        statements.make.run(db, {"its_key": key})
        found = database.read(db, statements.lock, {"its_key": key})
    [now_us, first, after] = [database.now_us(db), *range_of_slots(key)]
    rows = database.read(db, statements.holders, {"key": key, "first": first, "after": after})
    rows = [row for row in rows if row.key == key or is_slot(row.key, of=key)]
    others = [row for row in rows if row.owner != owner and row.lease_until > now_us]
    mine = [row.key for row in rows if row.owner == owner]
    taken = {row.key for row in others}
    free = [slot for slot in bounds.slots if slot not in taken]
    slot: str = [*mine, *free, *bounds.slots][0]
    return Chosen(replace(request, keys=(slot,)), found[0], others)


class _Statements(NamedTuple):
    """The statements on the key's own row and on the rows of its holders."""

    make: Prepared
    lock: Prepared
    holders: Prepared


def _statements(database: Database) -> _Statements:
    dialect, sql = database.dialect, database.engine.dialect
    own = KEYS.c.key == sa.bindparam("its_key")
    new = {"key": sa.bindparam("its_key"), "fence": 0, "owner": FREE, "lease_until": 0}
    noted = sa.select(KEYS.c.key, KEYS.c.fence, KEYS.c.owner, KEYS.c.slots, KEYS.c.next_start)
    slots = sa.and_(KEYS.c.key > sa.bindparam("first"), KEYS.c.key < sa.bindparam("after"))
    holders = sa.select(KEYS.c.key, KEYS.c.owner, KEYS.c.lease_until).where(
        sa.or_(KEYS.c.key == sa.bindparam("key"), slots), KEYS.c.owner != FREE
    )
    return _Statements(
        make=Prepared(dialect.insert_missing(KEYS, [new]), sql),
        lock=Prepared(noted.where(own).with_for_update(), sql),
        holders=Prepared(holders, sql),
    )
