"""One guarded call with its effect on PostgreSQL, compared with hand-written code. DONE is flushed.

The two alternate in turns of about forty calls. In longer turns, the speed of a disk or a virtual
processor changes between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psycopg
import sqlalchemy as sa

import taskguard
from benchmarks.hand_written import ByHand
from benchmarks.measure import Figure, in_turns, show
from taskguard import Guard
from taskguard.ledger.sql import SqlLedger
from taskguard_sandbox.servers import Postgres, Valkey

REFERENCE = "by hand: redis-py and psycopg"
BY_HAND_BARE = "by hand, no effect"
BY_HAND_OWN = "by hand, the order's own row"
BY_HAND_OWN_BARE = "by hand, its own row, no effect"
BARE = "taskguard, no effect"
OWN = "taskguard, the order's own row"
OWN_BARE = "taskguard, its own row, no effect"
_SAME = {BARE: BY_HAND_BARE, OWN: BY_HAND_OWN, OWN_BARE: BY_HAND_OWN_BARE}
EFFECT = "insert into effects values ('order')"
_EFFECT = sa.text(EFFECT)
PAID_ORDERS = "insert into orders (id, status) select n, 'PAID' from generate_series(1, 40000) n"
ORDERS = sa.Table(
    "orders",
    sa.MetaData(),
    sa.Column("id", sa.BigInteger, primary_key=True),
    sa.Column("status", sa.Text),
    sa.Column("fence", sa.BigInteger),
)
OWN_ROW = taskguard.GuardedRow(
    ORDERS,
    id="<order>",
    state="status",
    fence="fence",
    new="PAID",
    processing="SHIPPING",
    done="SHIPPED",
)


def main(*, quick: bool) -> None:
    """Print two tables: this machine's disk, and one that takes a millisecond to flush."""
    _measure("this machine's disk", quick=quick)
    _measure("a disk that takes 1 ms to flush", quick=quick, commit_delay=1000, commit_siblings=0)


def _measure(disk: str, *, quick: bool, **settings: int) -> None:
    with Valkey() as valkey, Postgres(**settings) as postgres:
        url = postgres.create_database("bench")
        by_hand = ByHand(valkey.url, url.replace("+psycopg", ""))
        by_hand.db.execute("create table effects (item text)")
        with runtime(valkey.url, url) as tg:
            found = compare(_cases(tg, by_hand), reference=REFERENCE, quick=quick, but=_SAME)
        by_hand.close()
    title = f"A guarded call: lock, claim, one effect with DONE, release; fsync on, {disk}"
    show(title, "µs", found)


@contextmanager
def runtime(locks: str, database: str) -> Iterator[taskguard.TaskGuard]:
    """Yield locks and an empty ledger, without listeners."""
    ledger = SqlLedger(database)
    ledger.create_schema()
    tg = taskguard.connect(locks=locks, ledger=ledger, listeners=())
    yield tg
    tg.close()


def compare(
    cases: dict[str, Callable[[], object]],
    *,
    reference: str,
    quick: bool,
    but: Mapping[str, str] = {},
) -> list[Figure]:
    """Calls of some milliseconds, in turns."""
    rounds = 6 if quick else 75
    return in_turns(cases, reference=reference, rounds=rounds, repeats=40, but=but)


def by_sqlalchemy(db: sa.Connection) -> None:
    """The effect, as most bodies write theirs."""
    db.execute(_EFFECT)


def by_driver(db: sa.Connection) -> None:
    """The effect, by the driver's own cursor, as by hand."""
    driver: Any = db.connection.driver_connection
    with driver.cursor() as cursor:
        cursor.execute(EFFECT)


def shipping(
    tg: taskguard.TaskGuard,
    effect: Callable[[sa.Connection], None] | None,
    **options: Any,
) -> Callable[[int], None]:
    """A guarded function with this effect, or none."""
    name = "nothing" if effect is None else effect.__name__
    work = f"{name} {sorted(options)} <order>"  # each has work of its own

    @tg.guarded(key="order:<order>", work=work, **options)
    def ship(order: int, guard: Guard) -> None:
        if effect is not None:
            with guard.transaction() as db:
                effect(db)

    return ship


def _cases(tg: taskguard.TaskGuard, by_hand: ByHand) -> dict[str, Callable[[], object]]:
    def effect(db: psycopg.Connection[Any]) -> None:
        db.execute(EFFECT)

    as_by_hand, ship = shipping(tg, by_driver), shipping(tg, by_sqlalchemy)
    ship_own = shipping(tg, by_driver, row=OWN_ROW)
    touch, touch_own = shipping(tg, None), shipping(tg, None, row=OWN_ROW)
    # Create the orders before their messages, so that this is not measured.
    by_hand.db.execute(PAID_ORDERS)
    numbers, orders = itertools.count(), itertools.count(1)
    return {
        REFERENCE: lambda: by_hand.run(f"ship {next(numbers)}", effect),
        "taskguard, the effect by psycopg": lambda: as_by_hand(next(numbers)),
        "taskguard, the effect by SQLAlchemy": lambda: ship(next(numbers)),
        BY_HAND_BARE: lambda: by_hand.run(f"touch {next(numbers)}"),
        BARE: lambda: touch(next(numbers)),
        "taskguard, a duplicate of DONE": lambda: as_by_hand(1),
        BY_HAND_OWN: lambda: by_hand.run_order(next(orders), effect),
        OWN: lambda: ship_own(next(orders)),
        BY_HAND_OWN_BARE: lambda: by_hand.run_order(next(orders)),
        OWN_BARE: lambda: touch_own(next(orders)),
    }
