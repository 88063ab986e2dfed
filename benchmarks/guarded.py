"""Processor time of a guarded call, compared with hand-written code, on each database.

The time is that of the client, of the database and of Redis. Wall time is printed as well. It
depends on how long a flush takes: hand-written code flushes twice, and taskguard once. The
database's processor time for a flush depends on the machine as well. So PostgreSQL is measured once
more without flushes.

The cases alternate in turns of forty calls. In longer turns, the speed of a disk or a virtual
processor changes between them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import sqlalchemy as sa

import taskguard
from benchmarks.clocks import family
from benchmarks.databases import Database, by_hand, databases
from benchmarks.hand_written import EFFECT, ByHand, PostgresByHand
from benchmarks.measure import Parts, one_round
from taskguard import Guard
from taskguard.ledger.sql import SqlLedger
from taskguard_sandbox.servers import Valkey

BY_HAND, BARE = "by hand, no effect", "taskguard, no effect"
BY_HAND_EFFECT = "by hand, an effect with DONE"
BY_HAND_DUPLICATE = "by hand, a duplicate of DONE"
BY_HAND_OWN, OWN = "by hand, an own row, an effect", "taskguard, an own row, an effect"
BY_HAND_OWN_BARE, OWN_BARE = "by hand, an own row, no effect", "taskguard, an own row, no effect"
REFERENCES = {
    BARE: BY_HAND,
    "taskguard, an effect by the driver": BY_HAND_EFFECT,
    "taskguard, an effect by SQLAlchemy": BY_HAND_EFFECT,
    "taskguard, a duplicate of DONE": BY_HAND_DUPLICATE,
    OWN: BY_HAND_OWN,
    OWN_BARE: BY_HAND_OWN_BARE,
}
ROUNDS = 40
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


def main(*, quick: bool, beside_load: bool = False) -> None:
    """Print a table for each database."""
    for database in databases(without_flushes=not quick):
        with Valkey() as valkey:
            _measure(database, valkey, quick=quick, beside_load=beside_load)


def _measure(database: Database, valkey: Valkey, *, quick: bool, beside_load: bool) -> None:
    rounds, repeats = (2, 4) if quick else (ROUNDS, 40)
    clocks = {
        **database.clocks,
        "Redis": family(valkey.pid),
        "wall": time.perf_counter,
        "client": time.process_time,
    }
    with (
        runtime(valkey.url, database.url) as tg,
        closing(by_hand(valkey.url, database.url)) as hand,
    ):
        cases = _cases(tg, hand)
        one_round(cases, 0, repeats=repeats, clocks=clocks)  # warms up
        parts = Parts(
            f"A guarded call on {database.name}, {rounds} rounds of {repeats} calls",
            REFERENCES,
            beside_load=beside_load,
        )
        parts.measure(
            lambda number: one_round(cases, number, repeats=repeats, clocks=clocks), rounds
        )
    parts.show()


@contextmanager
def runtime(locks: str, database: str) -> Iterator[taskguard.TaskGuard]:
    """Yield locks and an empty ledger, without listeners."""
    ledger = SqlLedger(database)
    ledger.create_schema()
    tg = taskguard.connect(locks=locks, ledger=ledger, listeners=())
    yield tg
    tg.close()


def by_sqlalchemy(db: sa.Connection) -> None:
    """The effect, as most bodies write theirs."""
    db.execute(_EFFECT)


def by_driver(db: sa.Connection) -> None:
    """The effect, by the driver's own cursor, as by hand."""
    driver: Any = db.connection.driver_connection
    with closing(driver.cursor()) as cursor:
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


def _cases(tg: taskguard.TaskGuard, hand: ByHand) -> dict[str, Callable[[], object]]:
    as_by_hand, ship, touch = (shipping(tg, effect) for effect in (by_driver, by_sqlalchemy, None))
    numbers = itertools.count(1)
    hand.run("ship 0")
    as_by_hand(0)
    cases: dict[str, Callable[[], object]] = {
        BY_HAND: lambda: hand.run(f"touch {next(numbers)}"),
        BARE: lambda: touch(next(numbers)),
        BY_HAND_EFFECT: lambda: hand.run(f"ship {next(numbers)}", effect=True),
        "taskguard, an effect by the driver": lambda: as_by_hand(next(numbers)),
        "taskguard, an effect by SQLAlchemy": lambda: ship(next(numbers)),
        BY_HAND_DUPLICATE: lambda: hand.run("ship 0"),
        "taskguard, a duplicate of DONE": lambda: as_by_hand(0),
    }
    if not isinstance(hand, PostgresByHand):
        return cases
    # Create the orders before their messages, so that this is not measured.
    hand.db.execute(PAID_ORDERS)
    orders = itertools.count(1)
    ship_own, touch_own = shipping(tg, by_driver, row=OWN_ROW), shipping(tg, None, row=OWN_ROW)
    return cases | {
        BY_HAND_OWN: lambda: hand.run_order(next(orders), effect=True),
        OWN: lambda: ship_own(next(orders)),
        BY_HAND_OWN_BARE: lambda: hand.run_order(next(orders)),
        OWN_BARE: lambda: touch_own(next(orders)),
    }
