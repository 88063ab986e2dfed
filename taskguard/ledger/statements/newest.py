"""Claims of messages of which a newer one takes an older one's place.

`busy="latest"`: one is at work, and one waits, the newest. `busy="supersede"`: a newer one takes
the key also from a holder that is alive. What is newer says `states.is_outdated()`, by when
messages were sent.

Guarantees: who takes a key from another raises its fence in the same transaction in which the
other's work ends: FAILED, final, with the reason. All of that is by the portable statements, on
every database.

Read next: `ledger/lines/newest.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from taskguard.ledger.decisions import CLAIMABLE
from taskguard.ledger.lines import newest, turn
from taskguard.ledger.statements.claims import LockedClaim, decision_of
from taskguard.ledger.tables import WORK
from taskguard.model.claims import Answer, Busy, ClaimAnswer, Claimed
from taskguard.model.lease import Owner
from taskguard.model.states import Decision, State, is_outdated, sent_at_us

__all__ = ["NewestClaim"]


class NewestClaim(LockedClaim):
    """One claim with its rows locked: its key, then its task's mark, then its work."""

    def _lock_beside(self) -> None:
        self.mark = newest.Mark(self.database, self.db, self.request)

    def decide(self) -> ClaimAnswer:
        decision = decision_of(self.request, self.records, self.own)
        self.created_us = self.now_us if self.row is None else self.row.created
        self.sent_us = sent_at_us(self.request.sent_us, created_us=self.created_us)
        self.line = newest.Line(self.db, self.request, self.now_us)
        if decision in CLAIMABLE - {Decision.SAME} or decision is Decision.BURY:
            newer = self._newer()
            if newer is not None:
                return self._end(newer)
            if self._is_held_elsewhere():
                return self._busy(None)
        return super().decide()

    def _newer(self) -> str | None:
        """The work of a newer message that has begun, or waits."""
        waits = self.line.newest()
        others = {self.mark.work: self.mark.stamp_us}
        if waits is not None:
            others[waits.id] = waits.parked
        if not is_outdated(self.sent_us, others_us=list(others.values())):
            return None
        return max(others, key=lambda work: others[work] or 0)

    def _is_held_elsewhere(self) -> bool:
        """Whether the lock server's holder is about to claim the key, or to end."""
        held_by, [key] = self.request.held_by, self.keys
        if held_by is None or key.owner == str(held_by):
            return False
        return not super()._holders()

    def _end(self, newer: str) -> Answer:
        return newest.end(
            self.db,
            self.request,
            self.row,
            by=newer,
            now_us=self.now_us,
            created_us=self.created_us,
        )

    def _holders(self) -> list[Any]:
        live = super()._holders()
        return [] if self._supersedes(live) else live

    def _supersedes(self, live: list[Any]) -> bool:
        """Whether the key's holder is an older message of the task, which is to lose it."""
        by_key = self.request.newest == "supersede"
        return by_key and any(key.fence == self.mark.fence for key in live)

    def _held_up(self, decision: Decision) -> Busy | None:
        del decision
        # Those of its own task are older. Who takes a key from its holder takes nobody's turn.
        if not self.request.in_line or self._supersedes(super()._holders()):
            return None
        behind = turn.is_behind(self.db, self.request, self.now_us, but=self.request.task)
        return self._busy(None) if behind else None

    def _grant(self, decision: Decision) -> Claimed:
        [key] = super()._holders() or [None]
        granted = super()._grant(decision)
        work = str(self.request.work)
        if self.mark.work != work:
            self._end_older(by=work)
        # Who asks again has replaced them all: whoever waits since then is newer.
        replaced = () if decision is Decision.SAME else self.line.replace(by=work)
        self.mark.move(fence=granted.claim.fence, work=work, stamp_us=self.sent_us)
        over = None if key is None else Owner.parse(key.owner)
        return replace(granted, over=over, replaced=replaced)

    def _end_older(self, *, by: str) -> None:
        """PROCESSING -> FAILED, final, for the last one that has begun, dead or alive."""
        older = sa.select(WORK).where(WORK.c.id == self.mark.work).with_for_update()
        row = self.db.execute(older).first()
        if row is None or row.state != State.PROCESSING.value or row.fence != self.mark.fence:
            return
        self.db.execute(
            sa.update(WORK)
            .where(
                WORK.c.id == row.id,
                WORK.c.state == row.state,
                WORK.c.fence == row.fence,
                WORK.c.owner == row.owner,
            )
            .values(**newest.outdated_values(by, self.now_us), **newest.TOLD)
        )
