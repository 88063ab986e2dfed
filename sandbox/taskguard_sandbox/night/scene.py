"""The scene: servers, three workers, and what goes wrong with them.

Guarantees: when `scene()` yields, everything that the page asks about has happened. All processes
are ended afterwards.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from celery import Celery

import taskguard
from taskguard.model.states import State
from taskguard.model.views import Past, WorkFilter
from taskguard.operations import Operations
from taskguard_sandbox.examples import example_servers, started
from taskguard_sandbox.workers import CeleryWorker, Worker

__all__ = ["DAY", "PAYMENT", "scene"]

DAY = "2026-11-28"
PAYMENT = "pay-51c2"
_HERE = Path(__file__).parent
_LONGEST_S, _COUNTED_S = 120.0, 30.0
_COUNTED = {"done", "duplicate", "failed"}
_LONG_S = 3_600.0


class _Web(CeleryWorker):
    """A worker with the name of a web server, and a queue of its own."""

    def __init__(self, name: str) -> None:
        super().__init__("shop", children=2, python_path=_HERE)
        self._arguments += ["-n", f"celery@{name}", "-Q", name]


@contextmanager
def scene() -> Iterator[None]:
    """Make the night. The environment's variables name its servers to commands."""
    with example_servers("night") as (valkey, _):
        app = Celery("shop", broker=valkey.url_of(0))
        names = ("web-1", "web-2", "web-3")
        with (
            started(map(_Web, names)) as workers,
            contextlib.closing(taskguard.connect()) as tg,
        ):
            _disturb(app, tg.operations, workers[1])
            yield
        app.close()


def _disturb(app: Celery, ops: Operations, second: Worker) -> None:
    def send(task: str, *args: object, to: str, name: str | None = None) -> None:
        app.send_task(f"shop.{task}", args, queue=to, task_id=name)

    # web-2 dies with two bodies: one has a short lease, and one a long lease.
    send("ship", 9, _LONG_S, to="web-2")
    send("export", DAY, to="web-2")
    # web-3 is busy with an account for a long time, and payments wait behind it.
    send("rebalance", 42, _LONG_S, to="web-3")
    _until(lambda: len(ops.keys().items) >= 2)  # their leases were renewed
    _until(lambda: ops.key(f"export:{DAY}") is not None)
    second.kill()
    send("pay", 42, to="web-3", name=PAYMENT)
    for number in range(3):
        send("pay", 42, to="web-3", name=f"pay-{number}")
    # An order comes twice, mails fail, and a report kills its worker's processes.
    for name in ("ship-1", "ship-2"):
        send("ship", 1, 0.5, to="web-1", name=name)
        _until(lambda: ops.work("shop.ship order:1") is not None)
    for order in (5, 6):
        send("mail", order, to="web-1")
    # Processes send what they count every ten seconds, and not if they are killed before.
    with contextlib.suppress(TimeoutError):
        _until(lambda: _counted(ops) >= _COUNTED and bool(_past(ops)), longest_s=_COUNTED_S)
    send("report", DAY, to="web-1")
    _until(lambda: len(ops.waiting(key="account:42").items) == 4)
    _until(lambda: len(ops.list_work(WorkFilter(state=State.FAILED)).items) == 2)
    _until(lambda: len(ops.list_work(WorkFilter(state=State.DEAD)).items) == 1)
    _until(lambda: len(ops.list_work(WorkFilter(overdue=True)).items) == 1)
    key = "account:7"
    ops.pause(key, reason="manual correction, ticket 815", actor="ann@desk-2")
    send("pay", 7, to="web-1", name="pay-7")
    _until(lambda: len(ops.waiting(key=key).items) == 1)


def _past(ops: Operations) -> tuple[Past, ...]:
    key = ops.key("order:1")
    return () if key is None else key.past


def _counted(ops: Operations) -> set[str]:
    return {each.what.removeprefix("deliveries/") for each in ops.counts() if each.n}


def _until(happened: Callable[[], bool], *, longest_s: float = _LONGEST_S) -> None:
    """Wait for something that the workers do."""
    end_s = time.monotonic() + longest_s
    while not happened():
        if time.monotonic() > end_s:
            raise TimeoutError("The workers did not do what this night needs.")
        time.sleep(0.2)
