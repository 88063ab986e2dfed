"""What the ledger asks of a kind of database. The answers are in the modules beside this one."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final

import sqlalchemy as sa

__all__ = ["MOST_CALL_BYTES", "SNAPSHOTS", "Dialect", "Fault", "lower"]


# Half of what the widest columns hold: a statement carries the call and all else.
MOST_CALL_BYTES: Final = 500_000_000
SNAPSHOTS: Final = ("REPEATABLE READ", "SERIALIZABLE")


class Fault(enum.Enum):
    """What a driver's error means, whatever its number."""

    RETRY = enum.auto()  # a deadlock, a serialization failure: nothing of it stays
    LOCKED = enum.auto()  # a row lock was not given in time
    NO_TABLE = enum.auto()
    REFUSED = enum.auto()  # a privilege or a column is missing: an operator has to fix that
    CANNOT_WRITE = enum.auto()  # a full disk, read-only
    AWAY = enum.auto()  # no answer, no connection, shutting down


class Dialect(ABC):
    """One kind of database.

    Attributes:
        one_writer: an open transaction stops all others, whatever rows they want.
        own: the engine was made from a URL; on an Engine of the user's own nothing may stay
            changed in a session.
        lock_timeouts_abort: a lock that was not given in time aborts the transaction, not only its
            statement.
        locks_joined: a row can be locked where it is joined by an outer join.
        claims_apart: claims go by connections that no body has, whose settings can stay as claims
            want them.
        options: of a connection for several statements of the ledger's own, which SQLAlchemy is to
            keep together, and which have to see the newest rows whatever the default is.
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
        """The database's clock in µs, as an expression."""

    def now_us(self, db: sa.Connection) -> int:
        """The database's clock in µs, after all waiting for row locks so far."""
        return int(db.execute(sa.select(self.now())).scalar_one())

    @contextmanager
    def waiting(
        self, db: sa.Connection, lock_timeout_s: float, *, apart: bool = False
    ) -> Iterator[None]:
        """Statements in the block wait for row locks no longer than `lock_timeout_s`.

        `apart`: the connection is never a body's, so that the limit may stay in its session.
        """
        del db, lock_timeout_s, apart
        yield

    def limit_waiting(  # noqa: B027 - for those whose `claims_apart`
        self, driver: Any, kept: dict[Any, Any], lock_timeout_s: float
    ) -> None:
        """The same for good, on a driver's connection that no body has; `kept` is its `info`."""

    def call_fits(self, db: sa.Connection, call: str) -> bool:
        """Whether the text, which is ASCII, can be stored with its work."""
        del db
        return len(call) <= MOST_CALL_BYTES

    def stores_unicode(self, db: sa.Connection) -> bool:
        """Whether the database's texts hold every character, and the connection transfers them.

        True without a question where the tables and the driver define that themselves.
        """
        del db
        return True

    @abstractmethod
    def fault(self, origin: Any, driver: Any) -> Fault | None:
        """What an error of the driver means; None: it is the statement's own."""

    @abstractmethod
    def insert_missing(self, table: sa.Table, values: Any) -> Any:
        """An INSERT that skips rows whose primary keys exist; nothing is changed."""

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
        """Create it unless it is there."""
        db.execute(sa.schema.CreateIndex(index, if_not_exists=True))

    # -- a body's transaction -----------------------------------------------------------------

    def keeps_snapshot(self, db: sa.Connection) -> bool:
        """Whether changing a row that changed since the transaction began fails."""
        del db
        return False

    def begun(self, db: sa.Connection, *, idle_s: float) -> None:  # noqa: B027
        """A body's transaction begins here, and may idle for so long."""

    def bounds_idleness(self, engine: sa.Engine) -> bool:
        """Whether `begun()` sees to it that an idle transaction ends."""
        del engine
        return False

    def ended(self, db: sa.Connection) -> bool:
        """Whether the transaction that `begun()` saw is over, as the server sees it. Asked once."""
        del db
        return False

    def longest_statement(self, db: sa.Connection) -> int | None:
        """In bytes: for one that is longer the server ends the connection. None: for none."""
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
        """Whether the server's session of this number has a transaction open, as far as it says."""
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
