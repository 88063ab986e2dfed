"""Shows records to operators, and changes them: `ports.Records`.

Guarantees: each change is one conditional statement that names the state that it ends; a holder
whose lease is ended by mistake is refused only once another delivery has claimed.
"""

from __future__ import annotations

import sqlalchemy as sa

from taskguard.errors import AlreadyEnqueuedError
from taskguard.ledger import runs, unique
from taskguard.ledger.connections.database import WRITE_LOCK_S
from taskguard.ledger.connections.retrying import retried
from taskguard.ledger.decisions import view_of
from taskguard.ledger.lines import reading
from taskguard.ledger.parts.base import Part
from taskguard.ledger.tables import FREE, KEYS, MESSAGES, NO_POSITION, WORK
from taskguard.locks.base import Holder
from taskguard.model.bounds import is_slot, range_of_slots
from taskguard.model.claims import LEADER_TASK
from taskguard.model.lease import Owner
from taskguard.model.policy import MOST_ROWS, check_number
from taskguard.model.records import Waiting, WorkView
from taskguard.model.states import State

__all__ = ["SqlRecords"]


class SqlRecords(Part):
    """Records of work and keys, as an operator reads and changes them."""

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
    def requeue(self, work: str, *, reason: str) -> bool:
        """Move DEAD or FAILED -> NEW, so that the next delivery runs the work.

        Delete the numbers of its messages, so that the same message may be sent again. Delete its
        fingerprint, so that a message with other arguments may be sent.

        Raises:
            AlreadyEnqueuedError: it is a run, and a later run of the same work is open.
        """
        text = self._storable(f"requeued: {reason}")
        ended = sa.or_(
            WORK.c.state.in_([State.DEAD.value, State.FAILED.value]),
            # Or this very call requeued it, and its COMMIT got no answer.
            sa.and_(WORK.c.state == State.NEW.value, WORK.c.error == text),
        )
        values = {
            "state": State.NEW.value,
            "final": 0,
            "retries": 0,
            "owner": FREE,
            "lease_until": 0,
            "crashes": 0,
            "crashed_owner": "",
            "rounds": None,
            "fingerprint": None,
            "sends": None,
            "due": self._due_now(),
            **NO_POSITION,
            "error": text,
            "finished": None,
        }
        with self._database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
            base = db.execute(sa.select(WORK.c.base).where(WORK.c.id == work)).scalar()
            if base is not None:
                self._refuse_later_run(db, base, work)
            changed = db.execute(sa.update(WORK).where(WORK.c.id == work, ended).values(**values))
            if changed.rowcount != 1:
                return False
            # Delete by ids, because `work` has no index, and a scan would lock every row.
            of_work = sa.and_(MESSAGES.c.work == work, unique.not_superseded())
            found = db.execute(sa.select(MESSAGES.c.message).where(of_work)).scalars().all()
            these = MESSAGES.c.message.in_(found), of_work
            if base is not None:  # they stay its members
                db.execute(sa.update(MESSAGES).where(*these).values(retries=0, deferrals=0))
            else:
                db.execute(sa.delete(MESSAGES).where(*these))
            return True

    def _refuse_later_run(self, db: sa.Connection, base: str, work: str) -> None:
        later = runs.later_run(self._database, db, base, work)
        if later is not None:
            raise AlreadyEnqueuedError(
                f"{work} was not requeued: a later run of the same work is open, {later}. Its "
                "result is newer. Requeue nothing, or send the call again.",
                key=work,
                message_id=later,
                begun=True,
            )

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

    @retried
    def release(self, key: str, *, fence: int, owner: str) -> bool:
        """End the lease of a holder that is known to be gone. Return False if it is not the holder.

        Safe if the holder is alive after all: it renews the lease, and its commit is refused only
        once another delivery has claimed. The next delivery takes its work over, which counts as a
        crash.
        """
        with self._database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
            held = KEYS.c.key == key, KEYS.c.fence == fence, KEYS.c.owner == owner
            ended = db.execute(
                sa.update(KEYS).where(*held, KEYS.c.owner != FREE).values(lease_until=0)
            )
            if ended.rowcount != 1:
                return False
            processing = WORK.c.state == State.PROCESSING.value
            theirs = processing, WORK.c.fence == fence, WORK.c.owner == owner
            # Update by ids, as in `requeue`.
            found = db.execute(sa.select(WORK.c.id).where(*theirs)).scalars().all()
            values = {"lease_until": 0, "due": self._due_now()}
            db.execute(sa.update(WORK).where(WORK.c.id.in_(found), *theirs).values(**values))
            return True

    def _due_now(self) -> sa.ColumnElement[int | None]:
        """When the work is due: now, if its call is stored; else never."""
        return sa.case((WORK.c.call.is_not(None), self._database.now()))
