"""Use the driver's own connection without SQLAlchemy, whose results would double the time.

Guarantees: a connection whose answer may be incomplete is never used again. `faults.py` translates
errors.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import sqlalchemy as sa

from taskguard.errors import TaskguardError
from taskguard.ledger.connections.deadlines import Deadline
from taskguard.ledger.connections.faults import Faults
from taskguard.ledger.connections.pools import Lifo

if TYPE_CHECKING:
    from typing import Self

__all__ = ["DriverCall", "Lone", "Taken", "driver_of", "fetch"]


class Lone(Protocol):
    """An owner of a connection that is in no pool."""

    connection: Any

    def invalidate(self, error: BaseException | None) -> None:
        """Drop the connection, because its state is unknown."""


class Taken:
    """A driver's connection for a block, which must end each transaction that it begins.

    Attributes:
        pooled: its entry in the pool.
        driver: the driver's own connection.
        deadline: the deadline for its answers.
    """

    __slots__ = (
        "_engine", "_faults", "_longest_s", "_pool", "_watched", "deadline", "driver", "pooled",
    )  # fmt: skip

    def __init__(
        self, faults: Faults, engine: sa.Engine, longest_s: float, *, watched: bool = True
    ) -> None:
        self._faults = faults
        self._engine = engine
        self._longest_s = longest_s
        self._watched = watched  # as `Deadline` has it
        self._pool = engine.pool if isinstance(engine.pool, Lifo) else None

    def __enter__(self) -> Self:
        pool, faults = self._pool, self._faults
        try:
            pooled: Any = self._engine.raw_connection() if pool is None else pool.take()
        except Exception as error:
            faults.translate(error)
            raise
        try:
            driver = pooled.dbapi_connection
            deadline = Deadline(driver, self._longest_s, place=faults.place, watched=self._watched)
            deadline.__enter__()
        except BaseException:
            self._return(pooled, known=False)  # its deadline may be active
            raise
        self.pooled, self.driver, self.deadline = pooled, driver, deadline
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        known = False
        try:
            if error is None:
                self.deadline.__exit__(None, None, None)
                known = True
                return
            explained = self._faults.explain(error, self.pooled, self.driver)
            self.deadline.__exit__(kind, explained, trace)
            drivers_error = self._faults.engine.dialect.loaded_dbapi.Error
            known = isinstance(explained, (TaskguardError, drivers_error))
            if explained is not error:
                raise explained
        finally:
            self._return(self.pooled, known=known and not self.deadline.passed)

    def _return(self, pooled: Any, *, known: bool) -> None:
        """Return the connection to the pool, or drop it if its state is not `known`."""
        pool = self._pool
        if pool is not None:
            (pool.put if known else pool.drop)(pooled)
            return
        if not known and pooled.dbapi_connection is not None:
            pooled.invalidate()
        pooled.close()


class DriverCall:
    """A block for calls of the driver on a connection that the caller takes and returns."""

    def __init__(self, faults: Faults, pooled: sa.Connection | Lone, driver: Any) -> None:
        self._faults = faults
        self._pooled = pooled
        self._driver = driver

    def __enter__(self) -> Any:
        return self._driver

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            explained = self._faults.explain(error, self._pooled, self._driver)
            if explained is not error:
                raise explained


def fetch(connection: Any, statement: str, values: Any) -> list[Any]:
    """Return all rows of a statement. Closing the cursor reads the rest of the answer."""
    cursor = connection.cursor()
    cursor.execute(statement, values)
    rows = list(cursor.fetchall())
    cursor.close()
    return rows


def driver_of(db: sa.Connection) -> Any:
    """Return the driver's own connection of a SQLAlchemy connection."""
    return db.connection.dbapi_connection
