"""SQLite: one writer at a time, no row locks, and this machine's clock."""

from __future__ import annotations

import time
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.sqlite import insert

from taskguard.ledger.base import MessageRef
from taskguard.ledger.dialects.base import Dialect, Fault, newer_copy
from taskguard.ledger.tables import MESSAGES

__all__ = ["SQLite"]

_FAULTS = {
    "database is locked": Fault.LOCKED,
    "no such table": Fault.NO_TABLE,
    "database or disk is full": Fault.CANNOT_WRITE,
}


class SQLite(Dialect):
    """Its answers."""

    one_writer = True

    def now(self) -> Any:
        # Asked whenever a statement is run, which may be made long before.
        return sa.bindparam("now", callable_=_now_us, type_=sa.BigInteger, unique=True)

    def now_us(self, db: sa.Connection) -> int:
        del db
        return _now_us()

    def fault(self, origin: Any, driver: Any) -> Fault | None:
        if not isinstance(origin, driver.OperationalError | driver.InterfaceError):
            return None
        text = str(origin)
        return next((found for part, found in _FAULTS.items() if part in text), Fault.AWAY)

    def insert_missing(self, table: sa.Table, values: Any) -> Any:
        return insert(table).values(values).on_conflict_do_nothing()

    def raise_copy(
        self, db: sa.Connection, message: MessageRef, copy: int, *, work: str | None, now_us: int
    ) -> bool:
        numbers = {"retries": message.retries, "copy": copy, "updated": now_us}
        statement = insert(MESSAGES).values(message=message.id, work=work, **numbers)
        statement = statement.on_conflict_do_update(
            index_elements=[MESSAGES.c.message], set_=numbers, where=newer_copy(message, copy)
        )
        return db.execute(statement.returning(MESSAGES.c.copy)).first() is not None

    def autocommits(self, driver: Any) -> bool:
        # Nothing begins by itself, and nobody said BEGIN.
        return super().autocommits(driver) or (
            getattr(driver, "isolation_level", "") is None
            and getattr(driver, "in_transaction", True) is False
        )


def _now_us() -> int:
    return time.time_ns() // 1000
