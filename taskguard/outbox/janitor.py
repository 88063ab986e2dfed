"""Find work that no worker runs, and flag it for operators: an hourly walk through the table.

A holder that vanished before its first renewal leaves no trace in an index, and a message that is
not delivered again takes nothing over. The walk reads one page in each look of the relay, so that
it delays no promotion.

Guarantees: work is only flagged. An operator decides whether it runs again.
"""

from __future__ import annotations

from taskguard.api import TaskGuard

__all__ = ["Janitor"]

_EVERY_S = 3600.0
_PAGE = 10_000


class Janitor:
    """The walk of one relay.

    Args:
        runtime: locks and ledger.
        page: how many rows one step reads. Default: 10,000.
    """

    def __init__(self, runtime: TaskGuard, *, page: int = _PAGE) -> None:
        self._runtime = runtime
        self._page = page
        self._after = ""
        self._next_s = float("-inf")

    def step(self) -> None:
        """Read the next page, unless a walk began less than an hour ago, and has ended.

        Raises:
            LedgerUnavailableError: the database is down. The next step reads the same page.
        """
        ledger, now_s = self._runtime.ledger, self._runtime.runner.clock.monotonic_s()
        if ledger is None or (not self._after and now_s < self._next_s):
            return
        before = self._after
        self._after = ledger.mark_left(after=self._after, page=self._page) or ""
        if not before:
            self._next_s = now_s + _EVERY_S
