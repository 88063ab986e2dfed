"""Celery tasks and RQ jobs that are killed once, at a boundary that their message names.

"ledger.park done" kills there; "flush: ledger.park done" asks the test for another fault.

Real workers import this module. URLs and the folder of their logs come from the environment.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from celery import Celery

import taskguard_celery
import taskguard_celery.decorator
import taskguard_rq
import taskguard_rq.decorator
from pytest_taskguard.crashes import Crashes, kill_process
from support.fault_injection import inject
from taskguard import Guard
from taskguard.integration import Relay
from taskguard.settings import make_ledger, make_locks

if TYPE_CHECKING:
    from typing import Self

TTL_S = float(os.environ.get("CRASH_TTL_S", "1"))
STRICTLY: dict[str, Any] = {
    "key": "line:<kind>",
    "once_per": "item:<item>",
    "busy": "park",
    "order": "strict",
    "ttl_s": TTL_S,
    "max_crashes": 20,
}
NEWEST: dict[str, Any] = {
    "key": "line:<kind>",
    "once_per": "message",
    "ttl_s": TTL_S,
    "max_crashes": 20,
}
BROKER = os.environ["CRASH_BROKER"]
FOLDER = Path(os.environ["CRASH_FOLDER"])


class Boom(Exception):  # noqa: N818
    """The error of a failing body."""


class _InHand:
    item = ""
    line = ""
    fault = ""


def _strike() -> None:
    (FOLDER / f"struck {_InHand.item}").touch()
    if not _InHand.fault:
        kill_process()
    inject(int(os.environ["CRASH_FAULTS"]), _InHand.fault, _InHand.line)


class _OfDeliveries(Crashes):
    """Ignores calls of a relay's thread, which are no boundary of a delivery."""

    def reach(self, boundary: str) -> None:
        if threading.current_thread().name != "taskguard-relay":
            super().reach(boundary)


crashes = _OfDeliveries(_strike)
locks = crashes.locks(make_locks(os.environ["CRASH_LOCKS"]))  # type: ignore[arg-type]
ledger = crashes.ledger(make_ledger(os.environ["CRASH_LEDGER"]))  # type: ignore[arg-type]
celery_queue = taskguard_celery.decorator.CeleryQueue
celery_parking = taskguard_celery.decorator.CeleryParking
rq_queue = taskguard_rq.decorator.RQQueue
taskguard_celery.decorator.CeleryQueue = lambda task: crashes.queue(celery_queue(task))  # type: ignore[assignment,misc,arg-type]
taskguard_celery.decorator.CeleryParking = lambda task: crashes.parking(celery_parking(task))  # type: ignore[assignment,misc,arg-type]
taskguard_rq.decorator.RQQueue = lambda job: crashes.queue(rq_queue(job))  # type: ignore[assignment,misc,arg-type]
rq_parking = taskguard_rq.decorator.RQParking
taskguard_rq.decorator.RQParking = lambda *of: crashes.parking(rq_parking(*of))  # type: ignore[assignment,misc,arg-type]
taskguard_rq.configure(locks=locks, ledger=ledger)
# A worker of this class has imported this module before it forks a work horse.
GuardedWorker = taskguard_rq.GuardedWorker


def crashing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a guarded function, so that its messages crash, and record their boundaries."""

    @functools.wraps(function)
    def watched(item: str, kind: str, at: str | None = None) -> Any:
        _InHand.item, _InHand.line = item, kind
        struck = (FOLDER / f"struck {item}").exists()
        _InHand.fault, _, boundary = (at or "").rpartition(": ")
        crashes.reset(boundary if boundary and not struck else None)
        crashes.reach("delivery asked")
        try:
            return function(item, kind, at)
        finally:
            with (FOLDER / f"seen {item}").open("a") as file:
                file.writelines(f"{each}\n" for each in crashes.seen)
            crashes.reach("delivery done")

    return watched


def work(item: str, kind: str, guard: Guard) -> str:
    """Do the work of each kind of body. Its effect is a row of `effects`."""
    with crashes.around("body"):
        if kind == "fails" and guard.attempt == 1:
            raise Boom(item)
        if kind in ("slow", "twice") and guard.attempt == 1:
            time.sleep(TTL_S * 1.5)
        if kind == "plain":
            return "done"
        if kind == "checkpoint" and guard.progress is None:
            with guard.checkpoint("half") as db:
                _write(db, f"{item} half")
        with guard.transaction() as db:
            _write(db, item)
        return "done"


def _write(db: Any, item: str) -> None:
    db.execute(sa.text("insert into effects values (:item)"), {"item": item})


_run_relay = Relay.run


def _run_relay_when_allowed(relay: Relay) -> None:
    """Run the relay only after the test has allowed it."""
    while not relay._stopped.wait(0.2):
        if (FOLDER / "relay").exists():
            _run_relay(relay)


if os.environ.get("CRASH_RELAY") == "later":
    Relay.run = _run_relay_when_allowed  # type: ignore[method-assign]

app = Celery("crashing", broker=BROKER, backend=os.environ.get("CRASH_RESULTS"))
_of_redis = {
    "visibility_timeout": int(os.environ.get("CRASH_VISIBILITY_S", "3600")),
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
}
app.conf.update(
    task_default_queue="crashing",
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    worker_enable_remote_control=False,  # two workers of one name on RabbitMQ do not share it
    broker_connection_retry_on_startup=True,
    broker_transport_options=_of_redis if BROKER[:5] == "redis" else {"confirm_publish": True},
    taskguard_locks=locks,
    taskguard_ledger=ledger,
)


class _Turn:
    """A body of a line, from its beginning to just before its COMMIT. The rig reads that."""

    def __init__(self, item: str, line: str) -> None:
        self._item = item
        self._file = FOLDER / f"turns {line}"
        self._ended = False

    def __enter__(self) -> Self:
        self._note("began")
        return self

    def end(self) -> None:
        if not self._ended:
            self._note("ended")
        self._ended = True

    def __exit__(self, *_: object) -> None:
        self.end()

    def _note(self, what: str) -> None:
        with self._file.open("a") as file:
            file.write(f"{what} {self._item}\n")


# Not shared: every later app of a test's process would have it.
@app.task(shared=False, autoretry_for=(Boom,), default_retry_delay=1, max_retries=5)
@crashing
@taskguard_celery.guarded_task(key="item:<item>", ttl_s=TTL_S)
def by_celery(item: str, kind: str, at: str | None, guard: Guard) -> str:
    del at
    return work(item, kind, guard)


@app.task(shared=False)
@crashing
@taskguard_celery.guarded_task(
    key="line:<kind>", once_per="item:<item>", busy="park", ttl_s=TTL_S, max_crashes=20
)
def in_line(item: str, kind: str, at: str | None, guard: Guard) -> None:
    """Work in the line `kind`. The first message takes a moment, so that others find the
    key taken."""
    del at
    _take_turn(item, kind, 0.3, guard)


def _take_turn(item: str, line: str, seconds: float, guard: Guard) -> None:
    with crashes.around("body"), _Turn(item, line) as turn:
        if item.endswith("first"):
            time.sleep(seconds)
        with guard.transaction() as db:
            _write(db, item)
            turn.end()


@app.task(shared=False, autoretry_for=(Boom,), default_retry_delay=1, max_retries=1)
@crashing
@taskguard_celery.guarded_task(**STRICTLY)
def strictly(item: str, kind: str, at: str | None, guard: Guard) -> None:
    """Work in the line `kind`. Its first message fails once, the second one for good."""
    del at
    # On a busy machine its lease may expire in the first attempt. Then the next one has to fail.
    _take_strict_turn(item, kind, guard, is_retry=strictly.request.retries > 0)


def _take_strict_turn(item: str, line: str, guard: Guard, *, is_retry: bool) -> None:
    with crashes.around("body"), _Turn(item, line) as turn:
        if item.endswith("second") or (item.endswith("first") and not is_retry):
            raise Boom(item)
        with guard.transaction() as db:
            _write(db, item)
            turn.end()


@app.task(shared=False)
@crashing
@taskguard_celery.guarded_task(busy="latest", **NEWEST)
def latest(item: str, kind: str, at: str | None, guard: Guard) -> None:
    """Work in the line `kind`. The newest of the waiting messages runs."""
    del at
    _take_turn(item, kind, 0.3, guard)


@app.task(shared=False)
@crashing
@taskguard_celery.guarded_task(busy="supersede", **NEWEST)
def supersede(item: str, kind: str, at: str | None, guard: Guard) -> None:
    """Work in the line `kind`. The newest message takes the key from the others."""
    del at
    _take_turn(item, kind, 0.3, guard)


@crashing
@taskguard_rq.guarded_job(busy="latest", **NEWEST)
def latest_by_rq(item: str, kind: str, at: str | None, guard: Guard) -> None:
    """Do as `latest` does. A work horse takes longer to start."""
    del at
    _take_turn(item, kind, 1.0, guard)


@crashing
@taskguard_rq.guarded_job(busy="supersede", **NEWEST)
def supersede_by_rq(item: str, kind: str, at: str | None, guard: Guard) -> None:
    """Do as `supersede` does."""
    del at
    _take_turn(item, kind, 1.0, guard)


@crashing
@taskguard_rq.guarded_job(**STRICTLY)
def strictly_by_rq(item: str, kind: str, at: str | None, guard: Guard) -> None:
    """Do as `strictly` does. Each job tells RQ its number of retries."""
    del at
    _take_strict_turn(item, kind, guard, is_retry=guard.attempt > 1)


@crashing
@taskguard_rq.guarded_job(key="item:<item>", ttl_s=TTL_S)
def by_rq(item: str, kind: str, at: str | None, guard: Guard) -> str:
    del at
    return work(item, kind, guard)


@crashing
@taskguard_rq.guarded_job(
    key="line:<kind>", once_per="item:<item>", busy="park", ttl_s=TTL_S, max_crashes=20
)
def in_line_by_rq(item: str, kind: str, at: str | None, guard: Guard) -> None:
    """Do as `in_line` does. A work horse takes longer to start."""
    del at
    _take_turn(item, kind, 1.0, guard)
