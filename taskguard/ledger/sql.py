"""The ledger on taskguard's own tables, on PostgreSQL, MariaDB, MySQL and SQLite.

Guarantees what `ports.py` says. Every later change of a claim is one conditional statement that
names the old state, the fence and the owner. Times are µs since 1970 by the database's clock.

`parts/` has a part for each protocol of `ports.py`. `statements/` says how a claim is taken,
completed and renewed, and `connections/dialects/` what databases differ in.

Does not guarantee speed on SQLite: one writer at a time, so an open transaction stops the
renewals of others. For one machine.
"""

from __future__ import annotations

from typing import Any

from taskguard.ledger.connections.database import Database
from taskguard.ledger.parts.claims import SqlClaims
from taskguard.ledger.parts.effects import SqlEffects
from taskguard.ledger.parts.endings import SqlEndings
from taskguard.ledger.parts.lines import SqlLines
from taskguard.ledger.parts.messages import SqlMessages
from taskguard.ledger.parts.outbox import SqlOutbox
from taskguard.ledger.parts.records import SqlRecords
from taskguard.ledger.parts.upkeep import SqlUpkeep
from taskguard.ledger.transactions.core import Transactions
from taskguard.model.policy import DAY_S, check_number

__all__ = ["SqlLedger"]


class SqlLedger(
    SqlClaims,
    SqlEffects,
    SqlEndings,
    SqlMessages,
    SqlOutbox,
    SqlLines,
    SqlRecords,
    SqlUpkeep,
):
    """A `Ledger` on PostgreSQL, MariaDB, MySQL or SQLite.

    Args:
        database: a SQLAlchemy URL, or an Engine of the user's own, whose settings stay as they
            are.
        lock_timeout_s: how many seconds a claim waits for a row lock before it counts as busy; on
            MariaDB and MySQL whole seconds, at least one. 0.25 by default.
        idle_in_transaction_s: PostgreSQL, and MariaDB unless the Engine is the user's, end a
            guarded transaction that idles for so many seconds, so that a frozen holder's row locks
            end.
        resolve_timeout_s: for how many seconds the outcome of an unanswered COMMIT is asked for; 10
            by default.
        one_statement: False claims, completes and renews in several statements on PostgreSQL and
            MariaDB, too.
        pooled: False closes each connection after its use, so that the database can be dropped
            at any time, as at the end of tests; an Engine of the user's own keeps its pool.
    """

    def __init__(
        self,
        database: Any,
        *,
        lock_timeout_s: float = 0.25,
        idle_in_transaction_s: float = 60.0,
        resolve_timeout_s: float = 10.0,
        one_statement: bool = True,
        pooled: bool = True,
    ) -> None:
        check_number("lock_timeout_s", lock_timeout_s, at_least=0, at_most=DAY_S)
        check_number("idle_in_transaction_s", idle_in_transaction_s, at_least=0.001, at_most=DAY_S)
        check_number("resolve_timeout_s", resolve_timeout_s, at_least=0, at_most=DAY_S)
        made = Database(database, lock_timeout_s=lock_timeout_s, pooled=pooled)
        transactions = Transactions(
            made,
            one_statement=one_statement,
            idle_in_transaction_s=idle_in_transaction_s,
            resolve_timeout_s=resolve_timeout_s,
        )
        super().__init__(made, transactions)

    def __repr__(self) -> str:
        return f"<SqlLedger {self._database.place}>"

    @property
    def database(self) -> Database:
        """Its connections, for other tables of taskguard's in the same database."""
        return self._database
