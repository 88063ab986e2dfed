"""Large tables: what a claim costs among ten million works, and how fast a sweep is."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import redis
import sqlalchemy as sa
from celery import Celery
from rq import Queue

import taskguard
from benchmarks.measure import CONSOLE, in_turns, show
from taskguard import Sweeper
from taskguard.ledger.sql import SqlLedger
from taskguard.testing.servers import Postgres, Valkey
from taskguard_celery.calls import NAME as CELERY
from taskguard_celery.calls import CelerySender, call_of
from taskguard_rq.calls import NAME as RQ
from taskguard_rq.calls import RQSender
from taskguard_rq.calls import call_of as rq_call_of

FEW = 10_000
MANY = 10_000_000
OVERDUE = 100_000

_WORKS = """
insert into taskguard_works (
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
    """Print both."""
    _claims(few=FEW, many=MANY // 10 if quick else MANY, quick=quick)
    _sweep(OVERDUE // 10 if quick else OVERDUE)


def _claims(*, few: int, many: int, quick: bool) -> None:
    with Valkey() as valkey, Postgres(shared_buffers="512MB", max_wal_size="8GB") as postgres:
        names = {rows: f"taskguard among {rows:,} works" for rows in (few, many)}
        guards, cases = [], {}
        for number, (rows, name) in enumerate(names.items()):
            url = postgres.create_database(f"scale{number}")
            ledger = SqlLedger(url)
            ledger.create_schema()
            _fill(url, rows, state="DONE", call=None, due=None)
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


def _fill(url: str, rows: int, **values: Any) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as db:
        db.execute(sa.text(_WORKS), {"rows": rows, **values})
        db.execute(sa.text(_KEYS), {"rows": rows})
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
        db.execute(sa.text("vacuum analyze"))
        db.execute(sa.text("checkpoint"))
    engine.dispose()


def _sweep(count: int) -> None:
    with Valkey() as valkey:
        app = Celery("bench", broker=valkey.url, set_as_current=False)
        app.conf.task_ignore_result = True
        call = call_of(app, app.signature("bench.ship", (42,), task_id="__n__"))
        with redis.Redis.from_url(valkey.url) as broker:
            _sweep_to(
                "Celery",
                (CELERY, CelerySender(app), call),
                count,
                waiting=lambda: broker.llen("celery"),
                alone=("send_task", lambda: app.send_task("bench.ship", (42,))),
            )
        app.close()
    with Valkey() as valkey, redis.Redis.from_url(valkey.url) as broker:
        queue = Queue("bench", connection=broker)
        job = queue.create_job("bench.ship", args=(42,), job_id="__n__")
        job.origin = queue.name
        _sweep_to(
            "RQ",
            (RQ, RQSender(broker), rq_call_of(job)),
            count,
            waiting=lambda: queue.count,
            alone=("enqueue", lambda: queue.enqueue("bench.ship", 42)),
        )


def _sweep_to(
    title: str,
    queue: tuple[str, Any, dict[str, Any]],
    count: int,
    *,
    waiting: Callable[[], Any],
    alone: tuple[str, Callable[[], Any]],
) -> None:
    name, sender, call = queue
    with Valkey() as valkey, Postgres() as postgres:
        url = postgres.create_database("sweep")
        ledger = SqlLedger(url)
        ledger.create_schema()
        _fill(url, count, state="PROCESSING", call=json.dumps(call), due=1)
        longest_s = 0.0
        sent = ledger.sent

        def timed(*args: Any, **kwargs: Any) -> int:
            nonlocal longest_s
            began_s = time.perf_counter()
            try:
                return sent(*args, **kwargs)
            finally:
                longest_s = max(longest_s, time.perf_counter() - began_s)

        ledger.sent = timed  # type: ignore[method-assign]
        tg = taskguard.connect(locks=valkey.url, ledger=ledger, listeners=())
        began_s = time.perf_counter()
        swept = Sweeper(tg, {name: sender}).sweep()
        took_s = time.perf_counter() - began_s
        tg.close()
    there = waiting()
    by_hand, rate = alone[0], _rate(alone[1], count // 10)
    CONSOLE.print(f"[bold]a sweep of {count:,} overdue works to {title} on Valkey[/bold]")
    CONSOLE.print(f"  sent: {swept.sent:,}, in the queue: {there:,}, refused: {swept.refused}")
    CONSOLE.print(f"  {took_s:.1f} s, {swept.sent / took_s:,.0f} works/s")
    CONSOLE.print(f"  {title} alone, by {by_hand}() in a loop: {rate:,.0f} messages/s")
    CONSOLE.print(f"  the longest statement that locks rows: {longest_s * 1e3:.0f} ms (500 works)")
    CONSOLE.print()


def _rate(send: Callable[[], Any], count: int) -> float:
    """Messages a second."""
    began_s = time.perf_counter()
    for _ in range(count):
        send()
    return count / (time.perf_counter() - began_s)
