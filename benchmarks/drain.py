"""Draining queues of short tasks: Celery with two prefork children, RQ with one worker.

The table has the processor time of one task: the worker's with its children, and that of both
servers. Each round starts a new worker, and compares it with the hand-written way in that round.
Each drain has order numbers of its own, because an order that is DONE is a duplicate.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import redis

from benchmarks.clocks import family
from benchmarks.databases import Database, by_hand, databases
from benchmarks.measure import CONSOLE, Parts
from taskguard.ledger.sql import SqlLedger
from taskguard_sandbox.servers import Valkey

BY_HAND, BARE = "by hand, no effect", "taskguard, no effect"
BY_HAND_WITH_EFFECT, WITH_EFFECT = "by hand, an effect with DONE", "taskguard, an effect with DONE"
WITH_DATABASE = (BY_HAND, BARE, BY_HAND_WITH_EFFECT, WITH_EFFECT)
LOCKS_ONLY = "taskguard, locks only"
ROUNDS = 6
_SLICE_S = 0.005
_FIRST_ORDERS = itertools.count(0, 1_000_000)


@dataclass(frozen=True)
class Case:
    """One line: the name of a task in the queue's module, and what its worker has besides."""

    task: str
    worker: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Queue:
    """A queue, its workers, and its lines of the table by their names.

    `module` has `publish(task, first, count)` and the tasks. A round publishes `count` tasks, and
    ends when `left()` returns 0.
    """

    name: str
    module: str
    count: int
    command: Callable[[Case], list[str]]
    left: Callable[[redis.Redis], int]
    cases: Mapping[str, Case]


def _celery(case: Case) -> list[str]:
    del case
    return [
        "-m", "celery", "-A", "benchmarks.drain_celery", "worker", "-P", "prefork", "-c", "2",
        "-l", "WARNING", "--without-gossip", "--without-mingle", "-Q", "drain",
    ]  # fmt: skip


def _left_in_celery(broker: redis.Redis) -> int:
    with broker.pipeline() as pipe:
        waiting, unacked = pipe.llen("drain").hlen("unacked").execute()
    return int(waiting) + int(unacked)


def _rq(case: Case) -> list[str]:
    # The jobs' module is loaded before the forks, as in a fast worker.
    program = "import benchmarks.drain_rq, rq.cli; rq.cli.main()"
    options = ["worker", "--url", os.environ["DRAIN_BROKER"], "--quiet", "-w", case.worker]
    return ["-c", program, *options, "drain"]


def _left_in_rq(broker: redis.Redis) -> int:
    with broker.pipeline() as pipe:
        waiting, at_work = pipe.llen("rq:queue:drain").zcard("rq:wip:drain").execute()
    return int(waiting) + int(at_work)


CELERY = Queue(
    "Celery, prefork, two children",
    "benchmarks.drain_celery",
    2_000,
    _celery,
    _left_in_celery,
    {
        "no guard at all": Case("bare"),
        "redis-py Lock in the body": Case("redis_lock"),
        "fencekit (Redis alone)": Case("fencekit"),
        LOCKS_ONLY: Case("guarded", environment={"DRAIN_LOCKS_ONLY": "yes"}),
        BY_HAND: Case("by_hand"),
        BARE: Case("guarded"),
        BY_HAND_WITH_EFFECT: Case("by_hand_with_effect"),
        WITH_EFFECT: Case("guarded_with_effect"),
    },
)
RQ = Queue(
    "RQ, a fork for each job",
    "benchmarks.drain_rq",
    200,
    _rq,
    _left_in_rq,
    {
        "no guard at all": Case("bare", "rq.Worker"),
        "unique=True (only while it is queued)": Case("unique", "rq.Worker"),
        BY_HAND: Case("by_hand", "rq.Worker"),
        "taskguard, stock worker": Case("guarded", "rq.Worker"),
        "taskguard, GuardedWorker": Case("guarded", "taskguard_rq.GuardedWorker"),
    },
)


def main(*, quick: bool, beside_load: bool = False) -> None:
    """Print a table for each database, and one for RQ."""
    queues = [CELERY, RQ]
    for database in databases():
        with Valkey() as valkey:
            set_up(database, valkey)
            for queue in queues:
                references = dict.fromkeys(queue.cases, BY_HAND)
                references |= dict.fromkeys((BY_HAND_WITH_EFFECT, WITH_EFFECT), BY_HAND_WITH_EFFECT)
                measure(queue, database, valkey, references, quick=quick, beside_load=beside_load)
        # Measure RQ and the tasks without a database once.
        queues = [replace(CELERY, cases={name: CELERY.cases[name] for name in WITH_DATABASE})]


def set_up(database: Database, valkey: Valkey) -> None:
    """Create the tables, and tell the workers which servers to use."""
    ledger = SqlLedger(database.url)
    ledger.create_schema()
    ledger.close()
    by_hand(valkey.url_of(1), database.url).close()  # creates its tables
    os.environ.update(
        DRAIN_BROKER=valkey.url_of(2),
        TASKGUARD_LOCKS_URL=valkey.url_of(1),
        TASKGUARD_LEDGER_URL=database.url,
    )


def measure(
    queue: Queue,
    database: Database,
    valkey: Valkey,
    references: Mapping[str, str],
    *,
    quick: bool,
    beside_load: bool = False,
) -> None:
    """Print a table of one queue's cases. `references`: the case to compare each case with."""
    servers = {**database.clocks, "Redis": family(valkey.pid)}
    count = queue.count // 4 if quick else queue.count
    rounds = 1 if quick else ROUNDS

    def one_round(number: int) -> dict[str, dict[str, float]]:
        found = {}
        names = list(queue.cases)
        at = number % len(names)
        for name in names[at:] + names[:at]:
            found[name] = _drain(queue, valkey.url, servers, queue.cases[name], count)
            rate = 1e6 / found[name]["wall"]
            CONSOLE.print(f"  round {number + 1}: {name}: {rate:,.0f} tasks/s")
        return found

    title = f"{queue.name}, {database.name}: {rounds} rounds of {count:,} short tasks"
    parts = Parts(title, references, beside_load=beside_load)
    parts.measure(one_round, rounds)
    parts.show()


def _drain(
    queue: Queue,
    server: str,
    servers: Mapping[str, Callable[[], float]],
    case: Case,
    count: int,
) -> dict[str, float]:
    """µs per task of a fresh worker in each part, from its first tasks to its last."""
    with redis.Redis.from_url(server) as everything:
        everything.flushall()
    environment = {**os.environ, **case.environment}
    publish = f"import sys; from {queue.module} import publish; publish(*sys.argv[1:])"
    first = str(next(_FIRST_ORDERS))
    command = [sys.executable, "-c", publish, case.task, first, str(count)]
    subprocess.run(command, env=environment, check=True, cwd=Path.cwd())
    worker = subprocess.Popen(
        [sys.executable, *queue.command(case)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    clocks = {"worker": family(worker.pid), **servers, "wall": time.perf_counter}
    try:
        with redis.Redis.from_url(environment["DRAIN_BROKER"]) as broker:
            return _used_us(lambda: queue.left(broker), clocks, count)
    finally:
        children = psutil.Process(worker.pid).children(recursive=True)
        worker.terminate()
        worker.wait(60)
        for child in psutil.wait_procs(children, timeout=10)[1]:
            child.kill()


def _used_us(
    left: Callable[[], int], clocks: Mapping[str, Callable[[], float]], count: int
) -> dict[str, float]:
    """The first tenth is a warm-up: children connect and prepare their statements."""
    while (at_start := left()) > count * 0.9:
        time.sleep(_SLICE_S)
    before = [clock() for clock in clocks.values()]
    while left() > 0:
        time.sleep(_SLICE_S)
    return {
        name: (clock() - was) * 1e6 / at_start
        for (name, clock), was in zip(clocks.items(), before, strict=True)
    }
