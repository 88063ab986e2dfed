"""Workers count each delivery once, also messages that never run, and send all counts."""

from __future__ import annotations

import signal
from typing import Any

from support.waiting import wait_until
from taskguard.metrics import OUTCOMES, zeros_of_task


def outcomes(shop: Any) -> dict[str, int]:
    """Return how often deliveries of `ship` had which outcome."""
    counts = {row.what: int(row.n) for row in shop.ledger.counts() if row.task.endswith(".ship")}
    by_name = {name: counts.get(f"deliveries/{name}", 0) for name in OUTCOMES}
    return {name: n for name, n in by_name.items() if n}


def send(shop: Any) -> None:
    """Send messages to a worker that is not running yet.

    Expired ones come first: a worker that has run the others has received these before.
    """
    for number in (4, 5):
        shop.tasks.ship.apply_async((number,), expires=0.01)
    for number in (1, 2, 3):
        shop.tasks.ship.delay(number)


def send_again(shop: Any, worker: Any) -> dict[str, int]:
    """Send two messages again after their work is done. Return the outcomes of all."""
    wait_until(lambda: worker.handled() >= 3, message="the tasks")
    for _ in range(2):
        shop.tasks.ship.delay(1)
    return {"done": 3, "duplicate": 2, "expired": 2}


def test_an_idle_worker_sends_its_last_counts(shop: Any) -> None:
    """A child by a thread of its own, and the worker itself by a timer. Zeros come first."""
    send(shop)
    with shop.worker(concurrency=2) as worker:
        counts = {row.what for row in shop.ledger.counts() if row.task.endswith(".ship")}
        assert set(zeros_of_task()) <= counts
        expected = send_again(shop, worker)
        wait_until(lambda: outcomes(shop) == expected, takes_s=15.0, message="the counts")


def test_a_worker_that_stops_sends_its_counts(shop: Any) -> None:
    """Its children at their shutdown, and it itself at its exit."""
    send(shop)
    with shop.worker(concurrency=2) as worker:
        expected = send_again(shop, worker)
        wait_until(lambda: worker.handled() >= 5, message="the other messages")
        worker.signal(signal.SIGTERM)
        worker.wait()
    assert outcomes(shop) == expected


def test_a_revoked_message_is_counted_once(shop: Any) -> None:
    """By the process that got it, which in a solo pool runs the other ones, too."""
    with shop.worker(concurrency=1, pool="solo") as worker:
        shop.tasks.nap.delay(1, 2)
        revoked = shop.tasks.ship.delay(2)
        shop.revoke(revoked)
        shop.tasks.ship.delay(3)
        wait_until(lambda: shop.effects()["3"], message="the last task")
        worker.signal(signal.SIGTERM)
        worker.wait()
    if shop.effects()["2"]:  # it had begun before the worker knew
        assert outcomes(shop) == {"done": 2}
    else:
        assert outcomes(shop) == {"revoked": 1, "done": 1}
