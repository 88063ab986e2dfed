"""The ledger on taskguard's own tables, on PostgreSQL, MariaDB, MySQL and SQLite.

Guarantees: those of `ports.py`. Each later change of a claim is one conditional statement that
names the old state, the fence and the owner. Times are µs since 1970 by the database's clock.

`parts/` has a part for each protocol of `ports.py`. `statements/` takes, completes and renews
claims. `connections/dialects/` has the differences between databases.

SQLite is for one machine, and slow: it has one writer at a time, so an open transaction blocks the
renewals of other holders.
"""

from __future__ import annotations

from typing import Any

from taskguard.ledger.connections.database import Database
from taskguard.ledger.parts.actions import SqlActions
from taskguard.ledger.parts.claims import SqlClaims
from taskguard.ledger.parts.counts import SqlCounts
from taskguard.ledger.parts.effects import SqlEffects
from taskguard.ledger.parts.endings import SqlEndings
from taskguard.ledger.parts.lines import SqlLines
from taskguard.ledger.parts.messages import SqlMessages
from taskguard.ledger.parts.outbox import SqlOutbox
from taskguard.ledger.parts.questions import SqlQuestions
from taskguard.ledger.parts.records import SqlRecords
from taskguard.ledger.parts.snapshots import SqlSnapshots
from taskguard.ledger.parts.upkeep import SqlUpkeep
from taskguard.ledger.parts.workers import SqlWorkers
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
    SqlQuestions,
    SqlActions,
    SqlWorkers,
    SqlSnapshots,
    SqlCounts,
    SqlUpkeep,
):
    """A `Ledger` on PostgreSQL, MariaDB, MySQL or SQLite.

    Args:
        database: a SQLAlchemy URL, or an Engine of your own, whose settings are not changed.
        lock_timeout_s: how long a claim waits for a row lock before its key counts as held, in
            seconds. On MariaDB and MySQL: whole seconds, at least one. Default: 0.25.
        idle_in_transaction_s: after how many idle seconds the server ends a guarded transaction, so
            that a frozen holder's row locks end. For PostgreSQL, and for MariaDB unless you give an
            Engine. Default: 60.
        resolve_timeout_s: how long taskguard tries to find out the outcome of an unanswered COMMIT,
            in seconds. Default: 10.
        one_statement: False uses several statements for a claim, completion or renewal on
            PostgreSQL and MariaDB, too. Default: True.
        pooled: False closes each connection after its use, so that the database can be dropped at
            any time, as at the end of tests. An Engine of your own keeps its pool. Default: True.

    Raises:
        ConfigurationError: the URL or an argument is wrong.
        MissingDriverError: the database's driver is not installed.
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
        """The ledger's connections, for other tables of taskguard in its database."""
        return self._database
