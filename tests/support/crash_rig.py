"""Deliveries that crash: real workers of `crashing.py`, their queue, and their results."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from rq import Queue, Retry
from rq.job import Job, JobStatus

import taskguard_celery
import taskguard_celery.decorator
import taskguard_rq
import taskguard_rq.decorator
from support.celery_worker import CeleryWorker, RQWorker
from support.waiting import wait_until
from taskguard.ledger.sql import SqlLedger
from taskguard.ledger.tables import WORK
from taskguard.model.states import State

__all__ = ["CrashRig", "crash_rig"]

_ANSWERS: dict[JobStatus, str] = {
    JobStatus.FINISHED: "SUCCESS",
    JobStatus.CANCELED: "REVOKED",
    JobStatus.FAILED: "FAILURE",
}
# Time on an idle machine for all crash points of a test: each takes a lease and a redelivery.
_CRASHES_S = 120.0


class CrashRig:
    """A queue and its workers, whose deliveries crash, and their results."""

    def __init__(self, queue: str, broker: str, database: str, folder: Path) -> None:
        self.folder = folder
        self.faults = Counter[str]()  # number of each fault that messages can ask for
        self.queue = queue
        self._workers = itertools.count(1)
        self.by_redis = broker.startswith("redis")
        self.ledger = SqlLedger(database)
        self.ledger.create_schema()
        self.engine = sa.create_engine(database)
        with self.engine.begin() as db:
            # No unique index: the test has to see a double effect.
            db.execute(sa.text("create table effects (item text)"))
        sys.modules.pop("support.crashing", None)
        self.jobs: Any = importlib.import_module("support.crashing")
        self.broker = redis.Redis.from_url(broker) if self.by_redis else None
        self._rq = self.broker and Queue("crashing", connection=self.broker)
        self.task = f"support.crashing.by_{queue}"

    def worker(self) -> CeleryWorker | RQWorker:
        """Return a worker that starts with its block."""
        log = self.folder / f"worker-{next(self._workers)}.log"
        if self.queue == "celery":
            return CeleryWorker({"SHOP_APP": "support.crashing"}, log=log, concurrency=4)
        broker = self.jobs.os.environ["CRASH_BROKER"]
        worker_class = "support.crashing.GuardedWorker"
        return RQWorker("crashing", url=broker, worker_class=worker_class, log=log)

    def send(self, item: str, kind: str, at: str | None = None) -> None:
        """Send one message, or for "twice" two deliveries of it."""
        if self.queue == "celery":
            for _ in range(1 + (kind == "twice")):
                self.jobs.by_celery.apply_async((item, kind, at), task_id=item)
            return
        # A killed horse takes one retry, a failing body another.
        job = self._rq.enqueue(
            self.jobs.by_rq, item, kind, at, job_id=item, retry=Retry(max=5, interval=1)
        )
        if kind == "twice":
            self._rq.push_job_id(job.id)

    def send_in_line(self, item: str, line: str, at: str | None) -> None:
        """Send one message of a line, for the rig's task."""
        job = getattr(self.jobs, self.task.rpartition(".")[2])
        if self.queue == "celery":
            job.apply_async((item, line, at), task_id=item)
        else:
            retry = Retry(max=5, interval=1)
            self._rq.enqueue(job, item, line, at, job_id=item, retry=retry, result_ttl=-1)

    def enqueue(self, item: str, args: tuple[Any, ...]) -> None:
        """Enqueue it with a position from now on. It may fail twice, the second time for good."""
        job = getattr(self.jobs, self.task.rpartition(".")[2])
        if self.queue == "celery":
            taskguard_celery.enqueue(job, args, task_id=item)
        else:
            retry = Retry(max=1, interval=1)
            taskguard_rq.enqueue(self._rq, job, args, job_id=item, retry=retry)

    def state(self, item: str) -> State | None:
        view = self.ledger.view(f"{self.task} item:{item}")
        return None if view is None else view.state

    def wait_until_done(self, items: list[str]) -> None:
        """Wait until the works of all these messages are DONE."""
        self._wait_for_each(items, lambda item: self.state(item) is State.DONE)

    def wait_until_answered(self, items: list[str]) -> dict[str, str]:
        """Wait, and return the answers that the callers of these messages get."""
        self._wait_for_each(items, lambda item: self._answer(item) is not None)
        return {item: str(self._answer(item)) for item in items}

    def _wait_for_each(self, items: list[str], has_ended: Callable[[str], bool]) -> None:
        """Wait until all have ended. Each poll asks only until it finds one that has not."""
        left = list(items)

        def states() -> list[tuple[str, State | None]]:
            return [(each, self.state(each)) for each in left if not has_ended(each)]

        def none_left() -> bool:
            while left and has_ended(left[-1]):
                left.pop()
            return not left

        wait_until(none_left, takes_s=_CRASHES_S, interval_s=0.1, message=lambda: f"{states()[:9]}")

    def unanswered(self, items: list[str]) -> list[str]:
        """Return those of these messages whose callers have no answer so far."""
        return [item for item in items if self._answer(item) is None]

    def _answer(self, item: str) -> str | None:
        """Return the state that the caller of a message sees, in Celery's words, or None if it has
        no answer."""
        if self.queue == "rq":
            return _ANSWERS.get(Job.fetch(item, self.broker).get_status())
        result = self.jobs.app.AsyncResult(item)
        return result.state if result.ready() else None

    def messages_due(self) -> list[str]:
        """Return the names of messages that will be sent again."""
        with self.engine.connect() as db:
            return list(
                db.execute(sa.select(WORK.c.message).where(WORK.c.due.is_not(None))).scalars()
            )

    def allow_relay(self) -> None:
        """Allow a relay from now on."""
        (self.folder / "relay").touch()

    def wait_until_quiet(self) -> None:
        """Wait until no message is in a queue on Redis, or in a worker."""
        quiet: list[bool] = []

        def is_quiet() -> bool:
            # For a moment kombu has a message between a queue and the worker's list.
            quiet.append(self._in_queues() == 0)
            return quiet[-20:] == [True] * 20

        wait_until(is_quiet, takes_s=_CRASHES_S, interval_s=0.1)

    def _in_queues(self) -> int:
        if self.queue == "rq":
            registries = self._rq.started_job_registry, self._rq.scheduled_job_registry
            return int(self._rq.count + sum(each.count for each in registries))
        queues = sum(self.broker.llen(name) for name in self.broker.keys("crashing*"))
        return int(queues + self.broker.hlen("unacked"))

    def seen(self, item: str) -> list[str]:
        """Return the boundaries that the deliveries of an item reached."""
        file = self.folder / f"seen {item}"
        return file.read_text().split("\n")[:-1] if file.exists() else []

    def struck(self, item: str) -> bool:
        return (self.folder / f"struck {item}").exists()

    def began(self, line: str) -> list[str]:
        """Return the bodies of a line in the order in which they began."""
        return [item for what, item in self._turns(line) if what == "began"]

    def overlapped(self, line: str) -> bool:
        """Return whether a body of a line began before another one had ended."""
        at_work = ""
        for what, item in self._turns(line):
            if what == "began" and at_work not in ("", item):
                return True
            at_work = item if what == "began" else ""
        return False

    def _turns(self, line: str) -> list[list[str]]:
        text = (self.folder / f"turns {line}").read_text()
        return [entry.split() for entry in text.splitlines()]

    def effects(self) -> Counter[str]:
        with self.engine.connect() as db:
            return Counter(db.execute(sa.text("select item from effects")).scalars())

    def close(self) -> None:
        self.jobs.app.close()
        self.jobs.locks.close()
        self.jobs.ledger.close()
        if self.broker is not None:
            self.broker.close()
        self.engine.dispose()
        self.ledger.close()


@contextmanager
def crash_rig(
    queue: str,
    database: str,
    valkey: Any,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    broker: str | None = None,
    **variables: str,
) -> Iterator[CrashRig]:
    """Return a rig of "celery" or "rq" on an existing database.

    `variables` override those of the workers: CRASH_LEDGER="…", for example.
    """
    broker = broker or valkey.url_of(2)
    for name, value in {
        "CRASH_FOLDER": str(folder),
        "CRASH_BROKER": broker,
        "CRASH_LOCKS": valkey.url_of(1),
        "CRASH_LEDGER": database,
        **variables,
    }.items():
        monkeypatch.setenv(name, value)
    # The jobs change these in a process. This process imports them as well, so restore them.
    for module, name, value in (
        (taskguard_celery.decorator, "CeleryQueue", taskguard_celery.decorator.CeleryQueue),
        (taskguard_celery.decorator, "CeleryParking", taskguard_celery.decorator.CeleryParking),
        (taskguard_rq.decorator, "RQQueue", taskguard_rq.decorator.RQQueue),
        (taskguard_rq.decorator, "RQParking", taskguard_rq.decorator.RQParking),
    ):
        monkeypatch.setattr(module, name, value)
    made = CrashRig(queue, broker, database, folder)
    try:
        yield made
    finally:
        made.close()
