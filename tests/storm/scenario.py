"""One storm from its beginning to its end: servers, workers, messages, faults, quiet.

Guarantees: a seed draws the same items, duplicates and faults in the same order, for every library.
Their time and their target depend on the machine. Everything that was started is stopped. Quiet
means that no broker holds a message, no body runs, and no event follows.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import importlib
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import redis
import sqlalchemy as sa
from celery import Task
from rq import Queue, Retry
from rq.job import Job

from storm import audit, journal
from storm.faults import FAULTS, Fault
from storm.settings import QUEUE, RQ_QUEUE
from support.proxy import Mode, Proxy
from taskguard.ledger.sql import SqlLedger
from taskguard_sandbox.servers import Postgres, Valkey
from taskguard_sandbox.workers import CeleryWorker, RQWorker, Worker

__all__ = ["Record", "World", "draw_fault", "draw_item", "run"]

TESTS = Path(__file__).resolve().parent.parent
OURS = "taskguard"
_POLL_S = 0.02
_FAULT_EVERY_S = 0.6
_WAITING = 12
_STALLED_S = 25.0
_AT_MOST_LONGER_S = 120.0
_GIVE_UP_AFTER_RESENDS = 3
_KINDS = ("plain", "plain", "plain", "long", "atomic", "halves", "fails")


@dataclass
class Item:
    """A work and its messages."""

    name: str
    kind: str
    pause_s: float
    by_rq: bool
    messages: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """An item as the seed draws it: its messages with the delays of their copies."""

    kind: str
    pause_s: float
    rq: bool
    again: tuple[tuple[str, float], ...]


def draw_item(seed: int, number: int) -> Plan:
    """Draw the item of this number, independent of the library."""
    rng = random.Random(f"{seed} item {number}")
    pauses_s = [rng.uniform(0, 0.02), rng.uniform(0.2, 1), rng.uniform(1, 3)]
    pause_s = rng.choices(pauses_s, [7, 2, 1])[0]
    # "1" is a copy by the broker, "2" one by a producer that sends again.
    copies = rng.choices([0, 1, 3], [6, 3, 1])[0]
    again = [("1", rng.uniform(0, pause_s + 1)) for _ in range(copies)]
    if rng.random() < 0.15:
        again.append(("2", rng.uniform(0, pause_s + 2)))
    return Plan(rng.choice(_KINDS), pause_s, rng.random() < 0.2, tuple(again))


def draw_fault(seed: int, number: int) -> tuple[Fault, float, random.Random]:
    """Draw the fault of this number, the seconds until the next one, and a generator for its own
    choices."""
    rng = random.Random(f"{seed} fault {number}")
    (fault,) = rng.choices(list(FAULTS), list(FAULTS.values()))
    return fault, rng.expovariate(1 / _FAULT_EVERY_S), rng


@dataclass
class Record:
    """Observations, for the invariants and the report."""

    who: str
    items: list[Item]
    published: int
    faults: Counter[str]
    resent: int
    commits_lost: int
    most_copies: int
    lines: list[dict[str, Any]]
    changes: list[audit.Change]
    effects: list[tuple[str, int]]
    work_items: dict[str, str]
    lock_keys: list[str]
    took_s: float


class World:
    """The servers and workers of one storm, and delayed actions."""

    def __init__(self, who: str, seed: int, stack: ExitStack) -> None:
        self.who = who
        self.seed = seed
        self.folder = Path(tempfile.mkdtemp(prefix="taskguard-storm-"))
        stack.callback(shutil.rmtree, self.folder)
        (self.folder / journal.BODIES).mkdir()
        self.broker = stack.enter_context(Valkey())
        self.locks = stack.enter_context(Valkey(save=""))
        self.postgres = stack.enter_context(Postgres())
        self.locks_proxy = stack.enter_context(Proxy(self.locks.port))
        self.database_proxy = stack.enter_context(Proxy(self.postgres.port))
        self.broker_client = redis.Redis.from_url(self.broker.url)
        self.locks_client = redis.Redis.from_url(self.locks.url, socket_timeout=1)
        stack.callback(self.broker_client.close)
        stack.callback(self.locks_client.close)
        self._pool = stack.enter_context(ThreadPoolExecutor(4))
        database = self.postgres.create_database("storm")
        self.engine = sa.create_engine(database, pool_pre_ping=True)
        stack.callback(self.engine.dispose)
        if who == OURS:
            ledger = SqlLedger(database)
            ledger.create_schema()
            ledger.close()
            audit.create(self.engine)
        else:
            audit.create_effects(self.engine)
        proxied = database.replace(f":{self.postgres.port}/", f":{self.database_proxy.port}/")
        _set_environment(
            stack,
            STORM_FOLDER=str(self.folder),
            STORM_BROKER=self.broker.url,
            STORM_LOCKS=f"redis://127.0.0.1:{self.locks_proxy.port}/0",
            STORM_DATABASE=proxied,
            STORM_PEER=who,
        )
        self._module = "storm.guarded" if who == OURS else "storm.peers"
        self.celery: list[Worker] = [
            CeleryWorker(self._module, children=3, python_path=TESTS) for _ in range(2)
        ]
        self.rq: list[Worker] = []
        if who == OURS:
            self.rq = [RQWorker(RQ_QUEUE, url=self.broker.url, python_path=TESTS) for _ in range(2)]
        for worker in (*self.celery, *self.rq):
            stack.enter_context(worker)
        self._tasks: Any = importlib.import_module(self._module)
        stack.callback(self._tasks.app.close)
        self.paused: set[int] = set()
        self.commits_lost = 0
        self._mutex = threading.Lock()
        self._later: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    # -- for the faults -----------------------------------------------------------------------

    def victim(self, rng: random.Random) -> int:
        """Return a pool child or work horse, in a body if there is one. 0 if there is none."""
        at_work = [int(mark.name) for mark in (self.folder / journal.BODIES).iterdir()]
        mine = [pid for pid in at_work if self._is_mine(pid)]
        if mine and rng.random() < 0.8:
            return rng.choice(mine)
        worker = self.celery_worker(rng)
        children = [] if worker is None else _children(worker.pid)
        return rng.choice(children) if children else 0

    def _is_mine(self, pid: int) -> bool:
        with contextlib.suppress(psutil.Error):
            workers = {worker.pid for worker in (*self.celery, *self.rq) if worker.running}
            return psutil.Process(pid).ppid() in workers
        return False

    def celery_worker(self, rng: random.Random) -> Worker | None:
        """Return a Celery worker that runs."""
        running = [worker for worker in self.celery if worker.running]
        return rng.choice(running) if running else None

    def terminate_a_backend(self) -> str:
        """Terminate one of the workers' connections."""
        with contextlib.suppress(sa.exc.DBAPIError), self.engine.begin() as db:
            ended = db.execute(
                sa.text(
                    "select pg_terminate_backend(pid) from pg_stat_activity "
                    "where datname = 'storm' and pid <> pg_backend_pid() "
                    "order by random() limit 1"
                )
            ).first()
            return "one backend" if ended else ""
        return ""

    def later(self, delay_s: float, call: Callable[[], object]) -> None:
        """Call it after a delay, from `step()`."""
        with self._mutex:
            heapq.heappush(self._later, (time.monotonic() + delay_s, next(self._numbers), call))

    def in_background(self, start: Callable[[], object]) -> None:
        """Do something that takes seconds and does not affect others."""
        self._pool.submit(start)

    def step(self, *, everything: bool = False) -> None:
        """Call everything that is due, or everything that is left."""
        while True:
            with self._mutex:
                if not self._later or not (everything or self._later[0][0] <= time.monotonic()):
                    return
                _, _, call = heapq.heappop(self._later)
            call()

    def calm(self) -> None:
        """End all faults: every process continues, and every server is up."""
        self.step(everything=True)
        for proxy in (self.locks_proxy, self.database_proxy):
            proxy.mode = Mode.PASS
        self._pool.shutdown(wait=True)
        for server in (self.locks, self.postgres, *self.celery):
            server.resume()
            server.start()

    # -- messages -----------------------------------------------------------------------------

    def publish(self, item: Item, message: str, *, again: bool) -> None:
        """Publish a new message, or the same one again as the broker itself would."""
        if item.by_rq:
            self._enqueue(item, message)
            return
        atomic = self.who == OURS and item.kind == "atomic"
        task = getattr(self._tasks, "taskguard_atomic" if atomic else self.who)
        # celery-once takes its lock in its own apply_async, without the broker.
        apply = functools.partial(Task.apply_async, task) if again else task.apply_async
        apply((item.name, item.kind, item.pause_s), task_id=message)

    def _enqueue(self, item: Item, message: str) -> None:
        queue = Queue(RQ_QUEUE, connection=self.broker_client)
        if Job.exists(message, connection=self.broker_client):
            queue.push_job_id(message)
            return
        arguments = (item.name, item.kind, item.pause_s)
        queue.enqueue(
            "storm.jobs.job", args=arguments, job_id=message, retry=Retry(max=1_000, interval=1)
        )

    def waiting(self) -> int:
        """Return the number of messages that no worker has taken."""
        client = self.broker_client
        return int(client.llen(QUEUE)) + int(client.llen(f"rq:queue:{RQ_QUEUE}"))

    def quiet(self) -> bool:
        """Return whether no broker holds a message at this moment."""
        with self.broker_client.pipeline(transaction=True) as pipe:
            pipe.llen(QUEUE)
            pipe.hlen("unacked")
            pipe.llen(f"rq:queue:{RQ_QUEUE}")
            pipe.zcard(f"rq:scheduled:{RQ_QUEUE}")
            pipe.zcard(f"rq:wip:{RQ_QUEUE}")
            pipe.llen(f"rq:queue:{RQ_QUEUE}:intermediate")
            return not any(pipe.execute())

    def most_copies(self) -> int:
        """Return the highest number of copies that the broker has of one Celery message."""
        found: Counter[str] = Counter()
        for text in self.broker_client.lrange(QUEUE, 0, -1):
            found[json.loads(text)["headers"]["id"]] += 1
        for text in self.broker_client.hvals("unacked"):
            found[json.loads(text)[0]["headers"]["id"]] += 1
        return max(found.values(), default=0)

    def said(self, name: str) -> int:
        """Return how often workers have reported it."""
        return sum(line["name"] == name for line in journal.read(self.folder))

    def double_effects(self) -> int:
        """Return the number of double effects so far."""
        count = sa.text("select count(*) - count(distinct item) from effects")
        with contextlib.suppress(sa.exc.DBAPIError), self.engine.connect() as db:
            return int(db.execute(count).scalar_one())
        return 0

    def sizes(self) -> tuple[int, ...]:
        """Return a number that grows as long as anything happens."""
        files = sorted(self.folder.glob("journal-*"))
        return tuple(file.stat().st_size for file in files)


def run(
    who: str,
    *,
    seconds: float,
    seed: int,
    say: Callable[[str], None] = lambda _: None,
    until: Callable[[World], bool] = lambda _: True,
) -> Record:
    """Run a storm of this many seconds, and the quiet after it.

    It goes on for up to two minutes more, until `until` returns True.
    """
    with ExitStack() as stack:
        world = World(who, seed, stack)
        # In a thread of its own, because a library may wait for the lock server when it publishes.
        producer = stack.enter_context(ThreadPoolExecutor(1))
        return _Course(world, seconds, producer, say).run(until)


class _Course:
    def __init__(
        self, world: World, seconds: float, producer: Executor, say: Callable[[str], None]
    ) -> None:
        self._world = world
        self._producer = producer
        self._sent: list[Future[None]] = []
        self._seconds = seconds
        self._say = say
        self._items: list[Item] = []
        self._faults: Counter[str] = Counter()
        self._published = 0
        self._resent = 0
        self._most_copies = 0

    def run(self, enough: Callable[[World], bool]) -> Record:
        began_s = time.monotonic()
        self._storm(enough, began_s + self._seconds)
        self._world.calm()
        self._settle()
        return self._record(time.monotonic() - began_s)

    def _storm(self, enough: Callable[[World], bool], until_s: float) -> None:
        world = self._world
        making, fault_numbers = self._make_items(), itertools.count()
        next_fault_s = time.monotonic() + 1.0
        looked_s = 0.0
        last_s = until_s + _AT_MOST_LONGER_S
        while (now_s := time.monotonic()) < last_s:
            if now_s >= until_s:
                if enough(world):
                    return
                until_s = now_s + 1.0
            world.step()
            if world.waiting() + self._sending() < _WAITING:
                next(making)
            if now_s >= next_fault_s:
                fault, pause_s, rng = draw_fault(world.seed, next(fault_numbers))
                next_fault_s = now_s + pause_s
                done = fault(world, rng)
                if done:
                    name = fault.__name__.replace("_", " ")
                    self._faults[name] += 1
                    self._say(f"{name}: {done}")
            if now_s - looked_s > 0.5:
                looked_s = now_s
                self._most_copies = max(self._most_copies, world.most_copies())
            time.sleep(_POLL_S)

    def _make_items(self) -> Iterator[Item]:
        for number in itertools.count():
            plan = draw_item(self._world.seed, number)
            by_rq = plan.rq and bool(self._world.rq)
            kind = "plain" if by_rq and plan.kind == "atomic" else plan.kind
            item = Item(f"{'r' if by_rq else 'c'}{number}", kind, plan.pause_s, by_rq)
            self._items.append(item)
            self._send(item, f"{item.name}-1")
            for message, delay_s in plan.again:
                self._send_later(item, f"{item.name}-{message}", delay_s)
            yield item

    def _send_later(self, item: Item, message: str, delay_s: float) -> None:
        self._world.later(delay_s, lambda: self._send(item, message))

    def _send(self, item: Item, message: str) -> None:
        self._sent.append(self._producer.submit(self._publish, item, message))

    def _sending(self) -> int:
        """Return how many deliveries the producer has not sent yet."""
        self._sent = [each for each in self._sent if not each.done()]
        return len(self._sent)

    def _publish(self, item: Item, message: str) -> None:
        try:
            self._world.publish(item, message, again=message in item.messages)
        except redis.RedisError as error:  # a library that takes a lock to publish
            self._say(f"{message} was not published: {error!r}")
            self._send_later(item, message, 0.5)
        else:
            self._published += 1
            if message not in item.messages:
                item.messages.append(message)

    # -- afterwards ---------------------------------------------------------------------------

    def _settle(self) -> None:
        """Wait until nothing more happens. Then send work again that is not done, as a
        sweep would."""
        before: Any = None
        since_s = time.monotonic()
        for _ in range(_GIVE_UP_AFTER_RESENDS):
            while time.monotonic() - since_s < _STALLED_S:
                self._world.step()
                sizes = self._world.sizes()
                if sizes != before:
                    before, since_s = sizes, time.monotonic()
                if not self._sending() and self._world.quiet() and time.monotonic() - since_s > 2.0:
                    break
                time.sleep(0.2)
            unfinished = self._unfinished()
            if not unfinished or self._world.who != OURS:
                return
            self._say(f"sent again, as a sweep would: {[item.name for item in unfinished]}")
            self._resent += len(unfinished)
            for item in unfinished:
                self._send(item, f"{item.name}-again")
            since_s = time.monotonic()

    def _unfinished(self) -> list[Item]:
        work_items = self._work_items()
        return [item for item in self._items if work_items.get(f"item:{item.name}") != "DONE"]

    def _work_items(self) -> dict[str, str]:
        if self._world.who != OURS:
            return {}
        with self._world.engine.connect() as db:
            rows = db.execute(sa.text("select key, state from taskguard_work"))
            return {row.key: row.state for row in rows}

    def _record(self, took_s: float) -> Record:
        world = self._world
        with world.engine.connect() as db:
            effects = [tuple(row) for row in db.execute(sa.text("select item, fence from effects"))]
        ours = world.who == OURS
        return Record(
            who=world.who,
            items=self._items,
            published=self._published,
            faults=self._faults,
            resent=self._resent,
            commits_lost=world.commits_lost,
            most_copies=self._most_copies,
            lines=journal.read(world.folder),
            changes=audit.changes(world.engine) if ours else [],
            effects=effects,
            work_items=self._work_items(),
            lock_keys=_lock_keys(world),
            took_s=took_s,
        )


def _children(pid: int) -> list[int]:
    with contextlib.suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children()]
    return []


def _set_environment(stack: ExitStack, **variables: str) -> None:
    """Set the environment of the workers, and of this process, which imports the app to publish."""
    for name in [each for each in os.environ if each.startswith(("CELERY_", "RQ_", "TASKGUARD_"))]:
        stack.callback(os.environ.__setitem__, name, os.environ.pop(name))
    os.environ.update(variables)
    for name in [
        each for each in sys.modules if each in ("storm.app", "storm.guarded", "storm.peers")
    ]:
        del sys.modules[name]


def _lock_keys(world: World) -> list[str]:
    """Return the keys of bodies: a worker that starts leaves its ledger's mark there, too."""
    keys = [key.decode() for key in world.locks_client.keys("*")]
    return [key for key in keys if "{the ledger}" not in key]
