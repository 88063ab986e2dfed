"""Private servers for an example, and the results and log lines of its workers.

    with example_servers("shop") as (valkey, database):
        with CeleryWorker("shop", python_path=here) as worker:
            answers = celery_answers([ship.delay(7), ship.delay(7)], worker, about="order:")

Guarantees: all processes that were started here are ended (`servers.py`, `workers.py`). Results are
in the order of their messages. There is no timeout: a message without an answer blocks for ever.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import sqlalchemy as sa

from taskguard.cli import main as taskguard
from taskguard_sandbox.servers import Postgres, Valkey
from taskguard_sandbox.workers import Worker

__all__ = ["celery_answers", "example_servers", "rq_answers", "started"]

_POLL_S = 0.1


@contextmanager
def example_servers(database: str) -> Iterator[tuple[Valkey, sa.Engine]]:
    """A Valkey, and an Engine on an empty PostgreSQL database that has the ledger's tables.

    The environment says where they are, to this process and to the workers that it starts:
    Celery's broker is Valkey's database 0, its results are in 1, the locks in 2.
    """
    with Valkey() as valkey, Postgres() as postgres:
        url = postgres.create_database(database)
        os.environ.update(
            CELERY_BROKER_URL=valkey.url_of(0),
            CELERY_RESULT_BACKEND=valkey.url_of(1),
            TASKGUARD_LOCKS_URL=valkey.url_of(2),
            TASKGUARD_LEDGER_URL=url,
        )
        taskguard(["ledger", "create"])
        engine = sa.create_engine(url)
        try:
            yield valkey, engine
        finally:
            engine.dispose()


@contextmanager
def started(workers: Iterable[Worker]) -> Iterator[list[Worker]]:
    """Starts several workers, and stops them all."""
    with ExitStack() as running:
        yield [running.enter_context(worker) for worker in workers]


def celery_answers(results: Sequence[Any], worker: Worker, *, about: str) -> list[Any]:
    """Wait for Celery's `results`. Return the value or the exception of each.

    Meanwhile, print lines of the worker's log that match the regular expression `about`. If the
    results' server has gone, the app tries to connect only once.
    """
    for result in results:
        # Results of older versions of Celery query the server when they are deleted.
        result.app.conf.result_backend_transport_options = {"retry_policy": {"max_retries": 0}}
    _hear([worker], about, until=lambda: all(result.ready() for result in results))
    return [result.get(timeout=1, propagate=False) for result in results]


def rq_answers(jobs: Sequence[Any], workers: Sequence[Worker], *, about: str) -> list[Any]:
    """Wait for RQ's `jobs`. Return the value of each, or None for a failed one.

    Meanwhile, print lines of the workers' logs that match the regular expression `about`.
    """
    _hear(workers, about, until=lambda: all(job.is_finished or job.is_failed for job in jobs))
    return [job.return_value() for job in jobs]


def _hear(workers: Sequence[Worker], about: str, *, until: Callable[[], bool]) -> None:
    over = False
    while not over:
        time.sleep(_POLL_S)
        over = until()  # asked first: what was said before is in the logs by now
        for line in [line for worker in workers for line in worker.new_lines()]:
            if re.search(about, line):
                print(line.partition(" (message")[0])
