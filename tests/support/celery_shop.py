"""A shop with real Celery workers: its database, and its app in this process as the producer.

A conftest makes a fixture of `shops()`. Its workers run `support.shop`.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import celery._state
import kombu.pools
import pytest
import redis
import sqlalchemy as sa

import taskguard_celery.runtime
from support.celery_worker import CeleryWorker
from support.waiting import patience_s, wait_until
from taskguard.ledger.sql import SqlLedger


@dataclass(frozen=True)
class Step:
    """A point that a body has reached: `at_s` by the database's clock."""

    item: str
    pid: int
    at_s: float


class Shop:
    """A shop, its database and its workers."""

    def __init__(self, environment: dict[str, str], folder: Path, *, tables: bool = True) -> None:
        self.environment = environment
        self.folder = folder
        self.ledger = SqlLedger(environment["SHOP_DATABASE"])
        if tables:
            self.ledger.create_schema()
        self.engine = sa.create_engine(environment["SHOP_DATABASE"], pool_pre_ping=True)
        with self.engine.begin() as db:
            # No unique index: the test has to see a double effect.
            db.execute(sa.text("create table effects (item text, fence bigint)"))
            db.execute(
                sa.text(
                    "create table steps (item text, name text, pid int,"
                    " at timestamptz not null default clock_timestamp())"
                )
            )
        sys.modules.pop("support.shop", None)
        self.tasks: Any = importlib.import_module("support.shop")
        self._workers = 0

    def worker(self, environment: dict[str, str] | None = None, **options: Any) -> CeleryWorker:
        """Return a worker for `with`. `environment` overrides the shop's variables."""
        self._workers += 1
        log = self.folder / f"worker-{self._workers}.log"
        return CeleryWorker({**self.environment, **(environment or {})}, log=log, **options)

    def let_go(self, go: str = "go") -> None:
        """Let waiting bodies go on."""
        with self.engine.begin() as db:
            db.execute(sa.text("insert into steps values ('', :name, 0)"), {"name": go})

    def revoke(self, result: Any) -> None:
        """Revoke a message, and wait until its one worker knows."""
        inspect = self.tasks.app.control.inspect(limit=1, timeout=10)

        def is_heard() -> bool:
            """Repeat until it is known: a worker that starts later never gets it."""
            result.revoke()
            return any(result.id in ids for ids in (inspect.revoked() or {}).values())

        wait_until(is_heard, message="a revoke")

    def kill_holder(self, pid: int, task: str, order: object) -> float:
        """Kill (SIGKILL) the process that runs it. Return the earliest end of its lease."""
        before = self.work(task, order)
        os.kill(pid, signal.SIGKILL)
        after = self.work(task, order)
        held = after if after.fence == before.fence else before  # otherwise it is taken over by now
        return float(held.lease_until_s)

    @contextmanager
    def without_relay(self) -> Iterator[None]:
        """Run without a relay: this process holds the relay's lease, and promotes no message."""
        over, leads = threading.Event(), threading.Event()

        def lead(_: Any) -> None:
            leads.set()
            over.wait()

        runtime = taskguard_celery.runtime.runtime_of(self.tasks.app)
        leader = runtime.leader("taskguard-relay:celery", ttl_s=5.0)
        thread = threading.Thread(target=leader.run, args=(lead,))
        thread.start()
        try:
            assert leads.wait(patience_s())
            yield
        finally:
            over.set()
            leader.step_down()
            thread.join()

    def logs(self) -> str:
        """Return the logs of all workers."""
        logs = sorted(self.folder.glob("worker-*.log"))
        return "".join(log.read_text(errors="replace") for log in logs)

    # -- events

    def effects(self) -> Counter[str]:
        """Return how often each item's effect is in the database."""
        with self.engine.connect() as db:
            return Counter(db.execute(sa.text("select item from effects")).scalars())

    def steps(self, name: str) -> list[Step]:
        """Return the items and processes that reached the step `name`, in order."""
        with self.engine.connect() as db:
            rows = db.execute(
                sa.text(
                    "select item, pid, extract(epoch from at)::float8 as at_s from steps"
                    " where name = :name order by at"
                ),
                {"name": name},
            )
            return [Step(row.item, row.pid, row.at_s) for row in rows]

    def go(self) -> None:
        """Let bodies end that wait for it."""
        with self.engine.begin() as db:
            db.execute(sa.text("insert into steps (item, name, pid) values ('go', 'go', 0)"))

    def now_s(self) -> float:
        """The database's clock."""
        with self.engine.connect() as db:
            select = sa.text("select extract(epoch from clock_timestamp())::float8")
            return float(db.execute(select).scalar_one())

    def work(self, task: str, order: object) -> Any:
        """Return the record of the work of `task` on `order`."""
        view = self.ledger.view(f"{task} order:{order}")
        assert view is not None, f"{task} order:{order} is not in the ledger"
        return view

    # -- messages

    def publish_raw(self, task: Any, args: list[Any], *, times: int, task_id: str) -> None:
        """Publish the same message `times` times: same id, same delivery information."""
        for _ in range(times):
            task.apply_async(args, task_id=task_id)

    def broker(self) -> redis.Redis:
        """Return a client of the Redis that is the broker. The caller closes it."""
        return redis.Redis.from_url(self.environment["SHOP_BROKER"])

    def messages(self, broker: redis.Redis) -> int:
        """Return the messages in the Redis broker at this moment: in the queue, or not
        acknowledged."""
        with broker.pipeline(transaction=True) as pipe:
            pipe.llen(self.tasks.app.conf.task_default_queue)
            pipe.hlen("unacked")
            waiting, unacked = pipe.execute()
        return int(waiting) + int(unacked)

    # -- waiting

    def wait_for_effects(self, count: int) -> None:
        wait_until(
            lambda: sum(self.effects().values()) >= count,
            message=lambda: f"{count} effects, there are {dict(self.effects())}",
        )

    def wait_for_steps(self, name: str, count: int = 1) -> list[Step]:
        wait_until(lambda: len(self.steps(name)) >= count, message=f"{count} {name}")
        return self.steps(name)

    def wait_until_acknowledged(self) -> None:
        """Wait until its one worker has no message in hand: an answer is stored before that."""
        inspect = self.tasks.app.control.inspect(limit=1, timeout=10)

        def has_none() -> bool:
            asked = [inspect.active(), inspect.reserved(), inspect.scheduled()]
            return all(asked) and not any(held for each in asked for held in each.values())

        wait_until(has_none, message="all acknowledged")

    def wait_for_quiet(self) -> None:
        """Wait until the Redis broker has no message left."""
        with self.broker() as broker:
            wait_until(
                lambda: not self.messages(broker),
                message=lambda: f"no message, there are {self.messages(broker)}",
            )

    def close(self) -> None:
        runtime = vars(self.tasks.app).get(taskguard_celery.runtime.KEPT)
        if runtime is not None:
            runtime.close()
        # Results unsubscribe when they die: now, while their server is there, or not at all, where
        # the traceback of a failed test keeps them.
        gc.collect()
        app = self.tasks.app
        app.backend.remove_pending_result = lambda result: result
        app.backend.result_consumer.stop()
        app.backend.client.connection_pool.disconnect()
        kombu.pools.reset()
        app.close()
        if celery._state._tls.current_app is app:  # a closed app takes no shared tasks
            celery._state._set_current_app(None)
        for engine in self.tasks._engines.values():
            engine.dispose()
        self.engine.dispose()
        self.ledger.close()


@contextmanager
def shops(
    valkey: Any, database: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Shop]]:
    """Return a function that makes the test's shop. Environment variables are given by name."""
    made: list[Shop] = []

    def make(*, tables: bool = True, **environment: str) -> Shop:
        if "SHOP_VISIBILITY_S" in environment and kombu.VERSION < (5, 7):
            pytest.skip("kombu before 5.7 looks for expired deliveries only every 100 s")
        defaults = {
            "SHOP_BROKER": valkey.url_of(2),
            "SHOP_BACKEND": valkey.url_of(3),
            "SHOP_LOCKS": valkey.url_of(1),
            "SHOP_DATABASE": database,
        }
        environment = {**defaults, **environment}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        shop = Shop(environment, folder, tables=tables)
        made.append(shop)
        return shop

    yield make
    for shop in made:
        shop.close()
