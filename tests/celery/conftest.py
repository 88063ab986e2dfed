"""A shop: its database, its app in this process as the producer, its workers."""

from __future__ import annotations

import importlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from support.celery_worker import CeleryWorker
from support.waiting import wait_until
from taskguard.ledger.sql import SqlLedger


class Shop:
    """Everything that a test of real workers looks at."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self.environment = environment
        self.folder = folder
        self.ledger = SqlLedger(environment["SHOP_DATABASE"])
        self.ledger.create_schema()
        self.engine = sa.create_engine(environment["SHOP_DATABASE"])
        with self.engine.begin() as db:
            # No unique index: a double effect has to be seen.
            db.execute(sa.text("create table effects (item text, fence bigint)"))
            db.execute(sa.text("create table steps (item text, name text, pid int)"))
        os.environ.update(environment)
        sys.modules.pop("support.shop", None)
        self.tasks: Any = importlib.import_module("support.shop")
        self._workers = 0

    def worker(self, **options: Any) -> CeleryWorker:
        """A worker to be entered with `with`."""
        self._workers += 1
        log = self.folder / f"worker-{self._workers}.log"
        return CeleryWorker(self.environment, log=log, **options)

    def effects(self) -> Counter[str]:
        with self.engine.connect() as db:
            return Counter(db.execute(sa.text("select item from effects")).scalars())

    def steps(self, name: str) -> list[tuple[str, int]]:
        with self.engine.connect() as db:
            rows = db.execute(
                sa.text("select item, pid from steps where name = :name"), {"name": name}
            )
            return [(row.item, row.pid) for row in rows]

    def publish_raw(self, task: Any, args: list[Any], *, times: int, task_id: str) -> None:
        """The same message, `times` times: same id, same delivery information."""
        for _ in range(times):
            task.apply_async(args, task_id=task_id)

    def wait_for_effects(self, count: int, *, timeout_s: float = 60) -> None:
        wait_until(
            lambda: sum(self.effects().values()) >= count,
            timeout_s=timeout_s,
            message=f"{count} effects",
        )

    def wait_for_steps(self, name: str, count: int = 1, *, timeout_s: float = 60) -> None:
        wait_until(
            lambda: len(self.steps(name)) >= count, timeout_s=timeout_s, message=f"{count} {name}"
        )

    def close(self) -> None:
        self.tasks.app.close()
        for engine in self.tasks._engines.values():
            engine.dispose()
        self.engine.dispose()
        self.ledger.close()


@pytest.fixture
def make_shop(
    valkey: Any, redis_url: str, pg_url: str, tmp_path: Path
) -> Iterator[Callable[..., Shop]]:
    made: list[Shop] = []

    def make(**environment: str) -> Shop:
        shop = Shop(
            {
                "SHOP_BROKER": valkey.url_of(2),
                "SHOP_BACKEND": valkey.url_of(3),
                "SHOP_LOCKS": valkey.url_of(1),
                "SHOP_DATABASE": pg_url,
                **environment,
            },
            tmp_path,
        )
        made.append(shop)
        return shop

    yield make
    for shop in made:
        shop.close()


@pytest.fixture
def shop(make_shop: Callable[..., Shop]) -> Shop:
    return make_shop()
