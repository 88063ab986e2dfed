"""Ends a claim without completing it: `ports.Endings`.

Guarantees: each ending is one conditional statement that names the old state, the fence and the
owner. In the same transaction the user's own row goes back to its first state. A second call of an
ending changes nothing.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from taskguard.ledger.connections.database import WRITE_LOCK_S
from taskguard.ledger.connections.retrying import retried
from taskguard.ledger.decisions import view_of
from taskguard.ledger.history import NO_FLAG, appended, flagged, happening
from taskguard.ledger.own_rows import changes
from taskguard.ledger.parts.base import Part
from taskguard.ledger.tables import FREE, KEYS, NO_POSITION, WORK, claimed_by, holding
from taskguard.model.claims import Claim
from taskguard.model.history import Flag, Happened
from taskguard.model.runs import FAILED_RUN
from taskguard.model.states import State

UNDECIDED_S = 30.0
"""Seconds that FAILED work in line waits for a report whether its message comes again.

After that it is overdue, because the process that should report is gone.
"""

__all__ = ["SqlEndings"]


class SqlEndings(Part):
    """Endings of claims, in a transaction each."""

    def fail(self, claim: Claim, error: str, *, again_in_s: float | None = 0.0) -> bool:
        """Move PROCESSING -> FAILED, and end the lease."""
        final, until = self._awaited(claim, again_in_s)
        position: dict[str, Any] = {**NO_POSITION} if final else {}
        return self._end(
            claim,
            state=State.FAILED.value,
            final=final,
            error=self._storable(error),
            history=self._appended(Happened.FAILED, claim, error),
            **flagged(Flag.FAILED, self._database.now()),
            lease_until=until,
            rounds=None,
            due=self._undecided(claim, again_in_s),
            finished=self._database.now(),
            **position,
        )

    def _appended(self, what: Happened, claim: Claim, text: str = "") -> sa.ColumnElement[str]:
        """Return the history with a line about the holder of this claim."""
        owner, now, text = str(claim.owner), self._database.now(), self._storable(text)
        return appended(happening(now, what, owner=owner, fence=claim.fence, text=text))

    def _awaited(self, claim: Claim, again_in_s: float | None) -> tuple[int, Any]:
        """Return `final` of FAILED work, and until when a retry of its message is expected."""
        if claim.request.base is None:
            return 0, 0
        if again_in_s is None:
            return FAILED_RUN, 0
        return 0, self._database.now() + int(again_in_s * 1e6)

    def _undecided(self, claim: Claim, again_in_s: float | None) -> Any:
        """Return when FAILED work is overdue. None unless it keeps its position, or is a run.

        Only the message of a run's stored call may continue the run. So that one is sent again.
        """
        now, is_run = self._database.now(), claim.request.base is not None
        if is_run and again_in_s is None:
            return None
        if claim.request.strict:
            return now + int(UNDECIDED_S * 1e6)
        if not is_run or again_in_s is None:
            return None
        return sa.case((WORK.c.call.is_not(None), now + int(again_in_s * 1e6)))

    def give_back(self, claim: Claim, *, happened: Happened | None = None) -> bool:
        """Move PROCESSING -> NEW, and end the lease. Add to the history what happened, if given."""
        values: dict[str, Any] = {
            "state": State.NEW.value,
            "owner": FREE,
            "lease_until": self._back(claim),
            **NO_FLAG,
        }
        if happened is not None:
            values["history"] = self._appended(happened, claim)
        return self._end(claim, **values)

    def _back(self, claim: Claim) -> Any:
        """Return until when the message of a run that was given back is expected. 0: it is none."""
        back_s = 0.0 if claim.request.base is None else claim.request.ttl_s
        return self._database.now() + int(back_s * 1e6) if back_s else 0

    def crash(self, claim: Claim, error: str) -> bool:
        """End the lease of PROCESSING work: the next claim is a takeover. The user's row stays."""
        due = sa.case((WORK.c.call.is_not(None), self._database.now()))
        now = self._database.now()
        return self._end(
            claim,
            row_too=False,
            error=self._storable(error),
            history=self._appended(Happened.CRASHED, claim, error),
            **flagged(Flag.LEFT, now),
            lease_until=now,
            due=due,
        )

    def end_round(
        self, claim: Claim, reason: str, *, most: int, again_in_s: float | None = 0.0
    ) -> State | None:
        """Move PROCESSING -> NEW, the `most`th time in a row FAILED, and end the lease."""
        final, until = self._awaited(claim, again_in_s)
        rounds = sa.func.coalesce(WORK.c.rounds, 0) + 1
        last = rounds >= most
        left = NO_POSITION if final else ()
        position: dict[str, Any] = {
            each: sa.case((last, None), else_=WORK.c[each]) for each in left
        }
        ended = self._end(
            claim,
            state=sa.case((last, State.FAILED.value), else_=State.NEW.value),
            error=self._storable(reason),
            history=sa.case(
                (last, self._appended(Happened.FAILED, claim, reason)),
                else_=self._appended(Happened.ROUND, claim, reason),
            ),
            flag=sa.case((last, int(Flag.FAILED))),
            since=sa.case((last, self._database.now())),
            # FAILED work keeps its owner: `keep()` and `leave()` name it.
            owner=sa.case((last, WORK.c.owner), else_=FREE),
            final=sa.case((last, final), else_=0),
            lease_until=sa.case((last, until), else_=self._back(claim)),
            due=sa.case((last, self._undecided(claim, again_in_s)), else_=WORK.c.due),
            finished=sa.case((last, self._database.now()), else_=None),
            **position,
            # This comes last: MariaDB and MySQL evaluate an assignment with the values set before.
            rounds=sa.case((last, None), else_=rounds),
        )
        row = self._record(claim.work) if ended and claim.work is not None else None
        return None if row is None else view_of(row).state

    def _end(self, claim: Claim, *, row_too: bool = True, **values: object) -> bool:
        """End the lease; the work gets `values`, in this order, and the user's own row its first
        state."""
        tries = 0

        @retried
        def end() -> bool:
            nonlocal tries
            tries += 1
            with self._database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
                if claim.row is not None and row_too:
                    # Locked before the ledger's rows, as in every transaction.
                    changes.read(db, claim.row, lock=True)
                freed = db.execute(
                    sa.update(KEYS).where(holding(claim)).values(owner=FREE, lease_until=0)
                )
                if claim.work is None:
                    # The first try may have freed the keys, and got no answer.
                    return freed.rowcount == len(claim.keys) or tries > 1
                ended = not claim.formerly or _all_stand(db, claim)
                if ended:
                    update = sa.update(WORK).where(claimed_by(claim))
                    ended = db.execute(update.ordered_values(*values.items())).rowcount > 0
                if claim.row is not None and row_too and (ended or _revoked(db, claim)):
                    changes.put_back(db, claim)
                return ended

        return end()

    @retried
    def uncount_crash(self, claim: Claim, *, happened: Happened | None = None) -> None:
        """Uncount this holder's crash, once. Add to the history what happened to it, if given."""
        counted = (
            WORK.c.id.in_(claim.work_ids),
            WORK.c.crashed_owner == str(claim.owner),
            WORK.c.crashes > 0,
            WORK.c.state != State.DEAD.value,
        )
        said = {} if happened is None else {"history": self._appended(happened, claim)}
        values = {"crashes": WORK.c.crashes - 1, "crashed_owner": "", **said}
        with self._database.transaction(lock_timeout_s=WRITE_LOCK_S) as db:
            uncounted = db.execute(sa.update(WORK).where(*counted).values(**values))
            if said and not uncounted.rowcount:
                # The work has ended meanwhile, or further holders have taken it over.
                db.execute(sa.update(WORK).where(WORK.c.id.in_(claim.work_ids)).values(**said))


def _all_stand(db: sa.Connection, claim: Claim) -> bool:
    """Return True if the claim is valid under each id. A former guard changes only its own id."""
    select = sa.select(WORK.c.id).where(claimed_by(claim)).order_by(WORK.c.id)
    return len(db.execute(select.with_for_update()).all()) == len(claim.work_ids)


def _revoked(db: sa.Connection, claim: Claim) -> bool:
    """Return True if the work was revoked under this claim, which then puts the row back."""
    where = WORK.c.id.in_(claim.work_ids), WORK.c.fence == claim.fence, WORK.c.final == 1
    return db.execute(sa.select(WORK.c.id).where(*where)).first() is not None
