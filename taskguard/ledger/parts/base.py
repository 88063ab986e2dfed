"""The base of each part of a `SqlLedger`: the database, transactions of holders, and three checks.

Guarantees: a call that is too large, or a table that is not as declared, raises an error of its
own, so that it never looks like an outage.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import sqlalchemy as sa

from taskguard.errors import CallTooLargeError
from taskguard.ledger.connections.database import Database
from taskguard.ledger.connections.retrying import retried
from taskguard.ledger.own_rows import changes as rows
from taskguard.ledger.own_rows.guarded_row import GuardedRow
from taskguard.ledger.schema.identity import Identity
from taskguard.ledger.schema.privileges import check_privileges_on_row
from taskguard.ledger.statements import Statements
from taskguard.ledger.tables import WORK
from taskguard.ledger.transactions.core import Transactions
from taskguard.model.claims import ClaimRequest

__all__ = ["Part"]

_LARGE_CALL_CHARS = 100_000  # smaller ones fit everywhere


class Part:
    """A part of a ledger on one database.

    Args:
        database: the ledger's database.
        transactions: transactions of holders on it.
    """

    def __init__(self, database: Database, transactions: Transactions) -> None:
        self._database = database
        self._transactions = transactions
        self._identity = Identity(database)
        # Declarations of users' rows whose tables were found to be as declared.
        self._checked: WeakSet[GuardedRow] = WeakSet()

    @property
    def _statements(self) -> Statements:
        return self._transactions.statements

    @retried
    def _record(self, work: str) -> Any:
        """Return the row of work, or None."""
        with self._database.transaction() as db:
            return db.execute(sa.select(WORK).where(WORK.c.id == work)).first()

    def _check_call(self, request: ClaimRequest) -> None:
        """Raise CallTooLargeError if the database cannot store the call."""
        call = request.call
        if call is None or len(call) < _LARGE_CALL_CHARS or self._call_fits(call):
            return
        key = ", ".join(request.keys)
        raise CallTooLargeError(
            f"{request.task} {key}: its arguments make a call of {len(call):,} bytes, which "
            f"{self._database.place} cannot store with the work (recoverable=True, enqueue()). "
            "Nothing was run or written. Store the data elsewhere and pass its id.",
            key=key,
        )

    @retried
    def _call_fits(self, call: str) -> bool:
        with self._database.transaction() as db:
            return self._database.dialect.call_fits(db, call)

    def _check_rows(self, declared: Iterable[GuardedRow]) -> None:
        """Raise LedgerSchemaError unless the users' tables are as declared."""
        for each in declared:
            with self._database.transaction() as db:
                rows.check(db, each, where=self._database.place)
            check_privileges_on_row(self._database, each)
            self._checked.add(each)

    def _storable(self, text: str) -> str:
        """Return `text` with escapes for NUL, and for characters that the encoding lacks."""
        plain = text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()
        if plain.isascii() or self._database.stores_unicode():
            return plain
        return plain.encode("ascii", "backslashreplace").decode()
