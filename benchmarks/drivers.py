"""The own way to PostgreSQL, compared with psycopg's public interface behind SQLAlchemy's pool.

On an Engine that taskguard creates, statements go through libpq: prepared statements, a LIFO pool,
and one message for the last statement and COMMIT. On an Engine of the user, the same statements go
through psycopg's cursors and SQLAlchemy's pool. So the second case is what remains if the own way
is removed. `docs/decisions/libpq.md` has the rule: how much slower that may be.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import sqlalchemy as sa

import taskguard
from benchmarks.clocks import family
from benchmarks.databases import Database, databases
from benchmarks.drain import CELERY, Case, measure, set_up
from benchmarks.guarded import by_driver, shipping
from benchmarks.hand_written import EFFECTS
from benchmarks.measure import Parts, one_round
from taskguard.ledger.sql import SqlLedger
from taskguard_sandbox.servers import Postgres, Valkey

OWN, PUBLIC = "taskguard", "psycopg's interface"
TASKS = {
    f"{OWN}, a task": Case("guarded"),
    f"{PUBLIC}, a task": Case("guarded", environment={"DRAIN_ENGINE": "yes"}),
}


def main(*, quick: bool) -> None:
    """Print a table of calls, and one of drained tasks."""
    for database in databases(kinds=(Postgres,)):
        with Valkey() as valkey:
            _calls(database, valkey, quick=quick)
        with Valkey() as valkey:
            set_up(database, valkey)
            [own, public] = TASKS
            queue = replace(CELERY, cases=TASKS)
            measure(queue, database, valkey, {public: own}, quick=quick)


def _calls(database: Database, valkey: Valkey, *, quick: bool) -> None:
    rounds, repeats = (3, 20) if quick else (30, 40)
    clocks = {
        **database.clocks,
        "Redis": family(valkey.pid),
        "wall": time.perf_counter,
        "client": time.process_time,
    }
    with _connected(valkey.url, database.url) as kinds:
        cases: dict[str, Callable[[], object]] = {}
        references = {}
        for kind, tg in kinds.items():
            for what, call in _cases(tg).items():
                cases[f"{kind}, {what}"] = call
                references[f"{kind}, {what}"] = f"{OWN}, {what}"
        one_round(cases, 0, repeats=repeats, clocks=clocks)  # warms up
        title = f"A guarded call on {database.name}, {rounds} rounds of {repeats} calls"
        parts = Parts(title, references, beside_load=False)
        parts.measure(
            lambda number: one_round(cases, number, repeats=repeats, clocks=clocks), rounds
        )
    parts.show()


@contextmanager
def _connected(locks: str, url: str) -> Iterator[dict[str, taskguard.TaskGuard]]:
    """Yield both ways. They share the servers and the tables, and have work of their own."""
    engine = sa.create_engine(url, pool_use_lifo=True)
    with engine.begin() as db:
        db.exec_driver_sql(EFFECTS)
    ledgers = {OWN: SqlLedger(url), PUBLIC: SqlLedger(engine)}
    ledgers[OWN].create_schema()
    kinds = {
        kind: taskguard.connect(locks=locks, ledger=ledger, namespace=kind[0], listeners=())
        for kind, ledger in ledgers.items()
    }
    yield kinds
    for tg in kinds.values():
        tg.close()
    engine.dispose()


def _cases(tg: taskguard.TaskGuard) -> dict[str, Callable[[], object]]:
    numbers = itertools.count(1)
    touch, ship = shipping(tg, None), shipping(tg, by_driver)
    ship(0)
    return {
        "no effect": lambda: touch(next(numbers)),
        "an effect": lambda: ship(next(numbers)),
        "a duplicate": lambda: ship(0),
    }
