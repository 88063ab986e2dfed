"""Draining 2,000 no-op Celery tasks on a prefork worker with two children."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import redis

from benchmarks.measure import CONSOLE, Figure, show
from taskguard.ledger.sql import SqlLedger
from taskguard_sandbox.servers import Postgres, Valkey

TASKS = 2_000
REFERENCE = "by hand: Redis and PostgreSQL"
LOCKS_ONLY = "taskguard, locks only"
# Name of the line: name of the task in `drain_app`.
CASES = {
    "no guard at all": "bare",
    "redis-py Lock in the body": "redis_lock",
    "fencekit (Redis alone)": "fencekit",
    LOCKS_ONLY: "guarded",
    REFERENCE: "by_hand",
    "taskguard": "guarded",
}


def main(*, quick: bool) -> None:
    """Print the table: tasks per second, and the rate beside that of the hand-written way."""
    with Valkey() as valkey, Postgres() as postgres:
        url = postgres.create_database("drain")
        ledger = SqlLedger(url)
        ledger.create_schema()
        ledger.close()
        environment = {
            **os.environ,
            "DRAIN_BROKER": valkey.url_of(2),
            "DRAIN_LOCKS": valkey.url_of(1),
            "DRAIN_DATABASE": url,
        }
        tasks = 500 if quick else TASKS
        rates: dict[str, list[float]] = {name: [] for name in CASES}
        for round_number in range(1 if quick else 3):
            for name, task in CASES.items():
                extra = {"DRAIN_LOCKS_ONLY": "yes"} if name == LOCKS_ONLY else {}
                rate = _drain(valkey, environment | extra, task, tasks)
                rates[name].append(rate)
                CONSOLE.print(f"  round {round_number + 1}: {name}: {rate:,.0f} tasks/s")
    base = rates[REFERENCE]
    found = [
        Figure(
            name,
            statistics.median(each),
            statistics.median(rate / other for rate, other in zip(each, base, strict=True)),
        )
        for name, each in rates.items()
    ]
    show(f"Draining {tasks:,} no-op Celery tasks, prefork, two children", "tasks/s", found)


def _drain(valkey: Valkey, environment: dict[str, str], task: str, count: int) -> float:
    """Tasks per second of a fresh worker, from its first tasks to its last."""
    with redis.Redis.from_url(valkey.url) as everything:
        everything.flushall()
    publish = "import sys; from benchmarks.drain_app import publish; publish(*sys.argv[1:])"
    command = [sys.executable, "-c", publish, task, str(count)]
    subprocess.run(command, env=environment, check=True, cwd=Path.cwd())
    worker = subprocess.Popen(
        [
            sys.executable, "-m", "celery", "-A", "benchmarks.drain_app", "worker", "-P", "prefork",
            "-c", "2", "-l", "WARNING", "--without-gossip", "--without-mingle", "-Q", "drain",
        ],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        with redis.Redis.from_url(environment["DRAIN_BROKER"]) as broker:
            return _rate(broker, count)
    finally:
        family = psutil.Process(worker.pid).children(recursive=True)
        worker.terminate()
        worker.wait(60)
        for child in psutil.wait_procs(family, timeout=10)[1]:
            child.kill()


def _rate(broker: redis.Redis, count: int) -> float:
    """The first tenth is a warm-up: children connect and prepare their statements."""

    def left() -> int:
        with broker.pipeline() as pipe:
            waiting, unacked = pipe.llen("drain").hlen("unacked").execute()
        return int(waiting) + int(unacked)

    began, at_start = 0.0, 0
    while True:
        now, remaining = time.perf_counter(), left()
        if not began and remaining <= count * 0.9:
            began, at_start = now, remaining
        if remaining == 0:
            return at_start / (now - began)
        time.sleep(0.005)
