"""The interface to the connection of a holder's transaction, for the time of a block.

It can be a connection of the ledger's Engine (`own.py`), a Session or Connection of the user
(`lent.py`), or a connection of another library (`external.py`). `drivers.py` has those of psycopg
and sqlite3. `core.py` says what a transaction guarantees.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import sqlalchemy as sa

__all__ = ["Connect", "TransactionAdapter"]

# Makes a SQLAlchemy Connection from another library's connection.
Connect = Callable[[Any], "sa.Connection"]


class TransactionAdapter(ABC):
    """Begins and ends one transaction at a time.

    Attributes:
        kind: SQLAlchemy's name for the kind of database, for example "postgresql" or "sqlite".
        lent: the connection is the user's, so that it may reach another database.
        engine: the user's Engine of this connection. None: the ledger's Engine, or no Engine.
        driver: the driver's connection, if SQLAlchemy has only a wrapper of it. Otherwise None.
    """

    kind: str
    lent = True
    engine: sa.Engine | None = None
    driver: Any = None

    @abstractmethod
    def begin(self, connect: Connect) -> sa.Connection:
        """Begin, and return the connection for statements.

        Raises TransactionUsageError if a transaction is already open.
        """

    @property
    def broken(self) -> bool:
        """Return True if the connection is lost and SQLAlchemy does not know it."""
        return False

    def flush(self) -> None:  # noqa: B027  # most have nothing pending
        """Write pending changes to the database, before the ledger's last statements.

        Raises TransactionUsageError if a COMMIT would not write the effects of the block.
        """

    @abstractmethod
    def commit(self) -> None:
        """Commit the transaction of `begin()`. Raises the library's own errors."""

    @abstractmethod
    def roll_back(self) -> None:
        """Roll the transaction back. Do nothing if it has ended."""

    def lose(self) -> None:
        """Drop the connection, if possible, because its COMMIT got no answer."""
        self.roll_back()

    def close(self) -> None:  # noqa: B027  # what is lent stays open
        """Release the connection after any end of the transaction."""

    def origin(self, error: BaseException) -> BaseException | None:
        """Return the driver's error behind an error of the library or SQLAlchemy, or None."""
        return error
