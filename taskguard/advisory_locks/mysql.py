"""GET_LOCK of MariaDB 10.6 and MySQL 8.0 or later with PyMySQL: one round trip per operation.

If the server becomes read-only, for example at a switchover, the session ends at its next answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from taskguard.advisory_locks.names import name_of
from taskguard.advisory_locks.session import Name, Opened, Session
from taskguard.errors import LedgerUnavailableError

__all__ = ["MySQLSession"]

_SESSION = "select connection_id(), @@global.read_only"
_LAST = "set session wait_timeout = %(seconds)s"
_NUMBERS = 1 << 32  # the server's greeting has 32 bits of the session's number
_MOST_NAMES = 1_000  # in one statement


class MySQLSession(Session):
    """A session that holds locks of GET_LOCK."""

    def name(self, key: str) -> Name:
        return name_of(key, database=self.database.engine.url.database or "")

    def _open(self) -> Opened:
        greeted: int = self.connection.thread_id()
        [[number, read_only]] = self.database.ask_alone(
            self, _SESSION, {}, longest_s=self._answer_s
        )
        own = number % _NUMBERS == greeted % _NUMBERS
        return Opened(number, own=own, replica=bool(read_only))

    def _last(self, seconds: float) -> float:
        whole_s = math.ceil(seconds)
        self.database.ask_alone(self, _LAST, {"seconds": whole_s}, longest_s=self._answer_s)
        return float(whole_s)

    def _take(self, names: Sequence[Name]) -> int:
        # CASE stops at the first lock that is not granted, and does not try the others.
        tried = " ".join(
            f"when not (get_lock(%(n{at})s, 0) <=> 1) then {at}" for at in range(len(names))
        )
        [got] = self._each(f"case {tried} else {len(names)} end", names)
        return int(got)

    def _free(self, names: Sequence[Name]) -> int:
        freed = self._each(_columns("coalesce(release_lock({}), 0)", names), names)
        return sum(map(int, freed))

    def taken(self, names: Sequence[Name]) -> set[Name]:
        found: set[Name] = set()
        for at in range(0, max(1, len(names)), _MOST_NAMES):
            part = names[at : at + _MOST_NAMES]
            holders = self._each(_columns("is_used_lock({})", part), part)
            found |= {name for name, who in zip(part, holders, strict=True) if who is not None}
        return found

    def _each(self, columns: str, names: Sequence[Name]) -> Sequence[Any]:
        """Return the values of these columns. `%(n0)s` in them is the first name."""
        values = {f"n{at}": name for at, name in enumerate(names)}
        [row] = self._ask(f"{_SESSION}{', ' if columns else ''}{columns}", **values)
        if row[1]:
            self.invalidate(None)
            raise LedgerUnavailableError("the server has become read-only")
        return row[2:]  # type: ignore[no-any-return]


def _columns(call: str, names: Sequence[Name]) -> str:
    return ", ".join(call.format(f"%(n{at})s") for at in range(len(names)))
