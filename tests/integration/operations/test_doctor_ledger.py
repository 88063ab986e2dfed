"""Findings about a ledger's database, on real servers that are set up that way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from support import claims
from support.databases import DATABASES
from support.needs import need
from support.pgbouncer import PgBouncer
from taskguard import GuardedRow, connect
from taskguard.integration import Configuration, Finding, GuardedTask, Level, Policy, examine
from taskguard.ledger.sql import SqlLedger
from taskguard.ledger.tables import WORK
from taskguard_sandbox.servers import MariaDB, Postgres, free_port

DAY_S = 86_400.0
Make = Callable[..., SqlLedger]


@pytest.fixture(scope="module")
def durable() -> Iterator[Postgres]:
    """A PostgreSQL that flushes its commits."""
    need(Postgres)
    with Postgres() as server:
        yield server


@pytest.fixture
def url(durable: Postgres) -> Iterator[str]:
    """Return the URL of an empty database there."""
    name = f"doctor_{time.time_ns()}"
    yield durable.create_database(name)
    durable.drop_database(name)


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes ledgers with tables, which are closed at the end."""
    with ExitStack() as stack:

        def make(database: Any, *, tables: bool = True, **options: Any) -> SqlLedger:
            ledger = stack.enter_context(closing(SqlLedger(database, **options)))
            if tables:
                ledger.create_schema()
            return ledger

        yield make


def found(ledger: SqlLedger, *args: Any, **options: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in ledger.check(*args, **options)}


def say(url: str, *statements: str) -> None:
    """Run a statement as the superuser."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as db:
        for statement in statements:
            db.exec_driver_sql(statement)


@contextmanager
def set_for(durable: Postgres, url: str, name: str, value: str) -> Iterator[None]:
    """Set a default of the database for new connections."""
    database = sa.make_url(url).database
    durable.execute(f"alter database {database} set {name} = {value}")
    yield
    durable.execute(f"alter database {database} reset {name}")


def test_nothing_is_found(url: str, make: Make) -> None:
    """New tables on a server with its defaults have no findings."""
    ledger = make(url)
    ledger.claim(claims.request())
    assert found(ledger) == {}


@pytest.mark.parametrize("database", DATABASES)
def test_each_kind_of_database_is_asked(
    database: str, request: pytest.FixtureRequest, make: Make
) -> None:
    """The tests' servers do not flush, which is found. Nothing else is, and their clock is
    correct."""
    ledger = make(request.getfixturevalue(database))
    unflushed = set() if "sqlite" in database else {"commits_unflushed"}
    assert set(found(ledger)) == unflushed
    assert abs(ledger.now_us() / 1e6 - time.time()) < 60.0


class TestTables:
    def test_missing(self, url: str, make: Make) -> None:
        """Missing tables are an error, with the command that creates them."""
        finding = found(make(url, tables=False))["tables_missing"]
        assert finding.level is Level.ERROR
        assert "taskguard ledger create" in finding.fix

    @pytest.mark.parametrize("database", DATABASES)
    def test_an_index_is_missing(
        self, database: str, request: pytest.FixtureRequest, make: Make
    ) -> None:
        """A missing index is a finding, because a sweep would read the whole table."""
        url = request.getfixturevalue(database)
        ledger = make(url)
        on = "" if "mysql" not in url and "mariadb" not in url else " on taskguard_work"
        say(url, f"drop index taskguard_work_due{on}")
        finding = found(ledger)["index_missing"]
        assert (finding.level, "taskguard_work_due" in finding.what) == (Level.WARNING, True)
        ledger.create_schema()
        assert "index_missing" not in found(ledger)

    def test_an_index_that_was_not_made_to_its_end(self, url: str, make: Make) -> None:
        """An invalid index, as after an interrupted CREATE INDEX CONCURRENTLY, is a finding."""
        ledger = make(url)
        say(
            url,
            "update pg_index set indisvalid = false "
            "where indexrelid = 'taskguard_work_due'::regclass",
        )
        assert "index_missing" in found(ledger)

    def test_a_primary_key_is_missing(self, url: str, make: Make) -> None:
        """A missing primary key, as after a restore of the data alone, is a finding."""
        ledger = make(url)
        say(url, "alter table taskguard_keys drop constraint taskguard_keys_pkey")
        finding = found(ledger)["primary_key_missing"]
        assert (finding.level, "taskguard_keys" in finding.what) == (Level.ERROR, True)

    @pytest.mark.parametrize("database", DATABASES)
    def test_no_purge(self, database: str, request: pytest.FixtureRequest, make: Make) -> None:
        """Work that ended long ago is a finding, because no purge runs."""
        url = request.getfixturevalue(database)
        ledger = make(url)
        claimed = ledger.claim(claims.request())
        ledger.complete_alone(claimed.claim, None)  # type: ignore[union-attr]
        engine = sa.create_engine(url, poolclass=sa.NullPool)
        for days, warned in ((59, False), (61, True)):
            with engine.begin() as db:
                ago_us = ledger.now_us() - int(days * DAY_S * 1e6)
                db.execute(sa.update(WORK).values(finished=ago_us))
            assert ("purge_never_run" in found(ledger)) is warned
        assert "61 days ago" in found(ledger)["purge_never_run"].what
        assert "purge_never_run" not in found(ledger, retention_s=31 * DAY_S)

    @pytest.mark.parametrize("database", DATABASES)
    def test_no_sweep(self, database: str, request: pytest.FixtureRequest, make: Make) -> None:
        """Work that has been overdue for long is a finding, because no sweep runs."""
        url = request.getfixturevalue(database)
        ledger = make(url)
        ledger.enqueue(None, claims.request(call="{}"))
        assert "overdue_work" not in found(ledger)
        engine = sa.create_engine(url, poolclass=sa.NullPool)
        with engine.begin() as db:
            db.execute(sa.update(WORK).values(due=ledger.now_us() - int(901 * 1e6)))
        assert found(ledger)["overdue_work"].what.endswith(": 1.")


class TestPrivileges:
    @pytest.fixture
    def clerk(self, durable: Postgres, url: str, make: Make) -> Iterator[str]:
        """Return the URL of a user with the rights of workers."""
        make(url)
        say(
            url,
            "create role clerk login",
            "grant select, insert, update on all tables in schema public to clerk",
        )
        yield sa.make_url(url).set(username="clerk").render_as_string(hide_password=False)
        say(url, "drop owned by clerk", "drop role clerk")

    def test_enough(self, clerk: str, make: Make) -> None:
        """The rights of workers are enough for the check."""
        assert found(make(clerk, tables=False)) == {}

    @pytest.mark.parametrize(
        "missing",
        [
            "update on taskguard_messages",
            "select on taskguard_work",
            "select on taskguard_keys",
            "select on taskguard_schema",
        ],
    )
    def test_missing(self, clerk: str, url: str, make: Make, missing: str) -> None:
        """Missing rights are named."""
        say(url, f"revoke {missing} from clerk")
        findings = found(make(clerk, tables=False))
        assert set(findings) == {"privileges"}
        finding = findings["privileges"]
        assert finding.level is Level.ERROR
        assert missing.partition(" on ")[2] in finding.what
        assert "GRANT" in finding.fix

    def test_a_table_of_the_users_own_is_not_as_declared(self, url: str, make: Make) -> None:
        """A missing table of a GuardedRow is a finding."""
        orders = sa.Table(
            "orders",
            sa.MetaData(),
            sa.Column("id", sa.Integer, primary_key=True),
            sa.Column("state", sa.Text),
            sa.Column("fence", sa.BigInteger),
        )
        row = GuardedRow(
            orders,
            id="<id>",
            state="state",
            fence="fence",
            new="NEW",
            processing="AT_WORK",
            done="DONE",
        )
        ledger = make(url)
        task = GuardedTask("ship", Policy(), row)
        runtime = lambda: connect(locks=None, ledger=ledger)  # noqa: E731
        reports = examine(Configuration(runtime, tasks=[task]))
        names = [each.name for report in reports for each in report.findings]
        assert names == ["own_table"]


class TestSettings:
    def test_a_commit_that_is_not_flushed(self, durable: Postgres, url: str, make: Make) -> None:
        """`synchronous_commit = off` of this database is found."""
        ledger = make(url)
        ledger.close()
        with set_for(durable, url, "synchronous_commit", "off"):
            finding = found(ledger)["commits_unflushed"]
            assert finding.level is Level.ERROR
            assert "synchronous_commit = off" in finding.what
            ledger.close()
        assert found(ledger) == {}

    def test_read_only(self, durable: Postgres, url: str, make: Make) -> None:
        """A read-only setting is found, and not reported as missing rights."""
        make(url).close()
        with set_for(durable, url, "default_transaction_read_only", "on"):
            ledger = make(url, tables=False)
            assert set(found(ledger)) == {"read_only"}
            ledger.close()

    def test_standby(self, make: Make) -> None:
        """A standby is a finding."""
        need(Postgres)
        with _Standby() as server:
            make(server.create_database("shop")).close()
            server.halt()
            server.stand_by()
            server.start()
            ledger = make(server.url_of("shop"), tables=False)
            findings = found(ledger)
            assert set(findings) == {"read_only"}
            assert "standby" in findings["read_only"].what
            ledger.close()

    def test_transaction_timeout(self, durable: Postgres, url: str, make: Make) -> None:
        """A transaction_timeout that is shorter than a body is a finding."""
        make(url).close()
        for value, names in (("'20s'", {"transaction_timeout"}), ("'50s'", set())):
            with set_for(durable, url, "transaction_timeout", value):
                ledger = make(url, tables=False)
                assert set(found(ledger)) == names
                ledger.close()

    def test_what_a_transaction_may_idle(self, url: str, make: Make) -> None:
        """The idle timeout of the ledger's own transactions is compared with the longest body."""
        task = GuardedTask("ship", Policy(), limit_s=600.0)
        runtime = lambda: connect(locks=None, ledger=make(url))  # noqa: E731
        reports = examine(Configuration(runtime, tasks=[task]))
        (finding,) = [each for report in reports for each in report.findings]
        assert (finding.name, finding.level) == ("idle_transactions", Level.NOTE)
        assert found(make(url, idle_in_transaction_s=900.0), longest_body_s=600.0) == {}

    def test_pooled(self, durable: Postgres, url: str, make: Make) -> None:
        """An Engine that prepares statements behind PgBouncer is found."""
        need(PgBouncer)
        make(url).close()
        with PgBouncer(durable.port) as pooler:
            behind = pooler.url_of(str(sa.make_url(url).database))
            ledger = make(behind, tables=False)
            assert found(ledger) == {}
            for threshold, names in ((5, {"pooled_prepares"}), (None, set())):
                engine = sa.create_engine(behind, connect_args={"prepare_threshold": threshold})
                assert set(found(make(engine, tables=False))) == names
                engine.dispose()
            ledger.close()


class _Standby(Postgres):
    """A PostgreSQL that can become a standby. It is ready when it can be read."""

    def stand_by(self) -> None:
        (self._data / "standby.signal").touch()

    def _answers(self) -> bool:
        if super()._answers():
            return True
        state = self._data / "postmaster.pid"
        lines = state.read_text("utf-8").splitlines() if state.exists() else []
        return len(lines) >= 8 and int(lines[0]) == self.pid and lines[7].strip() == "standby"


class TestMariaDB:
    @pytest.fixture
    def set_globally(self, mariadb: MariaDB) -> Iterator[Callable[[str, str], None]]:
        """Sets a variable of the server's, and sets it back."""
        with ExitStack() as stack:

            def put(name: str, value: str) -> None:
                ((before,),) = mariadb.execute(f"select @@global.{name}")
                mariadb.execute(f"set global {name} = {value}")
                stack.callback(mariadb.execute, f"set global {name} = {before}")

            yield put

    @pytest.fixture(autouse=True)
    def flushes(self, set_globally: Callable[[str, str], None]) -> None:
        set_globally("innodb_flush_log_at_trx_commit", "1")

    def test_commits(self, mariadb_url: str, make: Make, set_globally: Any) -> None:
        """Commits that are flushed once a second are a finding."""
        ledger = make(mariadb_url)
        assert found(ledger) == {}
        set_globally("innodb_flush_log_at_trx_commit", "2")
        finding = found(ledger)["commits_unflushed"]
        assert "innodb_flush_log_at_trx_commit = 2" in finding.what

    def test_read_only(self, mariadb_url: str, make: Make, set_globally: Any) -> None:
        """A read-only server is a finding, even if this user may write there."""
        ledger = make(mariadb_url)
        set_globally("read_only", "1")
        assert set(found(ledger)) == {"read_only"}

    @pytest.mark.parametrize("name", ["wait_timeout", "idle_write_transaction_timeout"])
    def test_transaction_timeout(
        self, mariadb_url: str, make: Make, set_globally: Any, name: str
    ) -> None:
        """A timeout between two statements that is shorter than a body is a finding."""
        make(mariadb_url).close()
        set_globally(name, "4")
        findings = found(make(mariadb_url, tables=False))
        assert set(findings) == {"transaction_timeout"}
        assert name in findings["transaction_timeout"].what

    def test_what_the_ledger_sets_itself_is_no_finding(
        self, mariadb_url: str, make: Make, set_globally: Any
    ) -> None:
        """A timeout of the server is a finding only on a user's Engine, because the ledger's own
        connections set theirs."""
        make(mariadb_url).close()
        set_globally("idle_transaction_timeout", "4")
        assert found(make(mariadb_url, tables=False)) == {}
        engine = sa.create_engine(mariadb_url)
        assert set(found(make(engine, tables=False))) == {"transaction_timeout"}
        engine.dispose()


class TestSQLite:
    def test_commits(self, sqlite_url: str, make: Make) -> None:
        """Commits that are not flushed are a finding on a user's Engine. The ledger's own
        connections flush."""
        assert found(make(sqlite_url)) == {}
        engine = sa.create_engine(sqlite_url)
        sa.event.listen(engine, "connect", _hurry)
        assert "synchronous = NORMAL" in found(make(engine))["commits_unflushed"].what
        engine.dispose()

    def test_unwritable(self, sqlite_url: str, make: Make) -> None:
        """A file that cannot be written is a finding."""
        make(sqlite_url).close()
        path = sa.make_url(sqlite_url).database
        ledger = make(f"sqlite:///file:{path}?mode=ro&uri=true", tables=False)
        assert set(found(ledger)) == {"unwritable"}


def _hurry(connection: Any, _record: Any) -> None:
    connection.execute("pragma synchronous = normal")


def test_a_ledger_that_is_away_is_a_finding() -> None:
    """A ledger that is down is a finding, which does not show the password."""
    url = f"postgresql+psycopg://shop:s3cret-horse@127.0.0.1:{free_port()}/shop"
    reports = examine(Configuration(lambda: connect(locks=None, ledger=url)))
    (finding,) = [each for report in reports for each in report.findings]
    assert (finding.name, finding.level) == ("ledger_away", Level.ERROR)
    assert "s3cret-horse" not in str(finding)
