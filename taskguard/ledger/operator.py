"""What is asked of the ledger beside the way of a delivery: what it has on record, and what people
change of it.

Guarantees: each change is one conditional statement that names the state that it ends; a holder
whose lease is ended by mistake is refused only once somebody else has claimed.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from taskguard.ledger import unique
from taskguard.ledger.connections.database import WRITE_LOCK_S, Database
from taskguard.ledger.decisions import view_of
from taskguard.ledger.endings import storable
from taskguard.ledger.tables import FREE, KEYS, MESSAGES, NO_PLACE, WORK
from taskguard.locks.base import Holder
from taskguard.model.bounds import is_slot, range_of_slots
from taskguard.model.claims import LEADER_TASK, ClaimRequest
from taskguard.model.lease import Owner
from taskguard.model.policy import MOST_ROWS, check_number
from taskguard.model.records import WorkView
from taskguard.model.states import State

__all__ = ["done_elsewhere", "holders", "holds", "list_work", "release", "requeue", "view"]


def view(database: Database, work: str) -> WorkView | None:
    """A work's record."""

    def read() -> Any:
        with database.transaction() as db:
            return db.execute(sa.select(WORK).where(WORK.c.id == work)).first()

    row = database.twice(read)
    return None if row is None else view_of(row)


def list_work(database: Database, state: State, *, limit: int) -> list[WorkView]:
    """Return the records of all work in a state, except leaders', what started last first."""
    check_number("limit", limit, at_least=1, at_most=MOST_ROWS, whole=True)

    def read() -> Any:
        leaders = sa.and_(WORK.c.task == LEADER_TASK, WORK.c.key.contains("leader:"))
        select = sa.select(WORK).where(WORK.c.state == state.value, sa.not_(leaders))
        with database.transaction() as db:
            return db.execute(select.order_by(WORK.c.started.desc()).limit(limit)).all()

    return [view_of(row) for row in database.twice(read)]


def done_elsewhere(database: Database, request: ClaimRequest) -> str | None:
    """Another work of the same task that this message has done; None if there is none."""
    select = sa.select(WORK.c.id).where(
        WORK.c.message == request.message.name,
        WORK.c.task == request.task,
        WORK.c.state == State.DONE.value,
        WORK.c.id.not_in([str(request.work), *request.formerly]),
    )

    def read() -> str | None:
        with database.transaction() as db:
            found: str | None = db.execute(select.limit(1)).scalar()
            return found

    return database.twice(read)


def holds(database: Database, keys: tuple[str, ...], owner: Owner) -> bool:
    """Whether the owner has one of these keys, by a claim that has not ended."""
    select = sa.select(KEYS.c.key).where(KEYS.c.key.in_(keys), KEYS.c.owner == str(owner))

    def read() -> bool:
        with database.transaction() as db:
            return db.execute(select.limit(1)).first() is not None

    return database.twice(read)


def holders(database: Database, key: str) -> list[Holder]:
    """Return the holders of a key whose leases stand: one, or those of its slots."""
    first, after = range_of_slots(key)
    slots = sa.and_(KEYS.c.key > first, KEYS.c.key < after)
    select = sa.select(KEYS.c.key, KEYS.c.owner, KEYS.c.fence, KEYS.c.lease_until).where(
        sa.or_(KEYS.c.key == key, slots), KEYS.c.owner != FREE
    )

    def read() -> list[Holder]:
        with database.transaction() as db:
            now_us = database.now_us(db)
            rows = db.execute(select.order_by(KEYS.c.key)).all()
        return [
            Holder(row.key, Owner.parse(row.owner), row.fence, (row.lease_until - now_us) / 1e6)
            for row in rows
            if row.lease_until > now_us and (row.key == key or is_slot(row.key, of=key))
        ]

    return database.twice(read)


def requeue(database: Database, work: str, *, reason: str) -> bool:
    """DEAD or FAILED -> NEW: its next delivery runs it. False if it is in another state.

    Its messages' numbers are forgotten, so that the same message may be sent again, and its
    fingerprint, so that one with other arguments may.
    """
    text = storable(database, f"requeued: {reason}")
    ended = sa.or_(
        WORK.c.state.in_([State.DEAD.value, State.FAILED.value]),
        # Or requeued by this very call, whose COMMIT got no answer.
        sa.and_(WORK.c.state == State.NEW.value, WORK.c.error == text),
    )

    def requeue() -> bool:
        with database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
            changed = db.execute(
                sa.update(WORK)
                .where(WORK.c.id == work, ended)
                .values(
                    state=State.NEW.value,
                    final=0,
                    retries=0,
                    owner=FREE,
                    lease_until=0,
                    crashes=0,
                    crashed_owner="",
                    rounds=None,
                    fingerprint=None,
                    due=_due_now(database),
                    **NO_PLACE,
                    error=text,
                    finished=None,
                )
            )
            if changed.rowcount != 1:
                return False
            # By the messages' ids: there is no index on `work`, and a scan would lock every row.
            of_work = sa.and_(MESSAGES.c.work == work, unique.not_superseded())
            found = db.execute(sa.select(MESSAGES.c.message).where(of_work)).scalars().all()
            db.execute(sa.delete(MESSAGES).where(MESSAGES.c.message.in_(found), of_work))
            return True

    return database.twice(requeue)


def release(database: Database, key: str, *, fence: int, owner: str) -> bool:
    """End the lease of a holder that is known to be gone. False if it is not the holder.

    Safe if the holder is alive after all: it renews the lease, and its commit is refused only once
    somebody else has claimed. The next delivery takes its work over, which counts as a crash.
    """

    def release() -> bool:
        with database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
            held = KEYS.c.key == key, KEYS.c.fence == fence, KEYS.c.owner == owner
            ended = db.execute(
                sa.update(KEYS).where(*held, KEYS.c.owner != FREE).values(lease_until=0)
            )
            if ended.rowcount != 1:
                return False
            processing = WORK.c.state == State.PROCESSING.value
            theirs = processing, WORK.c.fence == fence, WORK.c.owner == owner
            # By ids, as in `requeue`.
            found = db.execute(sa.select(WORK.c.id).where(*theirs)).scalars().all()
            db.execute(
                sa.update(WORK)
                .where(WORK.c.id.in_(found), *theirs)
                .values(lease_until=0, due=_due_now(database))
            )
            return True

    return database.twice(release)


def _due_now(database: Database) -> sa.ColumnElement[int | None]:
    """When the work is due: now, if its call is stored; else never."""
    return sa.case((WORK.c.call.is_not(None), database.now()))
