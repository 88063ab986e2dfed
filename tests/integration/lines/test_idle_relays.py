"""Relays that have nothing to do: what they ask of the database, however many they are."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest
import sqlalchemy as sa

import taskguard
from support.waiting import patience_s, wait_until
from taskguard.integration import Relay
from taskguard.ledger.sql import SqlLedger

RELAYS = 5
LOOKS = 4
# PostgreSQL counts an idle session's transactions up to ten seconds late, so the first windows hold
# those of the start. A fleet that asks too much asks in each window.
WINDOWS = 5


class Counted(Relay):
    """Counts its looks."""

    looks = 0

    def look(self) -> int:
        """Look for messages as a relay does."""
        self.looks += 1
        return super().look()


def transactions(engine: sa.Engine) -> int:
    """How many transactions the database has ended, as far as its sessions have said so by now."""
    with engine.connect() as db:
        db.exec_driver_sql("select pg_stat_clear_snapshot()")
        select = "select xact_commit + xact_rollback from pg_stat_database where datname ="
        return int(db.exec_driver_sql(f"{select} current_database()").scalar_one())


def is_cheap(leader: Counted, engine: sa.Engine) -> bool:
    """Return True if all relays made two transactions for each of the leader's next looks."""
    looks, before = leader.looks, transactions(engine)
    wait_until(lambda: leader.looks >= looks + LOOKS, message="it looks")
    took = transactions(engine) - before
    return took <= 2 * (leader.looks - looks) + 4  # four: this test's own, and rounding


@contextmanager
def running(relays: list[Counted]) -> Iterator[None]:
    """Each in a thread."""
    threads = [threading.Thread(target=each.run) for each in relays]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for each in relays:
            each.stop()
        for thread in threads:
            thread.join(patience_s())
            assert not thread.is_alive()


@pytest.mark.once
@pytest.mark.parametrize("kind", ["redis", "ledger"])
def test_followers_ask_the_database_nothing(redis_url: str, pg_url: str, kind: str) -> None:
    """A fleet costs what its leader costs: a look, and a renewal now and then."""
    locks = {"redis": redis_url, "ledger": "ledger://"}[kind]
    with ExitStack() as stack:
        engine = sa.create_engine(pg_url)
        stack.callback(engine.dispose)
        relays = []
        for _ in range(RELAYS):
            ledger = SqlLedger(pg_url)
            ledger.create_schema()
            made = taskguard.connect(locks=locks, ledger=ledger)
            stack.enter_context(closing(made))
            relays.append(Counted(made, {"test": lambda *_: None}))
        with running(relays):
            wait_until(lambda: any(each.looks for each in relays), message="one leads")
            [leader] = [each for each in relays if each.looks]
            assert any(is_cheap(leader, engine) for _ in range(WINDOWS))
            leader.stop()
            others = [each for each in relays if each is not leader]
            wait_until(lambda: any(each.looks for each in others), message="another one leads")
