"""Large tables: what a claim costs among ten million work items."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

import taskguard
from benchmarks.measure import in_turns, show
from taskguard.ledger.sql import SqlLedger
from taskguard_sandbox.servers import Postgres, Valkey

FEW = 10_000
MANY = 10_000_000

_WORKS = """
insert into taskguard_work (
    id, task, key, message, retries, state, final, fence, owner, lease_until, attempts, crashes,
    crashed_owner, call, due, created, started, finished
)
select
    'ship order:' || n, 'ship', 'order:' || n, md5(n::text), 0, :state, 0, n, '', 0, 1, 0,
    '', replace(:call, '__n__', n::text), :due, n, n, n
from generate_series(1, :rows) n
"""
_KEYS = """
insert into taskguard_keys (key, fence, owner, lease_until)
select 'order:' || n, n, '', 0 from generate_series(1, :rows) n
"""


def main(*, quick: bool) -> None:
    """Print it, beside the same among few."""
    few, many = FEW, MANY // 10 if quick else MANY
    with Valkey() as valkey, Postgres(shared_buffers="512MB", max_wal_size="8GB") as postgres:
        names = {rows: f"taskguard among {rows:,} work items" for rows in (few, many)}
        guards, cases = [], {}
        for number, (rows, name) in enumerate(names.items()):
            url = postgres.create_database(f"scale{number}")
            ledger = SqlLedger(url)
            ledger.create_schema()
            fill(url, rows, state="DONE", call=None, due=None)
            guards.append(taskguard.connect(locks=valkey.url, ledger=ledger, listeners=()))
            cases[name] = _call(guards[-1])
        found = in_turns(
            cases,
            reference=names[few],
            rounds=5 if quick else 15,
            repeats=50 if quick else 200,
        )
        for guard in guards:
            guard.close()
    show("A guarded call: lock, claim, DONE, release; PostgreSQL, fsync on", "µs", found)


def _call(tg: taskguard.TaskGuard) -> Callable[[], Any]:
    numbers = itertools.count()

    @tg.guarded(key="new:<order>")
    def touch(order: int) -> None:
        pass

    return lambda: touch(next(numbers))


def fill(url: str, rows: int, **values: Any) -> None:
    """Work and keys, so many of each; `__n__` in a stored call is the work's number."""
    engine = sa.create_engine(url)
    with engine.begin() as db:
        db.execute(sa.text(_WORKS), {"rows": rows, **values})
        db.execute(sa.text(_KEYS), {"rows": rows})
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
        db.execute(sa.text("vacuum analyze"))
        db.execute(sa.text("checkpoint"))
    engine.dispose()
