"""Draining queues of short tasks: Celery with two prefork children, RQ with one worker.

Each line has the rate of a new worker, compared with the hand-written way in the same round. It
also has the processor time of one task: the worker's with its children, and that of both servers.
Each drain has order numbers of its own, because an order that is DONE is a duplicate.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import redis

from benchmarks.hand_written import ByHand
from benchmarks.measure import CONSOLE, figures, show
from taskguard.ledger.sql import SqlLedger
from taskguard_sandbox.servers import Postgres, Valkey

BY_HAND = "by hand: Redis and PostgreSQL"
BY_HAND_WITH_EFFECT = "by hand, an effect with DONE"
LOCKS_ONLY = "taskguard, locks only"
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
        "taskguard": Case("guarded"),
        BY_HAND_WITH_EFFECT: Case("by_hand_with_effect"),
        "taskguard, an effect with DONE": Case("guarded_with_effect"),
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


def main(*, quick: bool) -> None:
    """Print a table for each queue."""
    with Valkey() as valkey, Postgres() as postgres:
        url = postgres.create_database("drain")
        ledger = SqlLedger(url)
        ledger.create_schema()
        ledger.close()
        by_hand = ByHand(valkey.url_of(1), url.replace("+psycopg", ""))
        by_hand.db.execute("create table effects (item bigint)")
        by_hand.close()
        os.environ.update(
            DRAIN_BROKER=valkey.url_of(2),
            TASKGUARD_LOCKS_URL=valkey.url_of(1),
            TASKGUARD_LEDGER_URL=url,
        )
        servers = [family(valkey.pid), family(postgres.pid)]
        for queue in (CELERY, RQ):
            _measure(queue, valkey.url, servers, quick=quick)


def _measure(queue: Queue, server: str, servers: list[Callable[[], float]], *, quick: bool) -> None:
    rates: dict[str, list[float]] = {name: [] for name in queue.cases}
    used: dict[str, list[list[float]]] = {name: [] for name in queue.cases}
    count = queue.count // 4 if quick else queue.count
    for number in range(1 if quick else 8):
        names = list(queue.cases)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            rate, processor_us = _drain(queue, server, servers, queue.cases[name], count)
            rates[name].append(rate)
            used[name].append(processor_us)
            CONSOLE.print(f"  round {number + 1}: {name}: {rate:,.0f} tasks/s")
    of_effects = {name for name in queue.cases if name.endswith("an effect with DONE")}
    plain = {name: each for name, each in rates.items() if name not in of_effects}
    found = figures(plain, reference=BY_HAND)
    if of_effects:
        with_effect = {name: rates[name] for name in rates if name in of_effects}
        found += figures(with_effect, reference=BY_HAND_WITH_EFFECT)
    notes = {name: _words(each) for name, each in used.items()}
    title = f"{queue.name}: {count:,} short tasks; processor µs of worker + Redis + PostgreSQL"
    show(title, "tasks/s", found, notes=notes)


def _words(rounds: list[list[float]]) -> str:
    medians = [statistics.median(each) for each in zip(*rounds, strict=True)]
    return f"{sum(medians):,.0f} = {' + '.join(f'{us:,.0f}' for us in medians)}"


def _drain(
    queue: Queue,
    server: str,
    servers: list[Callable[[], float]],
    case: Case,
    count: int,
) -> tuple[float, list[float]]:
    """Tasks per second of a fresh worker, from its first tasks to its last, and µs for each."""
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
    clocks = [family(worker.pid), *servers]
    try:
        with redis.Redis.from_url(environment["DRAIN_BROKER"]) as broker:
            return _rate(lambda: queue.left(broker), clocks, count)
    finally:
        children = psutil.Process(worker.pid).children(recursive=True)
        worker.terminate()
        worker.wait(60)
        for child in psutil.wait_procs(children, timeout=10)[1]:
            child.kill()


def _rate(
    left: Callable[[], int], clocks: list[Callable[[], float]], count: int
) -> tuple[float, list[float]]:
    """The first tenth is a warm-up: children connect and prepare their statements."""
    began, at_start, before = 0.0, 0, [0.0]
    while True:
        now, remaining = time.perf_counter(), left()
        if not began and remaining <= count * 0.9:
            began, at_start, before = now, remaining, [clock() for clock in clocks]
        if remaining == 0:
            took = [clock() - was for clock, was in zip(clocks, before, strict=True)]
            return at_start / (now - began), [s * 1e6 / at_start for s in took]
        time.sleep(_SLICE_S)


def family(pid: int) -> Callable[[], float]:
    """Seconds of processor time of a process and its children, those that have ended included."""
    parent = psutil.Process(pid)

    def clock() -> float:
        total_s = 0.0
        for process in (parent, *parent.children(recursive=True)):
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total_s += times.user + times.system
            if process == parent:
                total_s += times.children_user + times.children_system
        return total_s

    return clock
