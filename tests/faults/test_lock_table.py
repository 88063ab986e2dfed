"""The database of a lock table fails while a body runs: frozen, killed, emptied, or without
replies.

With a ledger, in that database or in another, there is one effect, and a rival is refused. With
locks only, `docs/reference/lock-servers.md` says what may be lost, and tokens still grow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import sqlalchemy as sa

import taskguard
from support.needs import need
from support.proxy import Mode, Proxy
from support.rivals import expect_one_effect, expect_work_beside_a_frozen_server
from support.standby import Standby
from support.waiting import wait_until
from taskguard.errors import LeaseLostError, LockServerUnavailableError
from taskguard.lock_table import TableLocks
from taskguard.locks.base import Granted, Held
from taskguard.model.lease import new_owner
from taskguard_sandbox.servers import MariaDB, Postgres

KEY = ("order:1",)


@pytest.fixture
def server() -> Iterator[Postgres]:
    """A PostgreSQL for locks alone; the ledger is elsewhere."""
    need(Postgres)
    with Postgres() as server:
        yield server


@pytest.fixture
def connect() -> Iterator[Callable[..., TableLocks]]:
    """Makes providers that do not wait for long."""
    with ExitStack() as stack:

        def make(url: Any, *, unlogged: bool | None = None) -> TableLocks:
            locks = stack.enter_context(closing(TableLocks(url, answer_s=3.0)))
            if unlogged is not None:
                locks.create_table(unlogged=unlogged)
            return locks

        yield make


def take(locks: TableLocks, owner: Any = None, **options: Any) -> Any:
    options = {"ttl_s": 600.0, "with_fence": True, "wait_s": 0.0, **options}
    return locks.acquire(KEY, owner or new_owner("m"), **options)


class TestFrozen:
    """Fault 8."""

    def test_the_ledger_decides_and_work_goes_on(
        self, server: Postgres, make_rivals: Any, connect: Any
    ) -> None:
        """If the database freezes, a rival is refused, and other work is done."""
        connect(server.url, unlogged=True)
        rivals = make_rivals(locks=lambda: TableLocks(server.url, answer_s=0.5))
        expect_work_beside_a_frozen_server(rivals, server)

    def test_with_locks_only_the_lease_is_lost(self, server: Postgres, connect: Any) -> None:
        """With locks only, a lease without renewals is lost after its time."""
        tg = taskguard.connect(locks=connect(server.url, unlogged=False), ledger=None)
        try:
            with (
                pytest.raises(LeaseLostError, match="before it was released"),
                tg.lock("order:1", ttl_s=9.0) as lease,
            ):
                server.pause()
                wait_until(lease.lost.is_set)
        finally:
            server.resume()
            tg.close()


class TestKilled:
    """Fault 13, and 10: a table without a log is empty then."""

    @pytest.mark.parametrize("unlogged", [True, False])
    def test_the_ledger_keeps_the_key(
        self, server: Postgres, make_rivals: Any, connect: Any, unlogged: bool
    ) -> None:
        """If the database is killed and started in a body, a rival is refused."""
        connect(server.url, unlogged=unlogged)

        def fault() -> None:
            server.kill()
            server.start()

        expect_one_effect(make_rivals(locks=lambda: TableLocks(server.url)), fault)

    def test_a_table_with_a_log_loses_nothing(self, server: Postgres, connect: Any) -> None:
        """The holder's lease and token are restored, and no other owner gets the key."""
        locks, owner = connect(server.url, unlogged=False), new_owner("m")
        granted = take(locks, owner)
        server.kill()
        server.start()
        other = take(connect(server.url))
        assert isinstance(other, Held)
        assert other.owner == owner
        assert take(locks, owner) == granted

    def test_a_table_without_a_log_loses_all(self, server: Postgres, connect: Any) -> None:
        """An unlogged table loses its locks: another owner gets the key while the holder trusts its
        lease. Tokens still grow."""
        locks, owner = connect(server.url, unlogged=True), new_owner("m")
        before = take(locks, owner)
        server.kill()
        server.start()
        after = take(connect(server.url))
        assert isinstance(after, Granted)
        assert after.fence > before.fence

    @pytest.mark.debian
    def test_mariadb_loses_nothing(self, connect: Any) -> None:
        """With its default, MariaDB flushes each commit, and loses no lock."""
        need(MariaDB)
        with MariaDB() as server:
            url = server.create_database("locks")
            locks, owner = connect(url, unlogged=False), new_owner("m")
            granted = take(locks, owner)
            server.kill()
            server.start()
            assert isinstance(take(connect(url)), Held)
            assert take(locks, owner) == granted


class TestOfTheLedger:
    """Locks and ledger in one database."""

    @pytest.fixture
    def beside(self, pg_url: str, make_rivals: Any) -> Any:
        rivals = make_rivals(locks="ledger://")
        rivals.first.tg.runner.locks.create_table(unlogged=True)
        return rivals

    def test_the_table_is_emptied(self, beside: Any, pg_url: str) -> None:
        """If the table is emptied, the ledger's lease keeps the key, and the rival's lock is handed
        to its holder."""

        def fault() -> None:
            with beside.first.engine.begin() as db:
                assert db.execute(sa.text("delete from taskguard_locks")).rowcount == 1

        expect_one_effect(beside, fault)

    def test_the_table_is_dropped(self, beside: Any) -> None:
        """If the table is dropped, the log says so, and the ledger decides."""

        def fault() -> None:
            with beside.first.engine.begin() as db:
                db.execute(sa.text("drop table taskguard_locks"))

        expect_one_effect(beside, fault)
        assert "lock_unavailable" in beside.second.happened

    def test_a_rival_costs_the_ledger_no_claim(
        self, beside: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The lock refuses a rival before the ledger is asked. In the end no lock is left."""
        # Some releases look for old rows in passing, and note that.
        monkeypatch.setattr("taskguard.lock_table.provider._RELEASES_PER_LOOK", 10**9)
        expect_one_effect(beside, lambda: None)
        assert "lock_unavailable" not in beside.first.happened + beside.second.happened
        with beside.first.engine.connect() as db:
            assert db.execute(sa.text("select count(*) from taskguard_locks")).scalar() == 0


class TestReplyLost:
    """Fault 9."""

    @pytest.mark.parametrize(
        "kind", ["pg_url", pytest.param("mariadb_url", marks=pytest.mark.debian)]
    )
    def test_a_release_that_was_not_answered(
        self, request: pytest.FixtureRequest, connect: Any, kind: str
    ) -> None:
        """If a release gets no answer, the key is free, and the next call works."""
        url = sa.make_url(request.getfixturevalue(kind))
        connect(url, unlogged=False)
        assert url.port is not None
        with Proxy(url.port) as proxy:
            locks, owner = connect(url.set(port=proxy.port)), new_owner("m")
            assert isinstance(take(locks, owner), Granted)
            proxy.mode = Mode.SWALLOW
            with pytest.raises(LockServerUnavailableError, match="no answer"):
                locks.release(KEY, owner)
            assert isinstance(take(connect(url)), Granted)
            proxy.mode = Mode.PASS
            assert isinstance(take(locks), Held)
            locks.close()

    def test_of_a_dead_connection_it_is_asked_again(self, pg_url: str, connect: Any) -> None:
        """On a dead connection an acquire is repeated, and is the same grant. So is a release."""
        locks, owner = connect(pg_url, unlogged=False), new_owner("m")
        granted = take(locks, owner)
        with sa.create_engine(pg_url, poolclass=sa.NullPool).begin() as db:
            end = sa.text(
                "select pg_terminate_backend(pid, 10000) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
            )
            db.execute(end)
            assert take(locks, owner) == granted
            db.execute(end)
            assert locks.release(KEY, owner) is True


class TestStandby:
    """Fault 14."""

    @pytest.mark.parametrize("unlogged", [True, False])
    def test_it_takes_no_locks_and_says_so(
        self, server: Postgres, connect: Any, make_rivals: Any, unlogged: bool
    ) -> None:
        """A standby grants no lock, and says so. After its promotion in a body it does, and the
        ledger keeps the key."""
        locks = connect(server.url, unlogged=unlogged)
        with Standby(server) as standby, closing(TableLocks(standby.url)) as there:
            names = {finding.name for finding in there.check()}
            assert names - {"locks_unlogged"} == {"locks_read_only"}
            with pytest.raises(LockServerUnavailableError):
                take(there)
            before = take(locks, held := new_owner("m"))
            if not unlogged:
                wait_until(lambda: there.holders(KEY[0]))

            def fault() -> None:
                server.kill()
                standby.promote()

            if unlogged:
                fault()
                after = take(there)
                assert isinstance(after, Granted)
                assert after.fence > before.fence
            else:
                locks.release(KEY, held)
                rivals = make_rivals(
                    locks=lambda: TableLocks(server.url),
                    second_locks=lambda: TableLocks(standby.url),
                )
                expect_one_effect(rivals, fault)

    def test_what_it_had_not_got_is_lost(self, server: Postgres, connect: Any) -> None:
        """With locks only, a lock that the standby lacks is lost: another owner gets the key, with
        a higher token."""
        locks = connect(server.url, unlogged=False)
        with Standby(server) as standby, closing(TableLocks(standby.url)) as there:
            with sa.create_engine(
                standby.url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT"
            ).connect() as db:
                db.exec_driver_sql("alter system set primary_conninfo = ''")
                db.exec_driver_sql("select pg_reload_conf()")
                streams = sa.text("select count(*) from pg_stat_wal_receiver")
                wait_until(lambda: db.execute(streams).scalar() == 0)
            before = take(locks)
            server.kill()
            standby.promote()
            after = take(there)
            assert isinstance(after, Granted)
            assert after.fence > before.fence
