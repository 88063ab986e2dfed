"""Gathers what happened to keys and changed no record: duplicates, deferrals, lost leases.

Guarantees: equal happenings of a key are one row, with their number and the details of the last
one. A process sends at most `MOST` rows with a key at a time. The rest is one row with the key "",
and is counted, so that nothing is dropped unnoticed.
"""

from __future__ import annotations

from taskguard.metrics import HISTORY_DROPPED
from taskguard.model.counts import Noted
from taskguard.model.history import Happened

__all__ = ["MOST", "Happenings"]

MOST = 100
"""How many rows a process sends at a time."""


class Happenings:
    """The happenings since the last flush. Not safe for several threads: `tally.py` has the lock.

    Attributes:
        dropped: the name of the counter of what was left out.
    """

    dropped = HISTORY_DROPPED.what()

    def __init__(self) -> None:
        self._rows: dict[tuple[str, Happened], Noted] = {}
        self._left_out = 0

    def __bool__(self) -> bool:
        return bool(self._rows) or self._left_out > 0

    def add(self, noted: Noted) -> int:
        """Add a happening. Return how many were left out now."""
        if not noted.key:  # those that were left out before
            self._left_out += noted.n
            return 0
        place = noted.key, noted.what
        before = self._rows.get(place)
        if before is None and len(self._rows) >= MOST:
            self._left_out += noted.n
            return noted.n
        n = noted.n if before is None else noted.n + before.n
        self._rows[place] = noted if n == noted.n else _with(noted, n)
        return 0

    def drain(self) -> list[Noted]:
        """Return the rows to send, and forget them."""
        rows, left_out = list(self._rows.values()), self._left_out
        self._rows, self._left_out = {}, 0
        if left_out:
            rows.append(Noted(what=Happened.OTHER, n=left_out, key="", detail="left out"))
        return rows


def _with(noted: Noted, n: int) -> Noted:
    return Noted(
        what=noted.what,
        n=n,
        key=noted.key,
        task=noted.task,
        work=noted.work,
        owner=noted.owner,
        fence=noted.fence,
        detail=noted.detail,
    )
