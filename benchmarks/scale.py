"""Large tables: what steps cost among ten million work items, a million of which wait in lines.

The lines have a hundred thousand keys. Each step is compared with the same step in a ledger of ten
thousand items. The sizes of the tables are printed, so that one can compute how they grow.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
from rich.table import Table

import taskguard
from benchmarks.measure import CONSOLE, in_turns, show
from taskguard.ledger.sql import SqlLedger
from taskguard.model.claims import ClaimRequest, MessageRef
from taskguard.model.lease import new_owner
from taskguard_sandbox.servers import Postgres, Valkey


@dataclass(frozen=True, slots=True)
class Size:
    """Rows of a ledger.

    Attributes:
        works: work that is done, each with a key.
        waiting: messages that wait.
        lines: keys whose lines they are in.
    """

    works: int
    waiting: int
    lines: int

    def __floordiv__(self, parts: int) -> Size:
        return Size(self.works // parts, self.waiting // parts, self.lines // parts)


MANY = Size(10_000_000, 1_000_000, 100_000)
# As many lines as promotions are measured, because a line with a promoted message gets no other.
FEW = Size(10_000, 2_000, 2_000)

_CALL = '{"queue": "celery", "app": "", "message": "waits__n__"}'
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
_WAITING = """
insert into taskguard_work (
    id, task, key, message, retries, state, final, fence, owner, lease_until, attempts, crashes,
    crashed_owner, call, line, rank, parked, created
)
select
    'wait ' || n, 'wait', 'line:' || n % :lines, 'waits' || n, 0, 'NEW', 0, 0, '', 0, 0, 0,
    '', replace(:call, '__n__', n::text), 'waiting', 0, n, n
from generate_series(1, :waiting) n
"""
_SIZES = """
select
    pg_table_size('taskguard_work') / (select count(*) from taskguard_work),
    pg_indexes_size('taskguard_work') / (select count(*) from taskguard_work),
    pg_total_relation_size('taskguard_keys') / (select count(*) from taskguard_keys)
"""


def main(*, quick: bool) -> None:
    """Print each step beside the same among few."""
    many = MANY // (100 if quick else 1)
    with Valkey() as valkey, Postgres(shared_buffers="512MB", max_wal_size="8GB") as postgres:
        names = {size: f"among {size.works:,} work items" for size in (FEW, many)}
        ledgers, cases = [], {}
        for number, (size, name) in enumerate(names.items()):
            url = postgres.create_database(f"scale{number}")
            ledger = SqlLedger(url)
            ledger.create_schema()
            fill(url, size.works, state="DONE", call=None, due=None)
            _wait(url, size)
            ledgers.append(ledger)
            cases[name] = _steps(ledger, valkey, size)
        _show_sizes(url)
        for step in cases[names[many]]:
            found = in_turns(
                {f"taskguard {name}": steps[step] for name, steps in cases.items()},
                reference=f"taskguard {names[FEW]}",
                rounds=5 if quick else 15,
                repeats=20 if quick else 100,
            )
            show(f"{step}; PostgreSQL, fsync on", "µs", found)
        for ledger in ledgers:
            ledger.close()


def _steps(ledger: SqlLedger, valkey: Valkey, size: Size) -> dict[str, Callable[[], object]]:
    tg = taskguard.connect(locks=valkey.url, ledger=ledger, listeners=())
    numbers, lines = itertools.count(), itertools.count()

    @tg.guarded(key="new:<order>")
    def touch(order: int) -> None:
        pass

    parking = ClaimRequest(
        keys=("line:1",), owner=new_owner("x"), ttl_s=30.0, task="wait", call=_CALL, in_line=True
    )

    def park() -> bool:
        number = next(numbers)
        message = MessageRef(f"parked{number}")
        return ledger.park(replace(parking, work=f"parked {number}", message=message))

    return {
        "A guarded call: lock, claim, DONE, release": lambda: touch(next(numbers)),
        "A message is parked": park,
        "The next message of a line is promoted": lambda: ledger.promote_next(
            f"line:{next(lines) % size.lines}", queues=["celery"], expected_s=5.0
        ),
        "A page of overdue work": lambda: ledger.overdue(limit=100),
        "A relay's look at a page of lines": lambda: ledger.look(queues=["celery"], most=100),
    }


def _show_sizes(url: str) -> None:
    engine = sa.create_engine(url)
    with engine.connect() as db:
        work, indexes, key = db.execute(sa.text(_SIZES)).one()
    engine.dispose()
    table = Table("bytes of a row", "")
    for name, size in {"work": work, "its indexes": indexes, "key with its index": key}.items():
        table.add_row(name, f"{size:,}")
    CONSOLE.print(table)


def _wait(url: str, size: Size) -> None:
    values = {"waiting": size.waiting, "lines": size.lines, "call": _CALL}
    _execute(url, (_WAITING, values))


def fill(url: str, rows: int, **values: Any) -> None:
    """Work and keys, so many of each; `__n__` in a stored call is the work's number."""
    _execute(url, (_WORKS, {"rows": rows, **values}), (_KEYS, {"rows": rows}))


def _execute(url: str, *statements: tuple[str, dict[str, Any]]) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as db:
        for statement, values in statements:
            db.execute(sa.text(statement), values)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
        db.execute(sa.text("vacuum analyze"))
        db.execute(sa.text("checkpoint"))
    engine.dispose()
