"""Records how messages were deferred, revoked and expired: `ports.Messages`.

Guarantees: a message is published again under its row lock, and its number is committed after that.
Work is ended by one conditional statement that names its state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from taskguard.ledger import runs
from taskguard.ledger.connections.database import WRITE_LOCK_S
from taskguard.ledger.connections.retrying import retried
from taskguard.ledger.history import NO_FLAG, flagged
from taskguard.ledger.messages import raise_deferrals
from taskguard.ledger.parts.base import Part
from taskguard.ledger.records import message_of
from taskguard.ledger.tables import FREE, NO_POSITION, WORK
from taskguard.model.claims import ClaimRequest, MessageRef
from taskguard.model.history import Flag
from taskguard.model.policy import AGAIN_AFTER_S
from taskguard.model.runs import run_id
from taskguard.model.states import EXPIRED, State

__all__ = ["SqlMessages", "is_over", "waits_for"]


class SqlMessages(Part):
    """Deferrals, revocations and expiries of messages."""

    def defer(self, request: ClaimRequest, publish: Callable[[int], None]) -> bool:
        """Publish the message again under its row lock, then commit its number of deferrals."""
        deferrals = request.message.deferrals + 1
        if request.work is None:  # a plain lock, whose claim reads no numbers
            publish(deferrals)
            return True
        with self._database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
            if request.by_run:
                request = runs.of_run(db, request)
            now_us, work = self._database.now_us(db), str(request.work)
            if not raise_deferrals(
                self._database, db, request.message, deferrals, work=work, now_us=now_us
            ):
                return False
            with self._database.elsewhere_meanwhile(db):
                publish(deferrals)
            return True

    @retried
    def join(self, request: ClaimRequest) -> None:
        """Make the message a member of the open run of its work, if there is one."""
        if not request.by_run:
            return
        with self._database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
            run = runs.run_of(self._database, db, request)
            if run.found.waits:
                run.put_off(db, again_after_s=AGAIN_AFTER_S)
            elif run.found.joins and not run.is_new and run.goes_on(db):
                run.settle(self._database, db)

    @retried
    def revoke(self, work: str, *, message: str) -> bool:
        """Move NEW, PROCESSING or FAILED work of this message -> FAILED, for good."""
        states = State.NEW.value, State.PROCESSING.value, State.FAILED.value
        mine = WORK.c.id == work, WORK.c.state.in_(states)
        values = {
            "state": State.FAILED.value,
            "final": 1,
            "owner": FREE,
            "lease_until": 0,
            "error": "revoked",
            **NO_FLAG,
            "due": None,
            **NO_POSITION,
            "finished": self._database.now(),
        }
        with self._database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
            columns = sa.select(WORK.c.base, WORK.c.call, WORK.c.message)
            # Locked: an enqueue may be about to replace the call of a run.
            row = db.execute(columns.where(WORK.c.id == work).with_for_update()).first()
            if row is None or not _may_end(row, work, message):
                return row is not None and self._leave_run(db, work, message)
            return db.execute(sa.update(WORK).where(*mine).values(**values)).rowcount == 1

    def _leave_run(self, db: sa.Connection, work: str, message: str) -> bool:
        """Move PROCESSING by this message -> NEW, because other messages of the run may do it."""
        mine = WORK.c.id == work, WORK.c.message == message, WORK.c.base.is_not(None)
        at_work = WORK.c.state == State.PROCESSING.value
        due = sa.case((WORK.c.call.is_not(None), self._database.now()))
        new = {"state": State.NEW.value, "owner": FREE, "lease_until": 0, "due": due}
        new |= NO_FLAG
        return db.execute(sa.update(WORK).where(*mine, at_work).values(**new)).rowcount == 1

    @retried
    def expire(
        self,
        work: str,
        *,
        message: MessageRef,
        retries: int | None = None,
        due: bool = False,
        error: str = EXPIRED,
    ) -> bool:
        """Move the work of an expired message to FAILED, once its caller was notified.

        The work may be NEW, PROCESSING with an expired lease, or FAILED with its position in a
        line. It may also be a FAILED run that its queue retries. The message is not sent again, and
        blocks no other message. Other copies of it are superseded, even after another message of
        the work has failed. FAILED is not final: another message of the work runs. But a run ends.

        Return False if the work is in another state, or if a later retry or another message is on
        record for it.

        Args:
            work: the id of the work.
            message: the expired message.
            retries: a copy of the message with fewer retries than this never runs. None: one more
                than the number of `message`.
            due: change only work that waits in a line, and whose message has expired by the
                database's clock.
            error: the reason on record. By default that the message has expired.
        """
        with self._database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
            row = db.execute(sa.select(WORK).where(WORK.c.id == work).with_for_update()).first()
            now_us = self._database.now_us(db)
            if row is None or not waits_for(row, message, now_us):
                return False
            if due and not is_over(row, now_us):
                return False
            again = message.retries + 1 if retries is None else retries
            values: dict[str, object] = {"call": None, "sends": None, "due": None, **NO_POSITION}
            values["retries"] = again
            if row.state != State.FAILED.value or not row.final:  # otherwise it stays superseded
                final = int(row.base is not None)
                values |= {"state": State.FAILED.value, "final": final}
                values |= {"owner": FREE, "lease_until": 0}
                values |= {"error": self._storable(error), "finished": now_us}
                values |= flagged(Flag.FAILED, now_us)
            same = WORK.c.state == row.state, WORK.c.fence == row.fence, WORK.c.owner == row.owner
            db.execute(sa.update(WORK).where(WORK.c.id == work, *same).values(**values))
            # Another message may claim the work, and the record then names that one.
            lowest = replace(message, retries=again)
            raise_deferrals(self._database, db, lowest, 0, work=work, now_us=now_us)
            return True

    @retried
    def done_elsewhere(self, request: ClaimRequest) -> str | None:
        """Return another work of the same task that this message completed, or None."""
        select = sa.select(WORK.c.id).where(
            WORK.c.message == request.message.name,
            WORK.c.task == request.task,
            WORK.c.state == State.DONE.value,
            WORK.c.id.not_in([str(request.work), *request.formerly]),
        )
        with self._database.transaction() as db:
            found: str | None = db.execute(select.limit(1)).scalar()
            return found


def _may_end(row: Any, work: str, message: str) -> bool:
    """Return whether the work ends if this message is revoked.

    A run ends with the message of its stored call or, without one, with that which opened it.
    """
    if row.base is None:
        return bool(row.message == message)
    if row.call is not None:
        return message_of(row) == message
    return work == run_id(row.base, message)


def is_over(row: Any, now_us: int) -> bool:
    """Return True if work is in a line, and its expiry has passed."""
    in_line = row.line is not None and row.state == State.NEW.value
    return bool(in_line and row.expires is not None and row.expires <= now_us)


def waits_for(row: Any, message: MessageRef, now_us: int) -> bool:
    """Return True if the work has no holder, and this message is on record for it."""
    if message_of(row) != message.name or row.message != message.name:
        return False
    if row.retries > message.retries:
        return False
    if row.state == State.PROCESSING.value:
        return bool(row.lease_until <= now_us)
    is_awaited = row.line is not None or (row.base is not None and not row.final)
    return row.state == State.NEW.value or (row.state == State.FAILED.value and is_awaited)
