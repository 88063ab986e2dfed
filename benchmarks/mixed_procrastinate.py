"""The procrastinate app of `mixed.py`: a task whose `lock=` keeps the order of its key."""

from __future__ import annotations

import os
import time

import procrastinate

from benchmarks.journal import note

QUEUE = "mixed"

app = procrastinate.App(
    connector=procrastinate.PsycopgConnector(conninfo=os.environ["MIXED_DATABASE"])
)


@app.task(queue=QUEUE)
def work(key: str, number: int, body_s: float) -> None:
    """Do the work of one message."""
    began_s = time.monotonic()
    time.sleep(body_s)
    note(key, number, began_s)


def create() -> None:
    """Create its tables."""
    with app.open():
        app.schema_manager.apply_schema()


def publish(hot: list[str], count: int, body_s: float, *, cold: int = 0) -> None:
    """Put messages of the hot keys in turns into the queue, and cold ones between them."""
    with app.open():
        for number in range(count):
            key = hot[number % len(hot)]
            work.configure(lock=key).defer(key=key, number=number, body_s=body_s)
            if number * cold // count != (number + 1) * cold // count:
                work.configure(lock=f"cold:{number}").defer(
                    key="cold", number=number, body_s=body_s
                )
