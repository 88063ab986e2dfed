"""Pauses of keys: an operator's lease, which every claim of the key finds.

Guarantees: a pause locks the key's own row, which every claim of the key, or of one of its slots,
locks first. So no delivery gets the key, or a slot of it, once the pause is written. A pause raises
the fence of each holder whose lease has expired, and with `now` of every holder. So each late
commit is refused.

While holders of slots still run, the pause has a short lease, which its process renews. If that
process dies, the lease expires, and no pause stays behind. A holder of the key itself is not
disturbed: nothing is written until it has ended.

A resume ends each pause that began before it. If such a pause still waits for holders, it finds the
resume on record, and does not complete.

Read next: `operations/pausing.py`, which waits and renews.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa

from taskguard.ledger.connections.database import WRITE_LOCK_S, Database
from taskguard.ledger.operations.changes import last_actions, note_action, was_noted
from taskguard.ledger.operations.left import end_holder, keys_of_holder, refuse_commit
from taskguard.ledger.tables import ACTIONS, FREE, KEYS
from taskguard.model.bounds import is_slot, range_of_slots
from taskguard.model.changes import PauseTried, Said
from taskguard.model.history import Action
from taskguard.model.lease import Owner
from taskguard.model.pauses import FAR_US, Pause

__all__ = ["give_up_pause", "pause_of", "paused_keys", "release", "resume", "try_pause"]

_DETAIL_CHARS = 500


def try_pause(
    database: Database,
    key: str,
    *,
    owner: Owner,
    by: Said,
    lease_s: float,
    now: bool,
    also: tuple[Owner, ...],
) -> PauseTried:
    """Pause a key if no delivery holds it. Otherwise keep others from its free slots.

    An equal call of the same owner changes nothing again.

    Args:
        database: the ledger's database.
        key: the key, without a slot.
        owner: the owner that stands for this pause.
        by: the actor and the reason, for the record.
        lease_s: for how long the key's free slots are kept, if others are held.
        now: end the leases of all holders instead of waiting for them.
        also: holders that only the lock server knows.
    """
    with database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
        base, now_us = _locked(database, db, key), database.now_us(db)
        mine = base.owner == str(owner)
        live = base.owner != FREE and base.lease_until > now_us and not mine
        other = Owner.parse(base.owner).pause if live else None
        if other is not None:
            return PauseTried(False, by=other)
        if mine and base.lease_until >= FAR_US:
            return PauseTried(True)
        resumed = _resumed(db, key, since=owner)
        if resumed is not None:
            return PauseTried(False, resumed=resumed)
        slots = _slots(db, key)
        holders = [*([base] if live else []), *(row for row in slots if row.lease_until > now_us)]
        shown = tuple(dict.fromkeys((*(Owner.parse(each.owner) for each in holders), *also)))
        if live and not now:
            return PauseTried(False, shown)
        if now:
            text = f"its key was paused by {by.actor}: {by.reason}"
            for each in holders:
                all_keys = keys_of_holder(db, fence=each.fence, owner=each.owner)
                end_holder(db, all_keys, now_us=now_us, text=text)
            base = _locked(database, db, key)
        paused = now or not shown
        if paused:  # a holder that was suspended until its lease expired may go on
            for each in slots:
                if each.lease_until <= now_us:
                    refuse_commit(db, each, now_us=now_us)
        until_us = FAR_US if paused else now_us + int(lease_s * 1e6)
        fence = base.fence if mine else max(base.fence + 1, now_us)
        same = KEYS.c.key == key, KEYS.c.fence == base.fence, KEYS.c.owner == base.owner
        values = {"fence": fence, "owner": str(owner), "lease_until": until_us}
        db.execute(sa.update(KEYS).where(*same).values(**values))
        if paused:
            note_action(
                database, db, Action.PAUSE, by=by, at_us=now_us, key=key, detail=_named(holders)
            )
        return PauseTried(paused, shown, closed=not paused)


def _resumed(db: sa.Connection, key: str, *, since: Owner) -> Said | None:
    """Return who resumed the key after the pause of this owner had begun, and why.

    It compares times of the database's clock. If that is set back in between, resume again.
    """
    last = last_actions()
    resumes = sa.select(last.c.actor, last.c.reason).where(
        last.c.action == Action.RESUME.value,
        last.c.key == key,
        last.c.at >= _began_us(since),
    )
    found = db.execute(resumes.limit(1)).first()
    return None if found is None else Said(found.actor, found.reason)


def _began_us(owner: Owner) -> int:
    return 0 if owner.pause is None else round(owner.pause.since_s * 1e6)


def _locked(database: Database, db: sa.Connection, key: str) -> Any:
    """Return the key's own row, which is made if it is missing, and lock it."""
    select = sa.select(KEYS).where(KEYS.c.key == key).with_for_update()
    row = db.execute(select).first()
    while row is None:  # a purge may come between the two
        new = {"key": key, "fence": 0, "owner": FREE, "lease_until": 0}
        db.execute(database.dialect.insert_missing(KEYS, new))
        row = db.execute(select).first()
    return row


def _slots(db: sa.Connection, key: str) -> list[Any]:
    """Return the rows of the key's slots that have an owner, and lock them."""
    first, after = range_of_slots(key)
    held = KEYS.c.key > first, KEYS.c.key < after, KEYS.c.owner != FREE
    rows = db.execute(sa.select(KEYS).where(*held).order_by(KEYS.c.key).with_for_update())
    return [row for row in rows if is_slot(row.key, of=key)]


def _named(holders: list[Any]) -> str | None:
    """Return the holders whose leases ended, for the record."""
    named = (f"{each.key} from {Owner.parse(each.owner).described}" for each in holders)
    return "; ".join(named)[:_DETAIL_CHARS] or None


def give_up_pause(database: Database, key: str, *, owner: Owner) -> None:
    """Free a key whose pause still waited for holders. A pause that is complete stays."""
    mine = KEYS.c.key == key, KEYS.c.owner == str(owner), KEYS.c.lease_until < FAR_US
    with database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
        values = {"owner": FREE, "lease_until": database.now()}
        db.execute(sa.update(KEYS).where(*mine).values(**values))


def resume(database: Database, key: str, *, owner: Owner, by: Said) -> bool:
    """End the pause of a key, and each that began before it and still waits for holders.

    Return False if no such pause has the key: then only those that wait are ended.
    """
    began = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=_began_us(owner))
    since = f"it was not paused; a pause that began before {began:%Y-%m-%d %H:%M:%S.%f}Z is refused"
    with database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
        base, now_us = _locked(database, db, key), database.now_us(db)
        found = Owner.parse(base.owner)
        ends = found.pause is not None and _began_us(found) <= _began_us(owner)
        for was, detail in ((True, str(owner.pause)[:_DETAIL_CHARS]), (False, since)):
            if not ends and was_noted(db, Action.RESUME, key=key, detail=detail):
                return was
        if ends:
            same = KEYS.c.key == key, KEYS.c.fence == base.fence, KEYS.c.owner == base.owner
            db.execute(sa.update(KEYS).where(*same).values(owner=FREE, lease_until=now_us))
        detail = str(found.pause)[:_DETAIL_CHARS] if ends else since
        note_action(database, db, Action.RESUME, by=by, at_us=now_us, key=key, detail=detail)
        return ends


def pause_of(database: Database, keys: tuple[str, ...]) -> Owner | None:
    """Return the owner that stands for the pause of one of these keys, complete or not."""
    held = KEYS.c.key.in_(keys), KEYS.c.owner != FREE, KEYS.c.lease_until > database.now()
    with database.transaction() as db:
        owners = db.execute(sa.select(KEYS.c.owner).where(*held)).scalars().all()
    return next((each for each in map(Owner.parse, owners) if each.pause is not None), None)


def paused_keys(database: Database, *, limit: int) -> list[tuple[str, Pause]]:
    """Return the keys that are paused, in order. The record of actions names them."""
    with database.transaction() as db:
        paused = ACTIONS.c.action == Action.PAUSE.value
        named = sa.select(ACTIONS.c.key).where(paused).distinct()
        rows = sa.select(KEYS.c.key, KEYS.c.owner).where(
            KEYS.c.key.in_(named), KEYS.c.lease_until >= FAR_US
        )
        found = db.execute(rows.order_by(KEYS.c.key).limit(limit)).all()
    pauses = ((row.key, Owner.parse(row.owner).pause) for row in found)
    return [(key, pause) for key, pause in pauses if pause is not None]


def release(database: Database, key: str, *, fence: int, owner: str, by: Said) -> tuple[str, ...]:
    """End the lease of a key's holder on this key and on all others of its claim.

    Return those keys. There are none if another fence or owner has the key.
    """
    detail = f"{key} from {Owner.parse(owner).described} with fence {fence}"[:_DETAIL_CHARS]
    with database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
        found = [] if owner == FREE else keys_of_holder(db, fence=fence, owner=owner)
        now_us, names = database.now_us(db), tuple(each.key for each in found)
        if key not in names:
            again = was_noted(db, Action.RELEASE, key=key, detail=detail)
            return (key,) if again else ()
        if Owner.parse(owner).pause is not None:
            return ()
        text = f"its key was released by {by.actor}: {by.reason}"
        end_holder(db, found, now_us=now_us, text=text)
        note_action(database, db, Action.RELEASE, by=by, at_us=now_us, key=key, detail=detail)
        return names
