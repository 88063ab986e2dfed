"""How a claim ends that does not complete, and what its holder says of it later.

Guarantees: each ending is one conditional statement that names the old state, the fence and the
owner; the user's own row goes back to its first state in the same transaction. Asked twice an
ending changes nothing more.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from taskguard.ledger.connections.database import WRITE_LOCK_S, Database
from taskguard.ledger.own_rows import changes
from taskguard.ledger.records import message_of
from taskguard.ledger.tables import FREE, KEYS, NO_PLACE, WORK, holding, standing
from taskguard.model.claims import Claim, MessageRef
from taskguard.model.states import EXPIRED, State

UNDECIDED_S = 30.0
"""So long FAILED work that keeps its place waits to be told whether its message comes again.

In seconds; then it is overdue, for the process that was to tell is gone.
"""

__all__ = [
    "crash",
    "end_round",
    "expire",
    "fail",
    "give_back",
    "is_over",
    "revoke",
    "storable",
    "uncount_crash",
    "waits_for",
]


def fail(database: Database, claim: Claim, error: str) -> bool:
    """PROCESSING -> FAILED; ends the lease."""
    return _end(
        database,
        claim,
        state=State.FAILED.value,
        error=storable(database, error),
        lease_until=0,
        rounds=None,
        due=_undecided(database, claim),
        finished=database.now(),
    )


def _undecided(database: Database, claim: Claim) -> Any:
    """When FAILED work is overdue: never; work that keeps its place, unless its queue decides."""
    return database.now() + int(UNDECIDED_S * 1e6) if claim.request.strict else None


def give_back(database: Database, claim: Claim) -> bool:
    """PROCESSING -> NEW; ends the lease."""
    return _end(database, claim, state=State.NEW.value, owner=FREE, lease_until=0)


def crash(database: Database, claim: Claim, error: str) -> bool:
    """PROCESSING without a lease: the next claim is a takeover. The user's row stays."""
    due = sa.case((WORK.c.call.is_not(None), database.now()))
    values = {"error": storable(database, error), "lease_until": 0, "due": due}
    return _end(database, claim, row_too=False, **values)


def end_round(database: Database, claim: Claim, reason: str, *, most: int) -> bool:
    """PROCESSING -> NEW, the `most`th time in a row FAILED; ends the lease."""
    rounds = sa.func.coalesce(WORK.c.rounds, 0) + 1
    last = rounds >= most
    return _end(
        database,
        claim,
        state=sa.case((last, State.FAILED.value), else_=State.NEW.value),
        rounds=sa.case((last, None), else_=rounds),
        error=storable(database, reason),
        owner=FREE,
        lease_until=0,
        due=sa.case((last, _undecided(database, claim)), else_=WORK.c.due),
        finished=sa.case((last, database.now()), else_=None),
    )


def _end(database: Database, claim: Claim, *, row_too: bool = True, **values: object) -> bool:
    """End the lease; the work gets `values`, and the user's own row its first state."""
    tries = 0

    def end() -> bool:
        nonlocal tries
        tries += 1
        with database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
            if claim.row is not None and row_too:
                # Locked before the ledger's rows, as in every transaction.
                changes.read(db, claim.row, lock=True)
            freed = db.execute(
                sa.update(KEYS).where(holding(claim)).values(owner=FREE, lease_until=0)
            )
            if claim.work is None:
                # A first try that got no answer may have freed the keys.
                return freed.rowcount == len(claim.keys) or tries > 1
            ended = not claim.formerly or _all_stand(db, claim)
            if ended:
                update = sa.update(WORK).where(standing(claim))
                ended = db.execute(update.values(**values)).rowcount > 0
            if claim.row is not None and row_too and (ended or _revoked(db, claim)):
                changes.put_back(db, claim)
            return ended

    return database.twice(end)


def _all_stand(db: sa.Connection, claim: Claim) -> bool:
    """Whether the claim stands under each id: a worker with a former guard changes only that id."""
    select = sa.select(WORK.c.id).where(standing(claim)).order_by(WORK.c.id)
    return len(db.execute(select.with_for_update()).all()) == len(claim.work_ids)


def _revoked(db: sa.Connection, claim: Claim) -> bool:
    """Whether the work was revoked while this claim held it, which leaves the user's row to us."""
    where = WORK.c.id.in_(claim.work_ids), WORK.c.fence == claim.fence, WORK.c.final == 1
    return db.execute(sa.select(WORK.c.id).where(*where)).first() is not None


def uncount_crash(database: Database, claim: Claim) -> None:
    """Uncount this holder's crash, once."""
    _change(
        database,
        WORK.c.id.in_(claim.work_ids),
        WORK.c.crashed_owner == str(claim.owner),
        WORK.c.crashes > 0,
        WORK.c.state != State.DEAD.value,
        crashes=WORK.c.crashes - 1,
        crashed_owner="",
    )


def revoke(database: Database, work: str, *, message: str) -> bool:
    """NEW, PROCESSING or FAILED of this message -> FAILED, final."""
    changed = _change(
        database,
        WORK.c.id == work,
        WORK.c.message == message,
        WORK.c.state.in_([State.NEW.value, State.PROCESSING.value, State.FAILED.value]),
        state=State.FAILED.value,
        final=1,
        owner=FREE,
        lease_until=0,
        error="revoked",
        due=None,
        **NO_PLACE,
        finished=database.now(),
    )
    return changed == 1


def expire(
    database: Database,
    work: str,
    *,
    message: MessageRef,
    retries: int | None = None,
    due: bool = False,
    error: str = EXPIRED,
) -> bool:
    """NEW, PROCESSING beyond its lease, or FAILED in a place, of this message -> FAILED.

    Its caller was told that the message has expired, or `error`: it is sent no more, holds up
    nobody, and other copies of it are superseded. Not final: another message of the work is run.
    False if a later retry of the message stands for it, or another one's call. `due`: only what
    stands in line, and was to wait no longer than until now. `retries`: see `ports.py`.
    """

    def end() -> bool:
        with database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
            row = db.execute(sa.select(WORK).where(WORK.c.id == work).with_for_update()).first()
            now_us = database.now_us(db)
            if row is None or not waits_for(row, message, now_us):
                return False
            if due and not is_over(row, now_us):
                return False
            values: dict[str, object] = {"call": None, "due": None, **NO_PLACE}
            values["retries"] = message.retries + 1 if retries is None else retries
            if row.state != State.FAILED.value or not row.final:  # else it stays superseded
                values |= {"state": State.FAILED.value, "final": 0, "owner": FREE, "lease_until": 0}
                values |= {"error": storable(database, error), "finished": now_us}
            same = WORK.c.state == row.state, WORK.c.fence == row.fence, WORK.c.owner == row.owner
            db.execute(sa.update(WORK).where(WORK.c.id == work, *same).values(**values))
            return True

    return database.twice(end)


def is_over(row: Any, now_us: int) -> bool:
    """Whether it stands in a line, and has waited for as long as it was to."""
    in_line = row.parked is not None and row.state == State.NEW.value
    return bool(in_line and row.expires is not None and row.expires <= now_us)


def waits_for(row: Any, message: MessageRef, now_us: int) -> bool:
    """Whether nobody is at the work, and this message is the one that is to come for it."""
    if message_of(row) != message.name or row.message != message.name:
        return False
    if row.retries > message.retries:
        return False
    if row.state == State.PROCESSING.value:
        return bool(row.lease_until <= now_us)
    has_place = row.parked is not None
    return row.state == State.NEW.value or (row.state == State.FAILED.value and has_place)


def _change(database: Database, *where: sa.ColumnElement[bool], **values: object) -> int:
    def change() -> int:
        with database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
            return int(db.execute(sa.update(WORK).where(*where).values(**values)).rowcount)

    return database.twice(change)


def storable(database: Database, text: str) -> str:
    """`text` without what the database cannot store: NUL, or what is not in its encoding."""
    plain = text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()
    if plain.isascii() or database.stores_unicode():
        return plain
    return plain.encode("ascii", "backslashreplace").decode()
