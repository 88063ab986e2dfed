"""How fast a sweep sends overdue work, beside the queue's own loop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import redis
from celery import Celery
from rq import Queue

import taskguard
from benchmarks.measure import CONSOLE
from benchmarks.scale import fill
from taskguard.integration import Sweeper
from taskguard.ledger.sql import SqlLedger
from taskguard_celery.calls import NAME as CELERY
from taskguard_celery.calls import CelerySender, call_of
from taskguard_rq.calls import NAME as RQ
from taskguard_rq.calls import RQSender
from taskguard_rq.calls import call_of as rq_call_of
from taskguard_sandbox.servers import Postgres, Valkey

OVERDUE = 100_000


def main(*, quick: bool) -> None:
    """Print both queues'."""
    count = OVERDUE // 100 if quick else OVERDUE
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
        fill(url, count, state="PROCESSING", call=json.dumps(call), due=1)
        locked = _Locked()
        ledger.overdue = locked.timed(ledger.overdue)  # type: ignore[method-assign]
        ledger.sent = locked.timed(ledger.sent)  # type: ignore[method-assign]
        tg = taskguard.connect(locks=valkey.url, ledger=ledger, listeners=())
        began_s = time.perf_counter()
        swept = Sweeper(tg, {name: sender}).sweep()
        took_s = time.perf_counter() - began_s
        tg.close()
    there = waiting()
    by_hand, rate = alone[0], _rate(alone[1], count // 10)
    CONSOLE.print(f"[bold]a sweep of {count:,} overdue work items to {title} on Valkey[/bold]")
    CONSOLE.print(f"  sent: {swept.sent:,}, in the queue: {there:,}, refused: {swept.refused}")
    CONSOLE.print(f"  {took_s:.1f} s, {swept.sent / took_s:,.0f} items/s")
    CONSOLE.print(f"  {title} alone, by {by_hand}() in a loop: {rate:,.0f} messages/s")
    longest_ms, most = locked.longest_s * 1e3, locked.most
    CONSOLE.print(f"  rows are locked for {longest_ms:.0f} ms at most, {most} items at a time")
    CONSOLE.print()


class _Locked:
    """How long transactions that lock rows last at most, and of how much work they are."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.most = 0

    def timed(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            answer = ask(*args, **kwargs)
            self.longest_s = max(self.longest_s, time.perf_counter() - began_s)
            self.most = max(self.most, answer if isinstance(answer, int) else len(answer))
            return answer

        return timed


def _rate(send: Callable[[], Any], count: int) -> float:
    """Messages a second."""
    began_s = time.perf_counter()
    for _ in range(count):
        send()
    return count / (time.perf_counter() - began_s)
