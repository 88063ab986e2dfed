"""Cost of idle workers: transactions of the database and commands of Redis per second.

With a task that parks, with one that does not, and with none of taskguard's, by 1, 4 and 8 workers.
Celery's own commands are those of the last. Commands within a script count as Redis counts them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import redis
from rich.table import Table

from benchmarks.measure import CONSOLE
from taskguard.ledger.sql import SqlLedger
from taskguard_sandbox.servers import Postgres, Valkey

HERE = Path(__file__).resolve().parent.parent
# Sessions of PostgreSQL tell what they did up to ten seconds later.
SETTLE_S = 15.0
LOCKS = {"a Redis": "", "ledger://": "ledger://"}


def main(*, quick: bool) -> None:
    """Measure each kind of fleet."""
    fleets = (1, 2) if quick else (1, 4, 8)
    table = Table("task", "locks", "workers", "transactions/s", "Redis commands/s, each worker")
    for task in ("park", "retry", "none"):
        for locks, url in LOCKS.items():
            if url and task != "park":
                continue
            for workers in fleets:
                rates = _measure(task, url, workers, for_s=10.0 if quick else 30.0)
                transactions, commands = rates
                figures = f"{transactions:.1f}", f"{commands / workers:.1f}"
                table.add_row(task, locks if task != "none" else "", str(workers), *figures)
    CONSOLE.print(table)
    CONSOLE.print(__doc__)


def _measure(task: str, locks: str, workers: int, *, for_s: float) -> tuple[float, float]:
    with Valkey() as valkey, Postgres() as postgres:
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
        finally:
            for process in started:
                process.kill()
            for process in started:
                process.wait()
        return (after[0] - before[0]) / took_s, (after[1] - before[1]) / took_s


def _counts(url: str, client: redis.Redis) -> tuple[int, int]:
    with psycopg.connect(url.replace("+psycopg", "")) as db:
        row = db.execute(
            "select xact_commit + xact_rollback from pg_stat_database"
            " where datname = current_database()"
        ).fetchone()
    assert row is not None
    info: dict[str, int] = client.info("stats")  # type: ignore[assignment]  # not awaitable
    return int(row[0]), int(info["total_commands_processed"])
