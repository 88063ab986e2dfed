"""Work that no worker runs is found by a relay, and by a purge."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
import sqlalchemy as sa

import taskguard
from support.claims import end_leases, request
from support.waiting import patience_s, wait_until
from taskguard.integration import Relay
from taskguard.ledger.sql import SqlLedger
from taskguard.ledger.tables import WORK
from taskguard.model.claims import Claimed
from taskguard.model.history import Flag


@pytest.fixture
def ledger(sqlite_url: str) -> Iterator[SqlLedger]:
    """Return a ledger with one work whose holder has vanished."""
    with closing(SqlLedger(sqlite_url)) as made:
        made.create_schema()
        assert isinstance(made.claim(request()), Claimed)
        end_leases(made.database.engine)
        yield made


def flagged(ledger: SqlLedger) -> bool:
    with ledger.database.engine.connect() as db:
        left = sa.select(WORK.c.flag, WORK.c.state).where(WORK.c.id == request().work)
        return db.execute(left).one() == (Flag.LEFT, "PROCESSING")


def test_a_relay_finds_it(ledger: SqlLedger) -> None:
    with closing(taskguard.connect(locks="memory://", ledger=ledger)) as runtime:
        relay = Relay(runtime, {})
        thread = threading.Thread(target=relay.run)
        thread.start()
        try:
            wait_until(lambda: flagged(ledger), message="the relay flags it")
        finally:
            relay.stop()
            thread.join(patience_s())
        assert not thread.is_alive()


def test_a_purge_finds_it(ledger: SqlLedger) -> None:
    """It does in fleets that have no relay."""
    ledger.purge(older_than_s=7200)
    assert flagged(ledger)
