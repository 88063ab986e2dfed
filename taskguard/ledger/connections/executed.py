"""Statements that a MariaDB session has prepared: they are sent by name, with their values only.

A compound statement takes the server a third longer to read than to do.

Guarantees: the rows that a cursor would give for the same statement and values. A connection
prepares a statement the second time that it has it: one of a process for one job has no second
time. The first session that has not what was prepared, behind a proxy that shares them, or takes no
more, is the last that is asked so; nothing has run then, and it is asked as it is.

For connections that no body has: a body could take away what is prepared.
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
# A server with as many as it takes, and a statement or a proxy that cannot be prepared.
_NOT_PREPARED = (1461, 1295)


class _Marked(NamedTuple):
    """A statement with a mark for each value: how it is prepared, and how executed."""

    names: tuple[str, ...]
    text: str
    prepare: str
    execute: str


@functools.lru_cache(maxsize=100)
def _marked(statement: str) -> _Marked:
    names = tuple(_NAME.findall(statement))
    text = _NAME.sub("?", statement).replace("%%", "%")
    # By its text: a session that several processes share must not have another under the name.
    name = f"taskguard_{blake2b(text.encode(), digest_size=8).hexdigest()}"
    using = f" using {', '.join(['%s'] * len(names))}" if names else ""
    return _Marked(names, text, f"prepare {name} from %s", f"execute {name}{using}")


class Executed:
    """For the connections of one database, made by PyMySQL."""

    def __init__(self, driver: Any) -> None:
        self._error = driver.Error
        self._prepares = True

    def ask(
        self, connection: Any, kept: dict[Any, Any], statement: str, values: Mapping[str, Any]
    ) -> list[tuple[Any, ...]]:
        """The rows of one statement. Raises PyMySQL's errors. `kept`: see `_PREPARED`."""
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
