"""Keeps messages in the line of their key, and promotes them: `ports.Lines`, `ports.Promotions`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from taskguard.ledger.connections.retrying import retried
from taskguard.ledger.lines import newest, park, reading, relay
from taskguard.ledger.parts.base import Part
from taskguard.ledger.records import overdue_of
from taskguard.model.bounds import NO_RATES, Bounds, Rate
from taskguard.model.claims import Answer, Claim, ClaimRequest, Overdue, ParkedNewest

__all__ = ["SqlLines"]

# In the beginning and at the end of a stored call.
_QUEUE = re.compile(r'"queue": "([^"\\]+)"')
_APP = re.compile(r', "app": ("(?:[^"\\]|\\.)*")\}$')


class SqlLines(Part):
    """Messages that wait for their key."""

    @retried
    def park(self, request: ClaimRequest, *, only_new: bool = False) -> bool:
        """Store the work with its call in the line of its key. Return False if it may not wait."""
        self._check_call(request)
        if request.by_run:
            return park.park(self._database, request, only_new=only_new)
        return self._statements.park(request, only_new=only_new)

    @retried
    def park_newest(
        self, request: ClaimRequest, *, only_new: bool = False
    ) -> ParkedNewest | Answer | None:
        """Store the work as the only one of its task that waits for the key; see `ports.py`."""
        self._check_call(request)
        return newest.park(self._database, request, only_new=only_new)

    @retried
    def note_notified(self, work: str) -> None:
        """Note that the caller of work that was superseded while it waited gets its answer."""
        newest.note_notified(self._database, work)

    @retried
    def keep(self, claim: Claim, *, retries: int, call: str | None, due_in_s: float) -> bool:
        """Note that FAILED work keeps its position, and that its message was sent once more."""
        return self._statements.keep(claim, retries=retries, call=call, due_in_s=due_in_s)

    @retried
    def leave(self, claim: Claim, *, retries: int) -> bool:
        """Give up the position of FAILED work whose message does not come again."""
        return self._statements.leave(claim, retries=retries)

    @retried
    def promote_next(
        self,
        key: str,
        *,
        expected_s: float,
        app: str = "",
        queues: Sequence[str] | None = None,
        bounds: Bounds | None = None,
        ahead_s: float | None = None,
        rates: Mapping[str, Rate | None] = NO_RATES,
    ) -> Overdue | None:
        """Note that the first message in line is promoted, if its key is free; see `ports.py`."""
        found = self._statements.promote_next(
            key,
            app=app,
            queues=queues,
            expected_s=expected_s,
            bounds=bounds,
            ahead_s=ahead_s,
            rates=rates,
        )
        return None if found is None else overdue_of(found)

    @retried
    def expired(
        self, *, app: str = "", queues: Sequence[str] | None = None, limit: int = 1000
    ) -> list[Overdue]:
        """Return messages that expired while they waited; see `ports.py`."""
        found = relay.expired(self._database, app=app, queues=queues, limit=limit)
        return [overdue_of(each) for each in found]

    @retried
    def count_waiting(self, *, most: int = 10_000) -> dict[tuple[str, str], int]:
        """Return how many messages wait, by their namespace and the kind of their queue.

        It reads at most `most` messages.
        """
        found: dict[tuple[str, str], int] = {}
        for begin, end in reading.calls_in_line(self._database, most=most):
            queue, app = _QUEUE.search(begin), _APP.search(end)
            if queue is not None:
                name = json.loads(app[1]) if app is not None else "", queue[1]
                found[name] = found.get(name, 0) + 1
        return found

    @retried
    def has_lines(self, *, app: str = "", queues: Sequence[str] | None = None) -> bool:
        """Return True if a message of this namespace, and of these queues (None: any), waits."""
        return relay.has_lines(self._database, app=app, queues=queues)
