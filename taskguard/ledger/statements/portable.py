"""The portable statements: several for each change, for every database that SQLAlchemy supports.

Guarantees what `ports.py` says of a claim, a completion and a renewal. PostgreSQL and MariaDB
override some of them with a single message. They fall back to these statements if that message
cannot decide.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from taskguard.ledger.connections.database import WRITE_LOCK_S, Database
from taskguard.ledger.connections.libpq import NOT_SENT, Commit
from taskguard.ledger.connections.prepared import Prepared
from taskguard.ledger.history import NO_FLAG
from taskguard.ledger.lines import kept, park, promotion, room
from taskguard.ledger.own_rows import changes as rows
from taskguard.ledger.records import ToSend
from taskguard.ledger.statements import claims, renewals
from taskguard.ledger.tables import (
    FREE,
    KEYS,
    NO_POSITION,
    WORK,
    claimed_by,
    held,
    of_claim,
    processed,
)
from taskguard.model.bounds import NO_RATES, Bounds, Rate
from taskguard.model.claims import Claim, ClaimAnswer, ClaimRequest
from taskguard.model.states import State

__all__ = ["Statements"]


class Statements:
    """The statements on one database, with one Engine."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def claim(self, request: ClaimRequest) -> ClaimAnswer:
        """Decide and record, in one transaction, whether this delivery may run.

        Raises LockTimeoutError or TransactionRetryError if other transactions hold the rows.
        """
        return claims.claim(self.database, request)

    def peek(self, request: ClaimRequest) -> claims.Seen:
        """Return the records and the decision of a claim, without making it."""
        return claims.peek(self.database, request)

    # -- a holder's transaction ---------------------------------------------------------------

    def admit(self, db: sa.Connection, claim: Claim, *, idle_s: float) -> tuple[str | None, bool]:
        """Set the time limits of the ledger's transactions on an open transaction of the user.

        Return its isolation level, if this query reads it, and whether it sees the claim.
        """
        self.database.dialect.begun(db, idle_s=idle_s)
        return None, self.is_current(db, claim)

    def is_current(self, db: sa.Connection, claim: Claim) -> bool:
        """Return True if this connection sees that the claim is still valid."""
        return bool(self.database.read(db, self.database.once(_seeing), claim.name))

    def complete_in_block(self, db: sa.Connection, claim: Claim, result_json: str | None) -> bool:
        """PROCESSING -> DONE in the transaction of `db`. Return False if the claim is stale.

        In this order: the user's row, the keys, the work. Raises RowMovedError if the user's row is
        not this claim's.
        """
        if claim.row is not None:
            rows.move_to_done(db, claim)
        held_by = {"my_fence": claim.fence, "my_owner": str(claim.owner)}
        end_key, end_work = self.database.once(_completing, claim.request.strict)
        if any(end_key.run(db, {"my_key": key, **held_by}) != 1 for key in claim.keys):
            return False
        done = {"json": result_json, **held_by}
        return all(end_work.run(db, {"my_work": work, **done}) == 1 for work in claim.work_ids)

    def complete_with_commit(
        self, db: sa.Connection, claim: Claim, result_json: str | None
    ) -> Commit:
        """Complete, and COMMIT the transaction of `db`, in one message.

        Call this only if `ends_at_once()` is True. Raises StaleTokenError if the claim is stale. If
        no answer came, `error` and `session` of the result are set: both outcomes are unknown.
        """
        del db, claim, result_json
        return NOT_SENT

    def ends_at_once(self, claim: Claim) -> bool:
        """Return True if `complete_with_commit()` can complete this claim.

        That is only for transactions on the ledger's own connections.
        """
        del claim
        return False

    def sees_the_end(self, claim: Claim) -> bool:
        """Return True if `complete_in_block()` notices that the body has ended its transaction.

        It then completes nothing. If this is False, the caller checks for the end first.
        """
        del claim
        return False

    def complete_alone(self, claim: Claim, result_json: str | None) -> bool | None:
        """PROCESSING -> DONE by one statement that commits itself.

        Return False if it changed nothing, and None if this claim has no such statement.
        """
        del claim, result_json
        return None

    def store_result(self, claim: Claim, result_json: str) -> None:
        """Store the result of a work that this claim completed."""
        completed = (
            WORK.c.id.in_(claim.work_ids),
            WORK.c.state == State.DONE.value,
            WORK.c.fence == claim.fence,
            WORK.c.owner == str(claim.owner),
        )
        with self.database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
            db.execute(sa.update(WORK).where(*completed).values(result=result_json))

    def note(self, claim: Claim, progress_json: str) -> bool:
        """Store progress of a work that this claim holds."""
        noted = sa.update(WORK).where(claimed_by(claim)).values(progress=progress_json)
        with self.database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
            return bool(db.execute(noted).rowcount)

    # -- lines --------------------------------------------------------------------------------

    def park(self, request: ClaimRequest, *, only_new: bool = False) -> bool:
        """Store the work with its call in the line of its key. Return False if it must not wait."""
        return park.park(self.database, request, only_new=only_new)

    def promote_next(
        self,
        key: str,
        *,
        app: str,
        queues: Sequence[str] | None,
        expected_s: float,
        bounds: Bounds | None = None,
        ahead_s: float | None = None,
        rates: Mapping[str, Rate | None] = NO_RATES,
    ) -> ToSend | None:
        """Promote the first message in line, if the key is free."""
        has_room: room.Room = room.of_key
        if ahead_s is not None:
            has_room = functools.partial(
                room.of_bounds, bounds=bounds, ahead_us=int(ahead_s * 1e6), rates=rates
            )
        return promotion.promote_next(
            self.database, key, app=app, queues=queues, expected_s=expected_s, room=has_room
        )

    def keep(self, claim: Claim, *, retries: int, call: str | None, due_in_s: float) -> bool:
        """Record that the message of FAILED work was sent again. The work keeps its position."""
        return kept.keep(self.database, claim, retries=retries, call=call, due_in_s=due_in_s)

    def leave(self, claim: Claim, *, retries: int) -> bool:
        """Remove FAILED work from the position that it kept."""
        return kept.leave(self.database, claim, retries=retries)

    # -- leases -------------------------------------------------------------------------------

    def renew(self, claims: Sequence[Claim]) -> list[str]:
        """Renew many claims. Claims whose rows another transaction has locked are skipped."""
        return renewals.renew(self.database, claims)


def _seeing(database: Database) -> Prepared:
    return Prepared(sa.select(WORK.c.id).where(of_claim()), database.engine.dialect)


def _completing(database: Database, strict: bool) -> tuple[Prepared, Prepared]:
    """Return the UPDATEs of a key and of the work. No parameter has the name of a column in SET.

    One UPDATE could do both on MariaDB. But MariaDB would keep the second row in a temporary table,
    which takes five times as long.
    """
    fence: Any = sa.bindparam("my_fence")
    owner: Any = sa.bindparam("my_owner")
    key = sa.update(KEYS).where(held([sa.bindparam("my_key")], fence, owner))
    work = sa.update(WORK).where(processed(sa.bindparam("my_work"), fence, owner))
    done = work.values(
        state=State.DONE.value,
        result=sa.bindparam("json"),
        lease_until=0,
        call=None,
        due=None,
        **NO_FLAG,
        finished=database.now(),
    )
    if strict:
        done = done.values(**NO_POSITION)
    dialect = database.engine.dialect
    return Prepared(key.values(owner=FREE, lease_until=0), dialect), Prepared(done, dialect)
