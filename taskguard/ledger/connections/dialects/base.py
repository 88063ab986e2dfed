"""The interface to the differences between databases. The other modules here implement it."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final

import sqlalchemy as sa

__all__ = ["MOST_CALL_BYTES", "SNAPSHOTS", "Dialect", "Fault", "lower"]


# Half the size of the widest columns, because a statement contains more than the call.
MOST_CALL_BYTES: Final = 500_000_000
SNAPSHOTS: Final = ("REPEATABLE READ", "SERIALIZABLE")


class Fault(enum.Enum):
    """The meaning of a driver's error."""

    RETRY = enum.auto()  # a deadlock or serialization failure: nothing was written
    LOCKED = enum.auto()  # a wait for a row lock timed out
    NO_TABLE = enum.auto()
    REFUSED = enum.auto()  # a privilege or a column is missing: an operator has to fix that
    CANNOT_WRITE = enum.auto()  # a full disk, read-only
    AWAY = enum.auto()  # no answer, no connection, shutting down


class Dialect(ABC):
    """One kind of database.

    Attributes:
        one_writer: an open transaction stops all others, even if they need other rows.
        own: the engine was created from a URL. On an Engine of the user, each change of a session
            has to be undone.
        lock_timeouts_abort: a lock timeout aborts the transaction, not only its statement.
        locks_joined: a row of an outer join can be locked.
        claims_apart: claims use connections that no body uses. So settings of their sessions can
            stay changed.
        options: options of a connection for a transaction of the ledger. It has to see the newest
            rows with any default of the database.
    """

    one_writer = False
    options: Mapping[str, str] = MappingProxyType({})
    lock_timeouts_abort = False
    locks_joined = True

    def __init__(self, *, own: bool) -> None:
        self.own = own

    @property
    def claims_apart(self) -> bool:
        return False

    def watch(self, engine: sa.Engine) -> None:  # noqa: B027 - most drivers need no watching
        """Listen to what the driver does on this engine."""

    @abstractmethod
    def now(self) -> sa.ColumnElement[int]:
        """Return an expression for the database's clock in µs."""

    def now_us(self, db: sa.Connection) -> int:
        """Return the database's clock in µs, after all waits for row locks so far."""
        return int(db.execute(sa.select(self.now())).scalar_one())

    @contextmanager
    def waiting(
        self, db: sa.Connection, lock_timeout_s: float, *, apart: bool = False
    ) -> Iterator[None]:
        """Limit the waits for row locks in the block to `lock_timeout_s`.

        `apart`: no body uses the connection, so that the limit may stay in its session.
        """
        del db, lock_timeout_s, apart
        yield

    @contextmanager
    def answering(self, db: sa.Connection, longest_s: float) -> Iterator[None]:
        """Let the database end each statement of the block that takes longer, with an error.

        A deadline only closes the connection, and the server would work on.
        """
        del db, longest_s
        yield

    def only_read(self, db: sa.Connection) -> None:  # noqa: B027 - most need none
        """Prepare a transaction for an operator's questions, which have indexes."""

    def limit_waiting(  # noqa: B027 - for those whose `claims_apart`
        self, driver: Any, kept: dict[Any, Any], lock_timeout_s: float
    ) -> None:
        """Limit waits for row locks permanently, on a driver's connection that no body uses.

        `kept` is the connection's `info`.
        """

    def call_fits(self, db: sa.Connection, call: str) -> bool:
        """Return True if the ASCII text can be stored with its work."""
        del db
        return len(call) <= MOST_CALL_BYTES

    def stores_unicode(self, db: sa.Connection) -> bool:
        """Return True if the database can store every character, and the connection transfers them.

        This is True without a query if the tables and the driver define that.
        """
        del db
        return True

    @abstractmethod
    def fault(self, origin: Any, driver: Any) -> Fault | None:
        """Return the meaning of a driver's error, or None if the statement itself is wrong."""

    @abstractmethod
    def insert_missing(self, table: sa.Table, values: Any) -> Any:
        """Return an INSERT that skips and does not change rows whose primary keys exist."""

    @abstractmethod
    def insert_or_add(self, table: sa.Table, values: Any, number: sa.Column[Any]) -> Any:
        """Return an INSERT that adds to `number` in rows whose primary keys exist."""

    @abstractmethod
    def raise_numbers(
        self,
        db: sa.Connection,
        table: sa.Table,
        key: Mapping[str, object],
        numbers: Mapping[str, int],
        **others: object,
    ) -> bool:
        """Store `numbers` and `others` in the row of this primary key, and lock the row.

        A missing row is inserted. Return False, and store nothing, unless the numbers of the row
        are lower. The first number is compared first.
        """

    def lock_schema(self, db: sa.Connection) -> None:  # noqa: B027 - most need none
        """Keep others from making tables until the transaction ends, if two at once would fail."""

    def create_index(self, db: sa.Connection, index: sa.Index) -> None:
        """Create the index unless it exists."""
        db.execute(sa.schema.CreateIndex(index, if_not_exists=True))

    # -- a body's transaction -----------------------------------------------------------------

    def keeps_snapshot(self, db: sa.Connection) -> bool:
        """Return True if a change fails when the row has changed since the transaction began."""
        del db
        return False

    def begun(self, db: sa.Connection, *, idle_s: float) -> None:  # noqa: B027
        """Prepare a body's transaction that has just begun, and limit its idle time."""

    def bounds_idleness(self, engine: sa.Engine) -> bool:
        """Return True if `begun()` makes the server end an idle transaction."""
        del engine
        return False

    def ended(self, db: sa.Connection) -> bool:
        """Return True if the transaction of `begun()` has ended on the server. Call it once."""
        del db
        return False

    def longest_statement(self, db: sa.Connection) -> int | None:
        """Return the maximum size of a statement in bytes, or None without a maximum.

        The server closes the connection at a longer statement.
        """
        del db
        return None

    def mark(
        self, db: sa.Connection, text: str, *, stored: sa.Select[Any]
    ) -> tuple[str, str | None]:
        """Return the text to store, and a mark of this transaction for `happened()`.

        `stored` selects the text that is stored now.
        """
        del db, stored
        return text, None

    def is_at_work(self, db: sa.Connection, session: int) -> bool:
        """Return True if the server reports an open transaction in the session of this number."""
        del db, session
        return False

    def happened(self, db: sa.Connection, mark: str, *, stored: str | None) -> bool:
        """Return True if the transaction with this mark was committed.

        `stored` is the text that is stored now, or None if it is another holder's.
        """
        del db, mark, stored
        return False


def lower(table: sa.Table, numbers: Mapping[str, int]) -> sa.ColumnElement[bool]:
    """Return the condition that a row has lower numbers, of which the first is compared first."""
    found: sa.ColumnElement[bool] = sa.false()
    for name, number in reversed(list(numbers.items())):
        column = table.c[name]
        found = sa.or_(column < number, sa.and_(column == number, found))
    return found
