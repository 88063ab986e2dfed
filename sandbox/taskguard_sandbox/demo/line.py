"""One account, many messages at once: they wait in the ledger, and run in order.

Guarantees: the numbers are measured. Waiting messages are counted in the ledger, and the order is
that of the effects' fences. The demo holds the key until all messages wait. Otherwise the first
message would be the one that a worker fetches first. It ends when each message has its effect, or
as a failure after a minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import sqlalchemy as sa

from taskguard import connect
from taskguard.ledger.sql import SqlLedger
from taskguard_sandbox.demo import orders
from taskguard_sandbox.demo.display import Display
from taskguard_sandbox.demo.effects import LINE

__all__ = ["BOOKINGS", "show_line"]

BOOKINGS = 24
_ACCOUNT = "7"
_AT_MOST_S = 60.0
_POLL_S = 0.02
_IN_ORDER = sa.text("select item from effects where queue = :queue order by fence")


def show_line(
    database: str, engine: sa.Engine, display: Display, raise_if_interrupted: Callable[[], None]
) -> bool:
    """Return True if all waited, and each was done once, in the order of sending."""

    def done() -> list[int]:
        with engine.connect() as db:
            return [int(item) for item in db.execute(_IN_ORDER, {"queue": LINE}).scalars()]

    def wait_for(condition: Callable[[], bool]) -> None:
        while not condition() and time.monotonic() < until_s:
            raise_if_interrupted()
            time.sleep(_POLL_S)

    display.say()
    display.say(f'{BOOKINGS} bookings of one account at once, busy="park", order="strict":')
    until_s = time.monotonic() + _AT_MOST_S
    ledger = SqlLedger(database)
    try:
        with connect().lock(f"account:{_ACCOUNT}"):
            for number in range(BOOKINGS):
                orders.book.delay(_ACCOUNT, number)
            wait_for(lambda: len(ledger.waiting()) >= BOOKINGS)
            waited = len(ledger.waiting())
    finally:
        ledger.close()
    display.note(orders.QUEUE, f"{waited} waited in the ledger, and held no worker")
    wait_for(lambda: len(done()) >= BOOKINGS)
    found = done()
    in_order = list(range(BOOKINGS))
    right = found == in_order and waited == BOOKINGS
    text = " ".join(map(str, found))
    display.note(
        orders.QUEUE, f"{'each once, in order' if right else '[bold red]WRONG[/]'}: {text}"
    )
    return right
