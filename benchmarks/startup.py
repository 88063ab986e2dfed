"""CPU time of a fresh process, from its start to its first lock and to its first guarded call."""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.measure import CONSOLE, Figure, figures, show
from taskguard.ledger.sql import SqlLedger
from taskguard_sandbox.servers import Postgres, Valkey

LOCK, CALL = "taskguard: a lock, with locks only", "taskguard: a guarded call"
PEER_OF_LOCK = "redis-py alone: a lock"
PEER_OF_CALL = "import sqlalchemy, psycopg, redis, and a query"
DRIVERS = ("sqlalchemy", "redis", "celery", "rq")
CODE = {
    PEER_OF_LOCK: """
import redis
with redis.Redis.from_url({locks!r}).lock("theirs", timeout=30):
    pass
""",
    LOCK: """
import taskguard
with taskguard.connect(locks={locks!r}, ledger=None).lock("ours", ttl_s=30):
    pass
""",
    PEER_OF_CALL: """
import psycopg, redis, sqlalchemy
with sqlalchemy.create_engine({ledger!r}).connect() as db:
    db.execute(sqlalchemy.text("select 1"))
""",
    CALL: """
import os, taskguard
tg = taskguard.connect(locks={locks!r}, ledger={ledger!r})

@tg.guarded(key="order:<order_id>")
def ship(order_id):
    pass

ship(os.getpid())
""",
}
LOADED = "\nimport sys\nprint([name for name in {drivers!r} if name in sys.modules])"


def measured(*, rounds: int) -> dict[str, Figure]:
    """Return the CPU time to the first lock and to the first call, by the names of the cases."""
    with Valkey() as valkey, Postgres() as postgres:
        found = _in_turns(_code(valkey, _created(postgres)), rounds=rounds)
    return {figure.name: figure for figure in found}


def main(*, quick: bool) -> None:
    """Print medians of processes that are started in turns, with their bytecode compiled."""
    with Valkey() as valkey, Postgres() as postgres:
        url = _created(postgres)
        code = _code(valkey, url)
        show(
            "CPU time from process start, median", "ms", _in_turns(code, rounds=3 if quick else 20)
        )
        loaded = _run(code[LOCK] + LOADED.format(drivers=DRIVERS))
        CONSOLE.print(f"a lock with locks only: of {', '.join(DRIVERS)} it loads {loaded.strip()}")
        CONSOLE.print()


def _created(postgres: Postgres) -> str:
    url = postgres.create_database("startup")
    ledger = SqlLedger(url)
    ledger.create_schema()
    ledger.close()
    return url


def _code(valkey: Valkey, url: str) -> dict[str, str]:
    return {name: each.format(locks=valkey.url, ledger=url) for name, each in CODE.items()}


def _in_turns(code: dict[str, str], *, rounds: int) -> list[Figure]:
    samples: dict[str, list[float]] = {name: [] for name in code}
    for number in range(-1, rounds):  # the first round compiles bytecode, and does not count
        for name, each in code.items():
            took_ms = _cpu_ms(each)
            if number >= 0:
                samples[name].append(took_ms)
    return figures(samples, reference=PEER_OF_LOCK, but={CALL: PEER_OF_CALL})


def _cpu_ms(code: str) -> float:
    process = subprocess.Popen([sys.executable, "-c", code])
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"status {process.returncode} of:\n{code}")
    return (used.ru_utime + used.ru_stime) * 1e3


def _run(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
