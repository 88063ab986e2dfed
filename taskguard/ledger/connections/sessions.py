"""Undo changes of a body to its session, so that they do not affect the next body.

A body may change more than its transaction: by `SET`, `SET ROLE`, session-level advisory locks,
temporary tables, `LISTEN` or PRAGMA.

Guarantees: on Engines created from URLs, the connection is then reset to its original settings, or
closed, even if the body failed. On an Engine of the user, it is closed if the server reports that
the session became read-only or has another user. Other bodies cost no message to the server.

Not detected: changes by the driver's own connection that bypass its cursors, except that it commits
each statement. Changes inside a database function of the user, except those that PostgreSQL
reports. Behind PgBouncer, the sessions belong to the pooler and are not reset.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import sqlalchemy as sa

from taskguard.errors import ConfigurationError

__all__ = [
    "AGAIN",
    "POOLED",
    "PREPARED",
    "BodySession",
    "autocommits",
    "forgetting",
    "note",
    "noting",
    "noting_connection",
    "refuse_autocommit",
]

# Keys of values that are kept with a driver's connection. POOLED: whether its sessions belong to a
# pooler. AGAIN: its original settings. PREPARED: the ledger's prepared statements. _NOTES: the
# noted statements of a body.
POOLED, AGAIN = "taskguard_pooled", "taskguard_again"
PREPARED, _NOTES = "taskguard_prepared", "taskguard_notes"

_LONGEST_KEPT = 4_000  # a longer text is rarely repeated
_BLANK = r"(?:\s|--[^\n]*(?:\n|\Z)|/\*.*?\*/)*"
_MAY_CHANGE = re.compile(
    rf"""
    (?:\A|;){_BLANK}(?:
        set\b(?!\s+(?:local|transaction|constraints)\b)
        | (?:reset|discard|deallocate|listen|unlisten|prepare|load|declare|do|call|use|lock\s+tables
            |begin\s+not\s+atomic\s+set|pragma|attach|detach)\b
        | alter\s+session\b
        | create\s+(?:or\s+replace\s+)?(?:(?:global|local)\s+)?temp
    )
    | set_config | advisory_(?:lock|unlock) | get_lock | into\s+(?:(?:global|local)\s+)?temp
    """,
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)
# Changes that cannot be undone without undoing the driver's own settings. After the first two, it
# is unknown which statements the session still has prepared.
_STAYS = re.compile(
    rf"(?:\A|;){_BLANK}(?:discard|deallocate|prepare|load)\b", re.IGNORECASE | re.DOTALL
)
# One message and one transaction. Not DISCARD ALL, which would drop the driver's statements.
_RESET = (
    "reset session authorization; reset role; reset all; close all; unlisten *; "
    "select pg_advisory_unlock_all(); discard temp; discard sequences"
)
# PostgreSQL reports changes of these settings automatically.
_REPORTED = (b"default_transaction_read_only", b"session_authorization", b"is_superuser")


class BodySession:
    """A connection that a body uses, during its transaction.

    Args:
        db: the connection.
        own: True if its Engine was created from a URL.
    """

    def __init__(self, db: sa.Connection, *, own: bool) -> None:
        self._db = db
        self._own = own
        self._driver: Any = db.connection.dbapi_connection
        self._mode = _mode(self._driver)
        self._reported = _reported(self._driver)
        self._notes: list[str] = []
        # A connection of a driver in C has no `__dict__`, so use SQLAlchemy's `info`.
        self._kept: dict[Any, Any] = getattr(self._driver, "__dict__", db.info)
        if own:
            self._kept[_NOTES] = self._notes

    def end(self) -> None:
        """Reset or close the connection after the end of the transaction."""
        db = self._db
        self._kept.pop(_NOTES, None)
        in_memory = isinstance(db.engine.pool, sa.pool.SingletonThreadPool | sa.pool.StaticPool)
        if db.closed or db.invalidated or in_memory:
            return
        if self._own and _mode(self._driver) != self._mode:
            db.invalidate()  # a later body could not have a transaction on it
            return
        if self._kept.get(POOLED):
            return
        if not self._notes and _reported(self._driver) == self._reported:
            return
        stays = any(map(_STAYS.search, self._notes))
        if not self._own or stays or not self._reset():
            db.invalidate()

    def _reset(self) -> bool:
        """Reset the session to its original settings. Return False if that failed."""
        db = self._db
        if (db.dialect.name, db.dialect.driver) != ("postgresql", "psycopg"):
            return False
        try:
            self._driver.execute(_RESET + self._kept.get(AGAIN, ""))
        except db.dialect.loaded_dbapi.Error:
            return False
        except BaseException:
            db.invalidate()  # interrupted
            raise
        return True


def _mode(driver: Any) -> tuple[Any, ...]:
    """Return how the driver's connection begins, sends and commits, without a query."""
    ask = getattr(driver, "get_autocommit", None)  # of PyMySQL and similar drivers
    if ask is not None:
        return (ask(),)
    piped = getattr(getattr(driver, "pgconn", None), "pipeline_status", None)  # psycopg's
    return piped, getattr(driver, "autocommit", None), getattr(driver, "isolation_level", None)


def autocommits(driver: Any) -> bool:
    """Return True if the driver's connection commits each statement, without a query."""
    ask = getattr(driver, "get_autocommit", None)  # of PyMySQL and similar drivers
    if ask is not None:
        return bool(ask())
    # Without an isolation level, sqlite3 begins no transaction, and no BEGIN was sent.
    by_sqlite3 = getattr(driver, "isolation_level", "") is None
    unbegun = by_sqlite3 and getattr(driver, "in_transaction", True) is False
    return unbegun or getattr(driver, "autocommit", False) is True


def refuse_autocommit(driver: Any) -> None:
    """Raise ConfigurationError for an Engine on which effects and DONE cannot commit together."""
    if autocommits(driver):
        raise ConfigurationError(
            'The ledger\'s Engine commits each statement (isolation_level="AUTOCOMMIT"), so '
            "effects and DONE cannot commit together. Give the ledger an Engine without it."
        )


def _reported(driver: Any) -> list[Any]:
    """Return the settings that the server has reported to the driver, without a query."""
    ask = getattr(getattr(driver, "pgconn", None), "parameter_status", None)
    return [] if ask is None else [ask(name) for name in _REPORTED]


def note(
    db: sa.Connection, _cursor: Any, statement: str, _values: Any, _context: Any, _many: bool
) -> None:
    """Note a statement: an Engine's listener for drivers whose cursors do not."""
    _note(db.info, statement)


def _note(kept: dict[Any, Any], statement: Any) -> None:
    """Note a statement that is about to be sent."""
    notes = kept.get(_NOTES)
    if notes is None:
        return
    if isinstance(statement, bytes):
        statement = statement.decode("latin-1")
    elif not isinstance(statement, str):  # psycopg composes it
        statement = statement.as_string() if hasattr(statement, "as_string") else "do"
    changes = _may_change if len(statement) <= _LONGEST_KEPT else _MAY_CHANGE.search
    if changes(statement):
        notes.append(statement)
        if _STAYS.search(statement):
            kept[PREPARED] = None  # the ledger prepares nothing more in this transaction


@functools.lru_cache(maxsize=1_000)
def _may_change(statement: str) -> bool:
    return _MAY_CHANGE.search(statement) is not None


@functools.cache
def noting(cursor: type[Any]) -> type[Any]:
    """Return a subclass of a cursor class that notes statements while a body uses it."""

    class Noting(cursor):  # type: ignore[misc]  # known when the driver is
        def execute(self, statement: Any, *args: Any, **options: Any) -> Any:
            _note(self.connection.__dict__, statement)
            return super().execute(statement, *args, **options)

        def executemany(self, statement: Any, *args: Any, **options: Any) -> Any:
            _note(self.connection.__dict__, statement)
            return super().executemany(statement, *args, **options)

        def executescript(self, script: str) -> Any:  # sqlite3's
            _note(self.connection.__dict__, script)
            return super().executescript(script)

        def stream(self, statement: Any, *args: Any, **options: Any) -> Any:  # psycopg's
            _note(self.connection.__dict__, statement)
            return super().stream(statement, *args, **options)

        def callproc(self, *args: Any, **options: Any) -> Any:  # PyMySQL's
            _note(self.connection.__dict__, "call")
            return super().callproc(*args, **options)

    Noting.__name__ = Noting.__qualname__ = cursor.__name__
    return Noting


@functools.cache
def forgetting(connection: type[Any]) -> type[Any]:
    """Return a subclass of psycopg's connection that knows when psycopg deallocates all statements.

    psycopg does so at each rollback, and after DROP and ALTER, if it prepared one for a body.
    """

    class Forgetting(connection):  # type: ignore[misc]  # known when the driver is
        def _deallocate(self, name: bytes | None) -> Any:
            if name is None:
                (vars(self).get(PREPARED) or {}).clear()
            return super()._deallocate(name)

    Forgetting.__name__ = Forgetting.__qualname__ = connection.__name__
    return Forgetting


@functools.cache
def noting_connection() -> type[Any]:
    """Return a class of sqlite3 connections whose cursors note statements."""
    import sqlite3  # some builds of Python lack it

    class NotingConnection(sqlite3.Connection):
        def cursor(self, factory: Any = None) -> Any:
            return super().cursor(noting(sqlite3.Cursor) if factory is None else factory)

    return NotingConnection
