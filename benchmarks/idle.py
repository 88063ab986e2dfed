"""Cost of start and of idle workers: time to the first call, memory, connections, traffic.

Fleets of Celery workers without a message: none of taskguard's tasks, tasks that are deferred, and
tasks that park. Celery's own traffic is that of the first. Commands within a script count as Redis
counts them. Memory is the proportional set size: pages that processes share count once.

Absolute times and sizes differ between machines. So the ceilings are ratios, and for transactions a
number for the whole fleet. If one is exceeded, the benchmark fails at its end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import psycopg
import redis
from rich.table import Table

from benchmarks import startup
from benchmarks.measure import CONSOLE
from taskguard.ledger.sql import SqlLedger
from taskguard_sandbox.servers import Postgres, Valkey

HERE = Path(__file__).resolve().parent.parent
# Sessions of PostgreSQL tell what they did up to ten seconds later.
SETTLE_S = 15.0
KINDS = {
    "none": ("none", ""),
    "deferred": ("retry", ""),
    "parked": ("park", ""),
    "parked, locks=ledger://": ("park", "ledger://"),
}
# At most this many times the figure of `none`, or of one worker.
CEILINGS = {
    "memory of a worker, parked / none": 1.5,
    "Redis commands of a worker, parked / none": 2.5,
    "transactions, largest fleet / one worker": 2.0,
    "processor time to the first call / drivers and a query": 1.3,
}


@dataclass(frozen=True, slots=True)
class Idle:
    """The use of an idle fleet.

    `transactions` and `commands` (of Redis) are per second. The transactions are those of the whole
    fleet. The other figures are those of a worker with its children: `sessions` are its connections
    to the database, and `clients` those to Redis.
    """

    transactions: float
    commands: float
    sessions: float
    clients: float
    memory_mb: float


def main(*, quick: bool) -> None:
    """Measure each kind of fleet."""
    fleets = (1, 2) if quick else (1, 8, 50)
    found = {
        (kind, workers): _measure(*KINDS[kind], workers, for_s=10.0 if quick else 30.0)
        for kind in KINDS
        for workers in fleets
    }
    names = ("transactions/s", "Redis commands/s", "sessions", "Redis connections", "MB")
    table = Table("task", "workers", *names)
    for (kind, workers), idle in found.items():
        figures = (idle.transactions, idle.commands, idle.sessions, idle.clients, idle.memory_mb)
        table.add_row(kind, str(workers), *(f"{each:,.1f}" for each in figures))
    CONSOLE.print(table)
    CONSOLE.print("transactions/s are of the whole fleet, the other figures of each worker\n")
    first = startup.measured(rounds=3 if quick else 20)
    none, parked = found["none", 1], found["parked", 1]
    most = found["parked", fleets[-1]]
    _hold(
        {
            "memory of a worker, parked / none": parked.memory_mb / none.memory_mb,
            "Redis commands of a worker, parked / none": parked.commands / none.commands,
            "transactions, largest fleet / one worker": most.transactions / parked.transactions,
            "processor time to the first call / drivers and a query": first[startup.CALL].ratio,
        }
    )


def _hold(ratios: dict[str, float]) -> None:
    """Print each ratio and its ceiling. Exit with an error if one is exceeded."""
    table = Table("", "ratio", "ceiling")
    for name, ratio in ratios.items():
        table.add_row(name, f"{ratio:.2f}", f"{CEILINGS[name]:g}")
    CONSOLE.print(table)
    over = [name for name, ratio in ratios.items() if ratio > CEILINGS[name]]
    if over:
        raise SystemExit(f"above the ceiling: {'; '.join(over)}")


def _measure(task: str, locks: str, workers: int, *, for_s: float) -> Idle:
    with Valkey(maxclients=10_000) as valkey, Postgres(max_connections="500") as postgres:
        url = postgres.create_database("idle")
        ledger = SqlLedger(url)
        ledger.create_schema()
        ledger.close()
        environment = {
            **os.environ,
            "IDLE_BROKER": valkey.url_of(0),
            "IDLE_TASK": task,
            "TASKGUARD_LOCKS_URL": locks or valkey.url_of(1),
            "TASKGUARD_LEDGER_URL": url,
        }
        command = [sys.executable, "-m", "celery", "-A", "benchmarks.idle_celery", "worker"]
        started = [
            subprocess.Popen(
                [*command, "-c", "2", "-n", f"w{number}@idle", "-l", "WARNING"],
                cwd=HERE,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for number in range(workers)
        ]
        try:
            with redis.Redis.from_url(valkey.url_of(0)) as client:
                while len(client.smembers("_kombu.binding.celery.pidbox") or ()) < workers:  # type: ignore[arg-type]  # not awaitable
                    time.sleep(0.5)
                time.sleep(SETTLE_S)
                began_s, before = time.monotonic(), _counts(url, client)
                time.sleep(for_s)
                took_s, after = time.monotonic() - began_s, _counts(url, client)
                sessions, clients = _connections(url, client)
                memory = sum(map(_memory_mb, started))
        finally:
            for process in started:
                process.kill()
            for process in started:
                process.wait()
    return Idle(
        transactions=(after[0] - before[0]) / took_s,
        commands=(after[1] - before[1]) / took_s / workers,
        sessions=sessions / workers,
        clients=clients / workers,
        memory_mb=memory / workers,
    )


def _memory_mb(process: subprocess.Popen[bytes]) -> float:
    parent = psutil.Process(process.pid)
    family = [parent, *parent.children(recursive=True)]
    return sum(map(_pss_bytes, family)) / 1e6


def _pss_bytes(process: psutil.Process) -> float:
    """Return its memory, with its part of shared pages. A child may have ended: 0."""
    try:
        return float(process.memory_full_info().pss)
    except psutil.NoSuchProcess:
        return 0.0


def _connections(url: str, client: redis.Redis) -> tuple[int, int]:
    with psycopg.connect(url.replace("+psycopg", "")) as db:
        row = db.execute(
            "select count(*) from pg_stat_activity where datname = current_database()"
            " and backend_type = 'client backend' and pid <> pg_backend_pid()"
        ).fetchone()
    assert row is not None
    info: dict[str, int] = client.info("clients")  # type: ignore[assignment]  # not awaitable
    return int(row[0]), int(info["connected_clients"]) - 1


def _counts(url: str, client: redis.Redis) -> tuple[int, int]:
    with psycopg.connect(url.replace("+psycopg", "")) as db:
        row = db.execute(
            "select xact_commit + xact_rollback from pg_stat_database"
            " where datname = current_database()"
        ).fetchone()
    assert row is not None
    info: dict[str, int] = client.info("stats")  # type: ignore[assignment]  # not awaitable
    return int(row[0]), int(info["total_commands_processed"])
