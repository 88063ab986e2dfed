"""What a holder's transaction is on, for the time of a block: the one interface for all of them.

An Engine of the ledger's (`own.py`), a Session or Connection of the user's (`lent.py`), a
connection of another library (`external.py`, with psycopg's and sqlite3's own in `drivers.py`).
Guarantees nothing by itself; `core.py` says what a transaction does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import sqlalchemy as sa

__all__ = ["Connect", "TransactionAdapter"]

# Makes a SQLAlchemy Connection of another library's connection.
Connect = Callable[[Any], "sa.Connection"]


class TransactionAdapter(ABC):
    """Begins a transaction and ends it. For one transaction at a time.

    Attributes:
        kind: SQLAlchemy's name for the kind of database: "postgresql", "sqlite".
        lent: the connection is the user's own, so that it may reach another database.
        engine: the user's Engine that it comes from; None: the ledger's own, or none.
        driver: the driver's own connection, where another one is beneath SQLAlchemy's; else None.
    """

    kind: str
    lent = True
    engine: sa.Engine | None = None
    driver: Any = None

    @abstractmethod
    def begin(self, connect: Connect) -> sa.Connection:
        """Begin, and give the connection by which statements go.

        Raises TransactionUsageError where a transaction is open already.
        """

    @property
    def broken(self) -> bool:
        """Whether the connection is gone, where SQLAlchemy does not know that."""
        return False

    def flush(self) -> None:  # noqa: B027  # most have nothing pending
        """Write what is pending to the database, before the ledger's last statements.

        Raises TransactionUsageError where a COMMIT would not write what the block did.
        """

    @abstractmethod
    def commit(self) -> None:
        """Commit what `begin()` began; raises what the library does."""

    @abstractmethod
    def roll_back(self) -> None:
        """Roll the transaction back; does nothing if it has ended."""

    def lose(self) -> None:
        """The COMMIT got no answer: use the connection no more, where that is possible."""
        self.roll_back()

    def close(self) -> None:  # noqa: B027  # what is lent stays open
        """Release the connection, after whatever end."""

    def origin(self, error: BaseException) -> BaseException | None:
        """The driver's error beneath one of the library or of SQLAlchemy; None: there is none."""
        return error
