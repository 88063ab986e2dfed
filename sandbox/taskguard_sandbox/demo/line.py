"""One account, many messages at once: they wait in the ledger, and come in their order.

Guarantees: what it says is counted: who waits by the ledger, the order by the effects' fences. Ends
when each message has its effect, or after a minute, which is wrong then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import sqlalchemy as sa

from taskguard.ledger.sql import SqlLedger
from taskguard_sandbox.demo import orders
from taskguard_sandbox.demo.display import Display
from taskguard_sandbox.demo.effects import LINE

__all__ = ["BOOKINGS", "show_line"]

BOOKINGS = 24
_AT_MOST_S = 60.0
_POLL_S = 0.02
_IN_ORDER = sa.text("select item from effects where queue = :queue order by fence")


def show_line(
    database: str, engine: sa.Engine, display: Display, raise_if_interrupted: Callable[[], None]
) -> bool:
    """Whether each was done once, and nobody overtook more than a neighbour."""

    def done() -> list[int]:
        with engine.connect() as db:
            return [int(item) for item in db.execute(_IN_ORDER, {"queue": LINE}).scalars()]

    display.say()
    display.say(f'{BOOKINGS} bookings of one account at once, busy="park":')
    most = 0
    ledger = SqlLedger(database)
    try:
        for number in range(BOOKINGS):
            orders.book.delay("7", number)
        until_s = time.monotonic() + _AT_MOST_S
        while len(done()) < BOOKINGS and time.monotonic() < until_s:
            raise_if_interrupted()
            most = max(most, len(ledger.waiting()))
            time.sleep(_POLL_S)
    finally:
        ledger.close()
    display.note(orders.QUEUE, f"{most} at a time waited in the ledger, and held no worker")
    found = done()
    # Children that fetch neighbours at the same moment may change their places.
    overtaken = any(one > other + orders.CHILDREN for one, other in pairwise(found))
    right = sorted(found) == list(range(BOOKINGS)) and not overtaken
    text = " ".join(map(str, found))
    display.note(
        orders.QUEUE, f"{'each once, in order' if right else '[bold red]WRONG[/]'}: {text}"
    )
    return right
