"""Check that a connection reaches the ledger's database, before anything is written on it.

Guarantees: two databases that both have taskguard's tables are distinguished by a random mark. The
ledger commits the mark once, in a row of `taskguard_keys` that no claim and no purge touches. On
SQLite, the files are compared instead.

A copy of a database, for example a restored backup, is not distinguished from the original. A
transaction that keeps its snapshot, and is older than the mark, has to run again. That can happen
only to the first transaction ever.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from taskguard.errors import ConfigurationError, LedgerSchemaError, TransactionRetryError
from taskguard.ledger.connections.database import Database
from taskguard.ledger.connections.retrying import retried
from taskguard.ledger.tables import KEYS

__all__ = ["Identity"]

# No claim can have this key, because keys contain no blanks.
_KEY = "the database"
_FOR_EVER_US = 2**62


class Identity:
    """The mark of a ledger's database, which is made at its first use."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._mark: str | None = None

    def require(self, db: sa.Connection, *, work: str) -> None:
        """Raise ConfigurationError unless `db` reaches the same database, and the same tables.

        Raise TransactionRetryError if the snapshot of its transaction may be older than the mark.
        """
        ours = self._database.engine
        if db.engine.pool is ours.pool:
            return
        if _kind(db.dialect) != _kind(ours.dialect) or not self._is_of(db, work):
            raise ConfigurationError(
                f"{work} was enqueued in a transaction that is not in the ledger's database "
                f"({self._database.place}), or finds its tables in another schema: no worker would "
                "find the work there. Nothing was written. Pass a session= of the ledger's "
                "database, or configure the ledger there (TASKGUARD_LEDGER_URL)."
            )

    def mark(self, *, make: bool) -> str | None:
        """Return the mark, or None if there is none yet. `make` creates it."""
        if make:
            return self._make()
        with self._database.transaction() as db:
            return db.execute(_select()).scalar()

    def _is_of(self, db: sa.Connection, work: str) -> bool:
        if self._database.dialect.one_writer:
            return _same_file(_file_of(db), self._database.engine.url.database)
        if self._mark is None:
            self._mark = self._make()
        try:
            with self._database.faults.translated():
                seen = db.execute(_select()).scalar()
        except (LedgerSchemaError, sa.exc.ProgrammingError):
            return False  # the database has no such tables
        if seen == self._mark:
            return True
        # The cached mark may be out of date: tests empty the tables.
        self._mark = self._make()
        # On MariaDB and MySQL, only a locking read sees rows that are newer than the snapshot.
        again = db.execute(_select().with_for_update(read=True)).scalar()
        if again is None and self._database.dialect.keeps_snapshot(db):
            raise TransactionRetryError(
                f"{work} was not enqueued: the snapshot of this transaction (REPEATABLE READ or "
                "SERIALIZABLE) does not show the mark of the ledger's database, which is made at "
                "the ledger's first use. Run the transaction again. If that does not help, its "
                f"database is not the ledger's ({self._database.place})."
            )
        return bool(again == self._mark)

    def _make(self) -> str:
        row = {
            "key": _KEY,
            "fence": 0,
            "owner": os.urandom(16).hex(),
            "lease_until": _FOR_EVER_US,
        }

        @retried
        def ask() -> str:
            with self._database.transaction() as own:
                found = own.execute(_select()).scalar()
                if found is None:
                    own.execute(self._database.dialect.insert_missing(KEYS, row))
                    found = own.execute(_select()).scalar_one()
                return str(found)

        return ask()


def _kind(dialect: sa.Dialect) -> str:
    """Return the kind of database. SQLAlchemy has two names for MariaDB, depending on the URL."""
    return "mysql" if dialect.name == "mariadb" else dialect.name


def _select() -> Any:
    return sa.select(KEYS.c.owner).where(KEYS.c.key == _KEY)


def _file_of(db: sa.Connection) -> str | None:
    databases = db.exec_driver_sql("PRAGMA database_list").all()
    return next((str(row[2]) for row in databases if row[1] == "main"), None)


def _same_file(one: str | None, other: str | None) -> bool:
    if not one or not other:
        return False  # a database in memory belongs to one connection
    try:
        return Path(one).samefile(other)
    except OSError:
        return False
