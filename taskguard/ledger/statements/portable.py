"""The statements that are right on every database that SQLAlchemy knows: several for each change.

Guarantees what `ports.py` says of a claim, a completion and a renewal. A kind of database
that does one of them in a single message overrides that, and leaves to these what the message
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
from taskguard.ledger.lines import kept, park, promotion, room
from taskguard.ledger.own_rows import changes as rows
from taskguard.ledger.records import ToSend
from taskguard.ledger.statements import claims, renewals
from taskguard.ledger.tables import (
    FREE,
    KEYS,
    NO_POSITION,
    WORK,
    held,
    of_claim,
    processed,
    standing,
)
from taskguard.model.bounds import NO_RATES, Bounds, Rate
from taskguard.model.claims import Claim, ClaimAnswer, ClaimRequest
from taskguard.model.states import State

__all__ = ["Statements"]


class Statements:
    """The statements on one database, by one Engine."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def claim(self, request: ClaimRequest) -> ClaimAnswer:
        """Decide and record, in one transaction, whether this delivery may run.

        Raises LockTimeoutError or TransactionRetryError where others hold the rows.
        """
        return claims.claim(self.database, request)

    def peek(self, request: ClaimRequest) -> claims.Seen:
        """What a claim would find."""
        return claims.peek(self.database, request)

    # -- a holder's transaction ---------------------------------------------------------------

    def admit(self, db: sa.Connection, claim: Claim, *, idle_s: float) -> tuple[str | None, bool]:
        """Set the bounds of the ledger's transactions on an open one of the user's connection.

        Returns its isolation level, if that is known from this, and whether it sees the claim.
        """
        self.database.dialect.begun(db, idle_s=idle_s)
        return None, self.stands(db, claim)

    def stands(self, db: sa.Connection, claim: Claim) -> bool:
        """Whether the claim is seen to stand."""
        return bool(self.database.read(db, self.database.once(_seeing), claim.name))

    def complete_in_block(self, db: sa.Connection, claim: Claim, result_json: str | None) -> bool:
        """PROCESSING -> DONE in the transaction of `db`. False: the claim does not stand.

        In this order: the user's row, the keys, the work. Raises RowMovedError for the user's row.
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
        """Complete, and COMMIT the transaction of `db`, in one message; `ends_at_once()` allows it.

        Raises StaleTokenError where the claim does not stand. Where nobody knows what became of
        either, its error and its `session` say so.
        """
        del db, claim, result_json
        return NOT_SENT

    def ends_at_once(self, claim: Claim) -> bool:
        """Whether `complete_with_commit()` is to be tried on a transaction of the ledger's own."""
        del claim
        return False

    def sees_the_end(self, claim: Claim) -> bool:
        """Whether `complete_in_block()` completes nothing where the body has ended its transaction.

        If not, the caller asks before whether it has ended.
        """
        del claim
        return False

    def complete_alone(self, claim: Claim, result_json: str | None) -> bool | None:
        """PROCESSING -> DONE by one statement that commits itself. False: it changed nothing.

        None: there is no such statement for this claim.
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
        noted = sa.update(WORK).where(standing(claim)).values(progress=progress_json)
        with self.database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
            return bool(db.execute(noted).rowcount)

    # -- lines --------------------------------------------------------------------------------

    def park(self, request: ClaimRequest, *, only_new: bool = False) -> bool:
        """Store the work with its call in the line of its key; False if it is not to wait."""
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
        """Note that the first in line is called, if the key is free."""
        has_room: room.Room = room.of_key
        if ahead_s is not None:
            has_room = functools.partial(
                room.of_bounds, bounds=bounds, ahead_us=int(ahead_s * 1e6), rates=rates
            )
        return promotion.promote_next(
            self.database, key, app=app, queues=queues, expected_s=expected_s, room=has_room
        )

    def keep(self, claim: Claim, *, retries: int, call: str | None, due_in_s: float) -> bool:
        """The message of FAILED work that keeps its position was sent once more."""
        return kept.keep(self.database, claim, retries=retries, call=call, due_in_s=due_in_s)

    def leave(self, claim: Claim, *, retries: int) -> bool:
        """FAILED work that keeps its position gives it up."""
        return kept.leave(self.database, claim, retries=retries)

    # -- leases -------------------------------------------------------------------------------

    def renew(self, claims: Sequence[Claim]) -> list[str]:
        """Renew many claims; rows that somebody has locked are skipped."""
        return renewals.renew(self.database, claims)


def _seeing(database: Database) -> Prepared:
    return Prepared(sa.select(WORK.c.id).where(of_claim()), database.engine.dialect)


def _completing(database: Database, strict: bool) -> tuple[Prepared, Prepared]:
    """The UPDATEs of a key and of the work. Parameters cannot have the names of columns in SET.

    Two statements also where one UPDATE could do both: MariaDB then keeps the second row in a
    temporary table, which takes five times as long.
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
        finished=database.now(),
    )
    if strict:
        done = done.values(**NO_POSITION)
    dialect = database.engine.dialect
    return Prepared(key.values(owner=FREE, lease_until=0), dialect), Prepared(done, dialect)
