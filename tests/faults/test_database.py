"""The database cannot write, does not grant a lock, compares texts in its own way, or is pooled.

An error of the database is no failure of the body, which runs again or is deferred. After the fault
all work is done, once.
"""

from __future__ import annotations

import os
import pwd
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from psycopg.errors import DiskFull

from support import small_disk
from support.guarded_shop import write
from support.needs import allowed, need
from support.pgbouncer import PgBouncer
from support.rivals import Rivals, rivals
from support.waiting import wait_until
from taskguard import Guard
from taskguard.clock import SYSTEM_CLOCK
from taskguard.errors import LedgerUnavailableError, TransactionRetryError
from taskguard_sandbox.servers import Postgres


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder for the small disk, which users without rights can reach."""
    with tempfile.TemporaryDirectory(prefix="small-") as name:
        path = Path(name)
        path.chmod(0o755)
        allowed(small_disk.unavailable(path))
        yield path


# A COMMIT that found no room did not happen: the body is run again, a few times.
PUT_OFF = (LedgerUnavailableError, TransactionRetryError)


def expect_all_done_in_the_end(
    made: Rivals, fill: Callable[[], object], free: Callable[[], object]
) -> None:
    """The disk is full before a claim, and in a body; then there is room again."""
    ran: list[Guard] = []
    fill()
    with pytest.raises(LedgerUnavailableError):
        made.ship(ran.append)
    assert ran == []
    free()
    assert made.ship() == "first"
    full: list[object] = []

    def during(guard: Guard) -> None:
        if not full:
            full.append(fill())

    with pytest.raises(PUT_OFF):
        made.ship(during, order=2, ttl_s=2.0)
    free()
    assert made.shipped(2) == []
    assert "failed" not in made.first.happened
    assert made.ship_too(order=2, busy="wait", wait_s=60.0) == "second"
    assert (made.shipped(1), made.shipped(2)) == (["first"], ["second"])


class TestDiskFull:
    """Fault 24."""

    def test_of_postgresql(self, folder: Path) -> None:
        """The tables are on a disk of 24 MB; the log is elsewhere."""
        need(Postgres)
        uid = pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else os.geteuid()
        server = Postgres(fsync="off", autovacuum="off")
        try:
            small_disk.on_small_disk(folder, 24, server.start, uid=uid)
            server.execute(f"create tablespace small location '{folder}'")
            server.execute("create database small tablespace small")
            with rivals(server.url_of("small"), locks=None) as made:
                expect_all_done_in_the_end(
                    made, lambda: _fill_tables(made), lambda: _empty_tables(made)
                )
        finally:
            server.stop()

    def test_of_sqlite(self, folder: Path) -> None:
        """The file and its log are on a disk of 1 MB."""

        def run() -> None:
            with rivals(f"sqlite:///{folder / 'ledger.sqlite'}", locks=None) as made:
                free = (folder / small_disk.FILE).unlink
                expect_all_done_in_the_end(made, lambda: small_disk.fill(folder), free)

        small_disk.on_small_disk(folder, 1, run)


def _fill_tables(made: Rivals) -> None:
    """Fill all tables until none has space for another row: first in large parts, then by page."""
    with made.first.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
        db.execute(sa.text("create table if not exists fill (x text)"))
        for insert in (
            "insert into fill select repeat('x', 1000) from generate_series(1, 1000)",
            "insert into fill select repeat('x', 1000)",
            "insert into effects values ('fill -')",
        ):
            with pytest.raises(sa.exc.OperationalError) as caught:
                while True:
                    db.execute(sa.text(insert))
            assert isinstance(caught.value.orig, DiskFull)


def _empty_tables(made: Rivals) -> None:
    with made.first.engine.begin() as db:
        db.execute(sa.text("drop table fill"))
        db.execute(sa.text("delete from effects where item = 'fill -'"))


def test_a_lock_that_is_not_given_in_time_runs_the_body_again(make_rivals: Any) -> None:
    """Fault 22: if a body gets no row lock in time, it runs again under the same lease."""
    shop = make_rivals(locks=None).first
    fences: list[int] = []
    with shop.engine.begin() as db:
        db.execute(sa.text("create table goods (n int)"))
        db.execute(sa.text("insert into goods values (1)"))

    @shop.tg.guarded(key="order:<order>")
    def ship(order: int, guard: Guard) -> None:
        fences.append(guard.fence)
        with guard.transaction() as db:
            write(db, f"run {len(fences)}")
            db.execute(sa.text("set local lock_timeout = '50ms'"))
            with shop.engine.connect() as other:
                if len(fences) == 1:
                    other.execute(sa.text("select n from goods for update"))
                db.execute(sa.text("update goods set n = n + 1"))

    ship(1)
    assert len(fences) == 2
    assert len(set(fences)) == 1
    assert (shop.effects, shop.states) == (["run 2"], ["DONE"])


@pytest.mark.debian
class TestPooler:
    """Fault 30: transactions of many clients share a few connections, and no client has a
    session."""

    @pytest.fixture
    def pooled(self, postgres: Postgres, pg_url: str) -> Iterator[Rivals]:
        need(PgBouncer)
        with PgBouncer(postgres.port) as pooler:
            url = pooler.url_of(pg_url.rpartition("/")[2])
            # The shops' own checks do not go through the pooler.
            with rivals(pg_url, ledger=url, locks=None) as made:
                yield made

    def test_the_ledger_works(self, pooled: Rivals) -> None:
        """Behind a pooler, work that two calls want at once has one effect."""
        orders, waiting = range(20), {"busy": "wait", "wait_s": 60.0}
        with ThreadPoolExecutor(4) as pool:
            asked = [
                pool.submit(pooled.ship_too, order=order, **waiting)
                for order in orders
                for _ in range(2)
            ]
            assert {each.result() for each in asked} == {"second"}
        assert [pooled.shipped(order) for order in orders] == [["second"]] * len(orders)

    def test_leases_are_renewed_and_stale_holders_refused(self, pooled: Rivals) -> None:
        """Behind a pooler, leases are renewed, and stale holders are refused."""

        def outlast(guard: Guard) -> None:
            lease_s = guard.remaining_s
            renewed_s = SYSTEM_CLOCK.monotonic_s() + lease_s
            wait_until(lambda: SYSTEM_CLOCK.monotonic_s() > renewed_s)
            guard.check()

        def lose(guard: Guard) -> None:
            with pooled.first.engine.begin() as db:
                for table in ("keys", "work"):
                    db.execute(sa.text(f"update taskguard_{table} set lease_until = 0"))
            assert pooled.ship_too(order=2) == "second"

        assert pooled.ship(outlast, ttl_s=6.0) == "first"
        assert pooled.ship(lose, order=2) == "second"
        assert (pooled.shipped(1), pooled.shipped(2)) == (["first"], ["second"])
        assert "stale_refused" in pooled.first.happened

    def test_transactions_are_bounded_and_sessions_are_not(self, pooled: Rivals) -> None:
        """A session's settings would apply to the next client with the same session, so only
        transactions have timeouts."""
        setting = sa.text("select current_setting('idle_in_transaction_session_timeout')")
        found: list[str] = []

        @pooled.first.tg.guarded(key="bounds:<order>")
        def look(order: int, guard: Guard) -> None:
            with guard.transaction() as db:
                found.append(db.execute(setting).scalar_one())

        look(1)
        look(2)
        assert found == ["1min"] * 2
        with pooled.first.ledger._database.transaction() as db:
            assert db.execute(setting).scalar_one() == "0"


@pytest.mark.parametrize(
    "url", ["pg_url", "sqlite_url", pytest.param("mariadb_url", marks=pytest.mark.debian)]
)
def test_keys_that_look_alike_are_different_keys(url: str, request: pytest.FixtureRequest) -> None:
    """Fault 34: keys that differ in case, accents or a trailing blank are different work."""
    with rivals(request.getfixturevalue(url), locks=None) as made:
        texts = ["a", "A", "á", "a "]

        @made.first.tg.guarded(key="order:<text>")
        def ship(text: str, guard: Guard) -> None:
            with guard.transaction() as db:
                write(db, text)

        for text in [*texts, *texts]:
            ship(text)
        assert sorted(made.first.effects) == sorted(texts)
