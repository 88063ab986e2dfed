"""Writes a holder's effects and completes its work: `ports.Effects`."""

from __future__ import annotations

from typing import Any

from taskguard.errors import LedgerUnavailableError, TransactionRetryError
from taskguard.ledger.connections.retrying import retried
from taskguard.ledger.parts.base import Part
from taskguard.ledger.refusals import stale
from taskguard.ledger.transactions.core import GuardedTransaction
from taskguard.model.claims import Claim

__all__ = ["SqlEffects"]


class SqlEffects(Part):
    """Transactions of holders, and completions without one."""

    def transaction(
        self, claim: Claim, *, look_first: bool = True, on: Any = None
    ) -> GuardedTransaction:
        """Return a transaction for the holder's writes; see `ports.py`."""
        return self._transactions.open(claim, on=on, look_first=look_first)

    def complete_alone(self, claim: Claim, result_json: str | None) -> None:
        """Move PROCESSING -> DONE in a transaction of its own."""
        completed = self._in_one_statement(claim, result_json)
        if completed:
            return
        if completed is False and claim.row is None:
            raise stale(claim)
        # A transaction finds out the state of the user's row.
        try:
            self._in_transaction(claim, result_json)
        except TransactionRetryError:  # nothing was committed; only the completion is tried again
            self._in_transaction(claim, result_json)

    @retried
    def _in_transaction(self, claim: Claim, result_json: str | None) -> None:
        with self._transactions.open(claim, of_body=False) as tx:
            tx.complete_in_block(claim, result_json)

    def _in_one_statement(self, claim: Claim, result_json: str | None) -> bool | None:
        try:
            return self._statements.complete_alone(claim, result_json)
        except (LedgerUnavailableError, TransactionRetryError) as error:
            try:
                self._transactions.resolve(claim, error)
            except TransactionRetryError:
                return self._statements.complete_alone(claim, result_json)
            return True

    @retried
    def store_result(self, claim: Claim, result_json: str) -> None:
        """Store the result of work that this claim completed."""
        self._statements.store_result(claim, result_json)

    @retried
    def note(self, claim: Claim, progress_json: str) -> bool:
        """Store progress in a transaction of its own. Return False if the claim is stale."""
        return self._statements.note(claim, progress_json)
