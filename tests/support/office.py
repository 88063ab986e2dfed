"""An office that charges invoices by real RQ workers, each a process ended by its process id."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
import sqlalchemy as sa
from rq import Queue

import taskguard
from support.families import Family
from support.waiting import wait_until
from taskguard.ledger.sql import SqlLedger

HERE = Path(__file__).resolve().parent.parent

# For workers of a holder that has to lose its lease. By default, a lease of invoices.py outlasts a
# pause of the machine, so that none is lost by accident.
SHORT_LEASES = {"SHOP_TTL_S": "2"}
# For tests with a waiter, which would take the key over after a pause of the machine.
FAIRLY_SHORT_LEASES = {"SHOP_TTL_S": "5"}


class Office:
    """Real RQ workers, their queue and their database."""

    def __init__(
        self, *, broker: str, locks: str, database: str, folder: Path, tables: bool = True
    ) -> None:
        self.environment = {"TASKGUARD_LOCKS_URL": locks, "TASKGUARD_LEDGER_URL": database}
        self.broker = broker
        self.connection = redis.Redis.from_url(broker)
        self.queue = Queue("invoices", connection=self.connection)
        self.folder = folder
        self.ledger = SqlLedger(database)
        self.engine = sa.create_engine(database)
        if tables:
            self._create_tables()
        self._workers: list[Family] = []

    def _create_tables(self) -> None:
        self.ledger.create_schema()
        with self.engine.begin() as db:
            # No unique index: the test has to see a double effect.
            db.execute(sa.text("create table effects (item text, fence bigint)"))
            db.execute(sa.text("create table steps (item text, name text, pid int)"))

    def worker(
        self,
        kind: str = "taskguard_rq.GuardedWorker",
        *options: str,
        fresh: bool = False,
        **environment: str,
    ) -> Family:
        """Start a worker; at the end of the test it is killed, with all that it has started.

        Environment variables are given by name. `fresh` is that of `Family`.
        """
        log = self.folder / f"worker-rq-{len(self._workers)}.log"
        command = [sys.executable, "-m", "rq.cli", "worker", "invoices", "-u", self.broker]
        command += ["--worker-class", kind, *options]
        environment = {
            **os.environ,
            **self.environment,
            **environment,
            "PYTHONPATH": str(HERE),
            # Files of a killed worker are removed with the test's folder.
            "TMPDIR": str(self.folder),
        }
        worker = Family(command, environment=environment, log=log, cwd=HERE.parent, fresh=fresh)
        self._workers.append(worker)
        wait_until(
            lambda: "Listening on invoices" in log.read_text(errors="replace"),
            message=f"worker ready, see {log}",
        )
        return worker

    def logs(self) -> str:
        return "".join(
            path.read_text(errors="replace") for path in sorted(self.folder.glob("worker-*.log"))
        )

    def effects(self) -> Counter[str]:
        with self.engine.connect() as db:
            return Counter(db.execute(sa.text("select item from effects")).scalars())

    def steps(self, name: str) -> list[tuple[str, int]]:
        with self.engine.connect() as db:
            rows = db.execute(
                sa.text("select item, pid from steps where name = :name"), {"name": name}
            )
            return [(row.item, row.pid) for row in rows]

    def wait_for(self, condition: Callable[[], Any], message: str) -> None:
        try:
            wait_until(condition, message=message)
        except BaseException:
            print(self.logs()[-8000:])
            raise

    def let_go(self) -> None:
        """Let bodies go on that wait for a step "go"."""
        with self.engine.begin() as db:
            db.execute(sa.text("insert into steps values ('', 'go', 0)"))

    @contextmanager
    def holding(self, key: str) -> Iterator[None]:
        """Hold the key as another process."""
        locks = self.environment["TASKGUARD_LOCKS_URL"]
        other = taskguard.connect(locks=locks, ledger=self.environment["TASKGUARD_LEDGER_URL"])
        try:
            with other.lock(key):
                yield
        finally:
            other.close()

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
        self.connection.close()
        self.engine.dispose()
        self.ledger.close()
