"""SQLite: one writer at a time, no row locks, and this machine's clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.sqlite import insert

from taskguard.ledger.connections.dialects.base import Fault
from taskguard.ledger.connections.dialects.on_conflict import OnConflict
from taskguard.ledger.tables import WORK

__all__ = ["SQLite"]

_FAULTS = {
    "database is locked": Fault.LOCKED,
    "no such table": Fault.NO_TABLE,
    "no such column": Fault.REFUSED,
    "has no column named": Fault.REFUSED,
    "readonly database": Fault.CANNOT_WRITE,
    "database or disk is full": Fault.CANNOT_WRITE,
}
_LOOK_EVERY = 10_000  # instructions of SQLite's virtual machine: about a millisecond
_ENDED = ("no such savepoint", "closed database")


class SQLite(OnConflict):
    """The dialect of SQLite."""

    insert = staticmethod(insert)
    one_writer = True

    def now(self) -> sa.ColumnElement[int]:
        # Read at each execution, because the statement may have been made long before.
        return sa.bindparam("now", callable_=_now_us, type_=sa.BigInteger, unique=True)

    def now_us(self, db: sa.Connection) -> int:
        del db
        return _now_us()

    @contextmanager
    def answering(self, db: sa.Connection, longest_s: float) -> Iterator[None]:
        driver: Any = db.connection.dbapi_connection
        until_s = time.monotonic() + longest_s
        driver.set_progress_handler(lambda: time.monotonic() > until_s, _LOOK_EVERY)
        try:
            yield
        finally:
            driver.set_progress_handler(None, 0)

    def fault(self, origin: Any, driver: Any) -> Fault | None:
        text = str(origin)
        if not isinstance(origin, driver.OperationalError | driver.InterfaceError):
            torn = "malformed" in text or "not a database" in text
            return Fault.AWAY if torn else None
        return next((found for part, found in _FAULTS.items() if part in text), Fault.AWAY)

    # -- a body's transaction -----------------------------------------------------------------

    def begun(self, db: sa.Connection, *, idle_s: float) -> None:
        del idle_s
        # Outside of a transaction, a savepoint would begin one, and its RELEASE would commit. Use
        # IMMEDIATE: a transaction that reads before it writes fails at once if another one writes.
        if not db.connection.dbapi_connection.in_transaction:  # type: ignore[union-attr]
            db.exec_driver_sql("begin immediate")
        else:  # begun by another library, perhaps by a plain BEGIN
            db.execute(sa.update(WORK).where(sa.false()).values(final=0))
        db.exec_driver_sql("savepoint taskguard")

    def ended(self, db: sa.Connection) -> bool:
        """Return True after executescript(), which commits first, or the driver's commit()."""
        # Not by SQLAlchemy, which would reconnect if the body has closed the connection.
        driver: Any = db.connection.dbapi_connection
        try:
            driver.execute("release savepoint taskguard")
        except db.dialect.loaded_dbapi.Error as error:
            if not any(text in str(error) for text in _ENDED):
                raise
            return True
        return False


def _now_us() -> int:
    return time.time_ns() // 1000
