"""A claim and a completion change no index on PostgreSQL, so that both are cheap.

An index that has the state, even in its condition, makes each completion write to all indexes.
"""

from __future__ import annotations

from contextlib import closing

import pytest
import sqlalchemy as sa

from support.claims import request
from support.waiting import wait_until
from taskguard.ledger.sql import SqlLedger
from taskguard.ledger.tables import KEYS, WORK
from taskguard.model.claims import Claimed

WORKS, KEYS_OF_THEM = 400, 20
LEAST_SHARE = 0.95


@pytest.mark.parametrize("one_statement", [True, False])
def test_updates_of_ordinary_work_are_hot(pg_url: str, one_statement: bool) -> None:
    """At least 95 of 100 are, also of keys, whose last works grow."""
    with closing(SqlLedger(pg_url, one_statement=one_statement)) as ledger:
        ledger.create_schema()
        for number in range(WORKS):
            keys = (f"key:{number % KEYS_OF_THEM}",)
            claimed = ledger.claim(request(number, keys=keys))
            assert isinstance(claimed, Claimed)
            ledger.complete_alone(claimed.claim, '{"result": 1}')
    engine = sa.create_engine(pg_url)
    counted = (
        "select relname, n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where relname in"
        f" ('{KEYS.name}', '{WORK.name}')"
    )

    def updates() -> dict[str, tuple[int, int]]:
        with engine.connect() as db:
            return {name: (all_, hot) for name, all_, hot in db.exec_driver_sql(counted)}

    # A session reports its updates once it has ended.
    expected = {KEYS.name: 2 * WORKS - KEYS_OF_THEM, WORK.name: WORKS}
    wait_until(
        lambda: all(updates()[name][0] >= number for name, number in expected.items()),
        message="the updates are counted",
    )
    shares = {name: hot / all_ for name, (all_, hot) in updates().items()}
    engine.dispose()
    assert min(shares.values()) >= LEAST_SHARE, shares
