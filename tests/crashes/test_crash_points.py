"""Real processes, killed (SIGKILL) at each boundary of a delivery; the queue delivers again.

One effect, nothing lost, DONE: by Celery and by RQ on PostgreSQL; on the other databases at some of
the boundaries, and at all of them in `make explore`. The boundaries come from the interfaces of the
code; one that no delivery here comes by is named with the reason.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from rq import Queue, Retry

import taskguard_celery.decorator
import taskguard_rq.decorator
from pytest_taskguard.crashes import boundaries
from support.exploration import Exploration
from support.waiting import wait_until
from taskguard.ledger.sql import SqlLedger
from taskguard.states import State
from taskguard_sandbox.workers import CeleryWorker, RQWorker

HERE = Path(__file__).resolve().parent.parent
KINDS = {
    "celery": ("transaction", "plain", "checkpoint", "fails", "slow", "twice"),
    # A work horse for every job takes its time; "twice" comes by what "slow" does.
    "rq": ("transaction", "plain", "checkpoint", "fails", "twice"),
}
TIMES = {"celery": 2, "rq": 1}

# Boundaries that these deliveries do not come by, and why.
ELSEWHERE = {
    "ledger.crash": "a body that ends its process; tests/celery/test_exits.py",
    "ledger.give_back": "shutdown and a lost lease; tests/celery/test_interrupts.py",
    "ledger.end_round": "the database ended the transaction; tests/integration",
    "ledger.done_elsewhere": "a redelivery that begins new work; tests/integration",
    "ledger.note": "what a leader remembers; tests/celery/test_leader_beat.py",
    "ledger.uncount_crash": "a holder that was taken over and is alive; tests/integration",
    "locks.hand_over": "the lock server forgot a holder; tests/integration",
    "locks.wait": 'busy="wait" only; tests/integration',
}


class CrashRig:
    """Where deliveries crash: a queue, its workers, and what they left."""

    def __init__(self, queue: str, valkey: Any, database: str, folder: Path) -> None:
        self.folder = folder
        self.queue = queue
        self.ledger = SqlLedger(database)
        self.ledger.create_schema()
        self.engine = sa.create_engine(database)
        with self.engine.begin() as db:
            # No unique index: a double effect has to be seen.
            db.execute(sa.text("create table effects (item text)"))
        sys.modules.pop("support.crashing", None)
        self.jobs: Any = importlib.import_module("support.crashing")
        self.broker = redis.Redis.from_url(valkey.url_of(2))
        self._rq = Queue("crashing", connection=self.broker)
        self.task = f"support.crashing.by_{queue}"

    def worker(self) -> Any:
        if self.queue == "celery":
            return CeleryWorker("support.crashing", children=4, python_path=HERE)
        broker = self.jobs.os.environ["CRASH_BROKER"]
        return RQWorker("crashing", url=broker, python_path=HERE, imports="support.crashing")

    def send(self, item: str, kind: str, at: str | None = None) -> None:
        """One message; for "twice" two deliveries of it."""
        if self.queue == "celery":
            for _ in range(1 + (kind == "twice")):
                self.jobs.by_celery.apply_async((item, kind, at), task_id=item)
            return
        # A horse that is killed is one retry, a body that fails another.
        job = self._rq.enqueue(
            self.jobs.by_rq, item, kind, at, job_id=item, retry=Retry(max=5, interval=1)
        )
        if kind == "twice":
            self._rq.push_job_id(job.id)

    def state(self, item: str) -> State | None:
        view = self.ledger.view(f"{self.task} item:{item}")
        return None if view is None else view.state

    def wait_until_done(self, items: list[str]) -> None:
        def left() -> list[tuple[str, State | None]]:
            states = [(item, self.state(item)) for item in items]
            return [each for each in states if each[1] is not State.DONE]

        wait_until(
            lambda: not left(), timeout_s=300, interval_s=0.3, message=lambda: f"{left()[:9]}"
        )

    def seen(self, item: str) -> list[str]:
        """The boundaries that the deliveries of an item came by."""
        file = self.folder / f"seen {item}"
        return file.read_text().split("\n")[:-1] if file.exists() else []

    def struck(self, item: str) -> bool:
        return (self.folder / f"struck {item}").exists()

    def effects(self) -> Counter[str]:
        with self.engine.connect() as db:
            return Counter(db.execute(sa.text("select item from effects")).scalars())

    def close(self) -> None:
        self.jobs.app.close()
        self.jobs.locks.close()
        self.jobs.ledger.close()
        self.broker.close()
        self.engine.dispose()
        self.ledger.close()


@pytest.fixture(
    params=[
        ("celery", "pg_url"),
        ("celery", "sqlite_url"),
        pytest.param(("celery", "mariadb_url"), marks=pytest.mark.debian),
        pytest.param(("celery", "mysql_url"), marks=pytest.mark.debian),
        ("rq", "pg_url"),
        ("rq", "sqlite_url"),
    ],
    ids=lambda param: f"{param[0]}-{param[1].removesuffix('_url')}",
)
def rig(
    request: pytest.FixtureRequest,
    valkey: Any,
    redis_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[CrashRig]:
    del redis_url  # empties the server
    queue, url = request.param
    database = str(request.getfixturevalue(url))
    for name, value in {
        "CRASH_FOLDER": str(tmp_path),
        "CRASH_BROKER": valkey.url_of(2),
        "CRASH_LOCKS": valkey.url_of(1),
        "CRASH_LEDGER": database,
    }.items():
        monkeypatch.setenv(name, value)
    # What the jobs set in a process, and this one imports them as well, is as it was afterwards.
    for module, name, value in (
        (taskguard_celery.decorator, "CeleryQueue", taskguard_celery.decorator.CeleryQueue),
        (taskguard_rq.decorator, "RQQueue", taskguard_rq.decorator.RQQueue),
    ):
        monkeypatch.setattr(module, name, value)
    made = CrashRig(queue, valkey, database, tmp_path)
    yield made
    made.close()


@pytest.mark.timeout(900)
def test_killed_at_any_boundary_there_is_one_effect(
    rig: CrashRig, exploration: Exploration
) -> None:
    """First each kind of body undisturbed, for the boundaries it comes by; then each of them."""
    kinds = KINDS[rig.queue]
    with rig.worker() as one, rig.worker() as two:
        for kind in kinds:  # one after the other: both workers are free for "twice"
            rig.send(kind, kind)
            rig.wait_until_done([kind])
        # DONE is in the ledger before its holder has said what it came by.
        wait_until(lambda: all("body done" in rig.seen(kind) for kind in kinds))
        points = {kind: _points(rig.seen(kind), TIMES[rig.queue]) for kind in kinds}
        _expect_every_boundary(rig, {point for each in points.values() for point in each})
        cases = [(kind, at) for kind in kinds for at in points[kind]]
        if rig.engine.dialect.name != "postgresql":
            cases = exploration.pick(cases, at_most=12)
        # RQ's ids are letters, digits and dashes.
        items = {re.sub(r"\W", "-", f"{kind} {at}"): (kind, at) for kind, at in cases}
        for item, (kind, at) in items.items():
            rig.send(item, kind, at)
        try:
            rig.wait_until_done(list(items))
        except AssertionError:
            print(one.log[-4000:], two.log[-4000:])
            raise
        struck = [item for item in items if rig.struck(item)]
    effects = rig.effects()
    for item, (kind, _) in items.items():
        assert effects[item] == (kind != "plain"), item
        assert effects[f"{item} half"] == (kind == "checkpoint"), item
    # What depends on timing (a renewal, a duplicate) need not come by again.
    assert len(struck) >= 0.8 * len(items), sorted(set(items) - set(struck))
    print(f"{len(items)} boundaries, {len(struck)} kills, one effect each")


def _points(seen: list[str], times: int) -> list[str]:
    """Each boundary, the first `times` times that it came by."""
    found = dict.fromkeys(seen)
    return [each for each in found if int(each.partition("#")[2] or 1) <= times]


def _expect_every_boundary(rig: CrashRig, points: set[str]) -> None:
    known = {point.partition("#")[0] for point in points}
    missing = {point.rpartition(" ")[0] for point in boundaries()} - {
        point.rpartition(" ")[0] for point in known
    }
    if rig.queue == "rq":
        missing.discard("ledger.defer")  # RQ keeps one entry of a job, and records no deferrals
    assert missing <= set(ELSEWHERE), f"no delivery comes by {sorted(missing - set(ELSEWHERE))}"
