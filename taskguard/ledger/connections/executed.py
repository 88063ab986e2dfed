"""Run statements that a MariaDB session has prepared: only their name and values are sent.

The server needs a third more time to parse a compound statement than to run it.

Guarantees: it returns the rows that a cursor would return. A connection prepares a statement at its
second use, because a process for one job has no second use. If a session lacks a prepared statement
(behind a proxy that shares sessions) or accepts no more, this process prepares no more statements.
Such a statement has not run, and is sent again as text.

Only for connections that no body uses, because a body could remove prepared statements.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

__all__ = ["Executed"]

_NAME = re.compile(r"%\((\w+)\)s")
_PREPARED = "taskguard_prepared"  # a key of the `info` that SQLAlchemy keeps with a connection
_UNKNOWN_STATEMENT = 1243
# The server has its maximum of statements; the statement or the proxy cannot prepare.
_NOT_PREPARED = (1461, 1295)


class _Marked(NamedTuple):
    """A statement with a `?` for each value, and the statements that prepare and execute it."""

    names: tuple[str, ...]
    text: str
    prepare: str
    execute: str


@functools.lru_cache(maxsize=100)
def _marked(statement: str) -> _Marked:
    names = tuple(_NAME.findall(statement))
    text = _NAME.sub("?", statement).replace("%%", "%")
    # The name depends on the text, because several processes may share a session.
    name = f"taskguard_{blake2b(text.encode(), digest_size=8).hexdigest()}"
    using = f" using {', '.join(['%s'] * len(names))}" if names else ""
    return _Marked(names, text, f"prepare {name} from %s", f"execute {name}{using}")


class Executed:
    """Runs prepared statements on the PyMySQL connections of one database."""

    def __init__(self, driver: Any) -> None:
        self._error = driver.Error
        self._prepares = True

    def ask(
        self, connection: Any, kept: dict[Any, Any], statement: str, values: Mapping[str, Any]
    ) -> list[tuple[Any, ...]]:
        """Return the rows of one statement. Raises PyMySQL's errors. `kept`: see `_PREPARED`."""
        asked = _marked(statement)
        with connection.cursor() as cursor:
            if self._is_prepared(cursor, kept, asked):
                try:
                    cursor.execute(asked.execute, [values[name] for name in asked.names])
                    return list(cursor.fetchall())
                except self._error as error:
                    self._give_up(error, _UNKNOWN_STATEMENT)
            cursor.execute(statement, values)
            return list(cursor.fetchall())

    def _is_prepared(self, cursor: Any, kept: dict[Any, Any], asked: _Marked) -> bool:
        if not self._prepares:
            return False
        prepared: dict[str, bool] = kept.setdefault(_PREPARED, {})
        known = prepared.get(asked.execute)
        if known is False:
            try:
                cursor.execute(asked.prepare, [asked.text])
            except self._error as error:
                self._give_up(error, *_NOT_PREPARED)
                return False
        prepared[asked.execute] = known is not None
        return known is not None

    def _give_up(self, error: Exception, *numbers: int) -> None:
        if error.args[:1] not in [(number,) for number in numbers]:
            raise error
        self._prepares = False
