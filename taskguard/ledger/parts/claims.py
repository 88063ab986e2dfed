"""Decides which delivery may run, and renews its lease: `ports.Claims`."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from taskguard.errors import TransactionRetryError
from taskguard.ledger import runs
from taskguard.ledger.connections.errors import LockTimeoutError
from taskguard.ledger.connections.retrying import retried
from taskguard.ledger.decisions import view_of
from taskguard.ledger.own_rows import changes as rows
from taskguard.ledger.parts.base import Part
from taskguard.ledger.statements.claims import peeked
from taskguard.ledger.statements.runs import claim_run, peek_run
from taskguard.ledger.tables import KEYS
from taskguard.model.claims import Busy, Claim, ClaimAnswer, ClaimRequest, RowRef
from taskguard.model.lease import Owner
from taskguard.model.records import WorkView

__all__ = ["SqlClaims"]


class SqlClaims(Part):
    """Claims, by the statements for this kind of database."""

    @retried
    def claim(self, request: ClaimRequest) -> ClaimAnswer:
        """Decide and record, in one atomic step, whether this delivery may run."""
        if request.row is not None:
            self._check_own(request.row)
        if request.call is not None:
            self._check_call(request)
        try:
            if request.by_run:
                return claim_run(self._database, request)
            return self._statements.claim(request)
        except (LockTimeoutError, TransactionRetryError):
            return Busy(None, None, same_work=False, started=True)

    @retried
    def peek(self, request: ClaimRequest) -> ClaimAnswer:
        """Return what a claim would find, without claiming."""
        if request.row is not None:
            self._check_own(request.row)
        if request.by_run:
            return peek_run(self._database, request)
        return peeked(request, self._statements.peek(request))

    def _check_own(self, row: RowRef) -> None:
        """Check the table of the user's own row, once in a process."""
        declared = rows.declared_of(row)
        if declared not in self._checked:
            self._check_rows([declared])

    @retried
    def renew(self, claims: Sequence[Claim]) -> list[str]:
        """Renew many claims. Rows that another transaction has locked are skipped."""
        return self._statements.renew(claims)

    @retried
    def holds(self, keys: tuple[str, ...], owner: Owner) -> bool:
        """Return True if the owner has one of these keys by a claim that has not ended."""
        select = sa.select(KEYS.c.key).where(KEYS.c.key.in_(keys), KEYS.c.owner == str(owner))
        with self._database.transaction() as db:
            return db.execute(select.limit(1)).first() is not None

    @retried
    def of_run(self, request: ClaimRequest) -> ClaimRequest:
        """Return the request with the id of the run that its message has joined, if it has."""
        if not request.by_run:
            return request
        with self._database.transaction() as db:
            return runs.of_run(db, request)

    def view(self, work: str) -> WorkView | None:
        """Return the record of work, or None if there is none."""
        row = self._record(work)
        return None if row is None else view_of(row)
