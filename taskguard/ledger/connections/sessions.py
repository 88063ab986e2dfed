"""Undoes what a body changed in its session, which the next body on that connection would meet.

Guarantees, on Engines made from URLs: after a body whose statements may have changed more than its
transaction (`SET`, `SET ROLE`, session-level advisory locks, temporary tables, `LISTEN`, PRAGMA),
and also after one that failed, the connection is as it was when it was opened, or is closed. On an
Engine of the user's own it is closed if the server said that the session became read-only, or
another user's. Bodies that do nothing of the kind cost no message to the server.

Does not notice what is done by the driver's own connection past its cursors, except that it
commits each statement. Nor what is done within a function of the user's in the database, except
what PostgreSQL reports. Behind PgBouncer the sessions are the pooler's, and stay as they are.
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
    "note",
    "noting",
    "noting_connection",
    "refuse_autocommit",
]

# Kept with a driver's connection: whether a pooler has its sessions, what was set when it was
# opened, which statements of the ledger are prepared, and those of a body that were noted.
POOLED, AGAIN = "taskguard_pooled", "taskguard_again"
PREPARED, _NOTES = "taskguard_prepared", "taskguard_notes"

_LONGEST_KEPT = 4_000  # a longer text hardly comes again
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
# What no statement undoes without undoing the driver's own settings as well. After the first two
# nobody knows which statements the session still has.
_STAYS = re.compile(
    rf"(?:\A|;){_BLANK}(?:discard|deallocate|prepare|load)\b", re.IGNORECASE | re.DOTALL
)
# In one message, in a transaction of its own. Not DISCARD ALL: the driver's statements stay known.
_RESET = (
    "reset session authorization; reset role; reset all; close all; unlisten *; "
    "select pg_advisory_unlock_all(); discard temp; discard sequences"
)
# PostgreSQL says by itself when one of these changes.
_REPORTED = (b"default_transaction_read_only", b"session_authorization", b"is_superuser")


class BodySession:
    """A connection in the hands of a body, for the time of its transaction.

    Args:
        db: the connection.
        own: its Engine was made from a URL.
    """

    def __init__(self, db: sa.Connection, *, own: bool) -> None:
        self._db = db
        self._own = own
        self._driver: Any = db.connection.dbapi_connection
        self._mode = _mode(self._driver)
        self._reported = _reported(self._driver)
        self._notes: list[str] = []
        # A driver that is written in C keeps nothing with its connections; SQLAlchemy does.
        self._kept: dict[Any, Any] = getattr(self._driver, "__dict__", db.info)
        if own:
            self._kept[_NOTES] = self._notes

    def end(self) -> None:
        """The transaction has ended. The connection is as it was, or closed."""
        db = self._db
        self._kept.pop(_NOTES, None)
        in_memory = isinstance(db.engine.pool, sa.pool.SingletonThreadPool | sa.pool.StaticPool)
        if db.closed or db.invalidated or in_memory:
            return
        if self._own and _mode(self._driver) != self._mode:
            db.invalidate()  # no later body could have a transaction on it
            return
        if self._kept.get(POOLED):
            return
        if not self._notes and _reported(self._driver) == self._reported:
            return
        stays = any(map(_STAYS.search, self._notes))
        if not self._own or stays or not self._reset():
            db.invalidate()

    def _reset(self) -> bool:
        """Whether all is as it was when the connection was opened."""
        db = self._db
        if (db.dialect.name, db.dialect.driver) != ("postgresql", "psycopg"):
            return False
        try:
            self._driver.execute(_RESET + self._kept.get(AGAIN, ""))
        except db.dialect.loaded_dbapi.Error:
            return False
        except BaseException:
            db.invalidate()  # interrupted halfway
            raise
        return True


def _mode(driver: Any) -> tuple[Any, ...]:
    """How the driver's connection begins, sends and commits, as it knows without asking."""
    ask = getattr(driver, "get_autocommit", None)  # PyMySQL's, and of others like it
    if ask is not None:
        return (ask(),)
    piped = getattr(getattr(driver, "pgconn", None), "pipeline_status", None)  # psycopg's
    return piped, getattr(driver, "autocommit", None), getattr(driver, "isolation_level", None)


def autocommits(driver: Any) -> bool:
    """Whether the driver's connection commits each statement, as far as it knows."""
    ask = getattr(driver, "get_autocommit", None)  # PyMySQL's, and of others like it
    if ask is not None:
        return bool(ask())
    # sqlite3 begins nothing by itself without a level, and nobody said BEGIN.
    by_sqlite3 = getattr(driver, "isolation_level", "") is None
    unbegun = by_sqlite3 and getattr(driver, "in_transaction", True) is False
    return unbegun or getattr(driver, "autocommit", False) is True


def refuse_autocommit(driver: Any) -> None:
    """Refuse an Engine of the user's own on which nothing can commit together."""
    if autocommits(driver):
        raise ConfigurationError(
            'The ledger\'s Engine commits each statement (isolation_level="AUTOCOMMIT"), so '
            "effects and DONE cannot commit together. Give the ledger an Engine without it."
        )


def _reported(driver: Any) -> list[Any]:
    """What the server has said of the session, as the driver knows it without asking."""
    ask = getattr(getattr(driver, "pgconn", None), "parameter_status", None)
    return [] if ask is None else [ask(name) for name in _REPORTED]


def note(
    db: sa.Connection, _cursor: Any, statement: str, _values: Any, _context: Any, _many: bool
) -> None:
    """A listener that notes statements, for drivers whose cursors do not."""
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
            kept[PREPARED] = None  # for what the ledger says in this transaction yet


@functools.lru_cache(maxsize=1_000)
def _may_change(statement: str) -> bool:
    return _MAY_CHANGE.search(statement) is not None


@functools.cache
def noting(cursor: type[Any]) -> type[Any]:
    """A class of cursors like this one, whose statements are noted while a body has them."""

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
def noting_connection() -> type[Any]:
    """A class of sqlite3 connections whose cursors note statements."""
    import sqlite3  # not everywhere there is Python

    class NotingConnection(sqlite3.Connection):
        def cursor(self, factory: Any = None) -> Any:
            return super().cursor(noting(sqlite3.Cursor) if factory is None else factory)

    return NotingConnection
