"""Locks in a table of the database: creation, findings, poolers, growth.

The behaviour of every lock provider is tested in `tests/contract/locks`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import support
import taskguard
from support.guarded_shop import GuardedShop, write
from support.needs import need
from support.pgbouncer import PgBouncer
from support.scripts import run_script
from support.waiting import patience_s, wait_until
from taskguard import Guard
from taskguard.cli import main
from taskguard.errors import (
    ConfigurationError,
    LockServerUnavailableError,
    TransactionRetryError,
)
from taskguard.findings import Level
from taskguard.ledger.connections.database import Database
from taskguard.lock_table import TableLocks
from taskguard.lock_table.table import ddl_statements
from taskguard.locks.base import Granted, Held, Hold, Renewal
from taskguard.model.lease import new_owner
from taskguard_sandbox.servers import MariaDB, Postgres

KEY = ("order:1",)
TESTS = Path(support.__path__[0]).parent
DATABASES = [
    "pg_url",
    pytest.param("mariadb_url", marks=pytest.mark.debian),
    pytest.param("mysql_url", marks=pytest.mark.debian),
]


# MySQL has MariaDB's statements.
on_two_databases = pytest.mark.parametrize("url", DATABASES[:2], indirect=True)


@pytest.fixture
def make_locks() -> Iterator[Callable[..., TableLocks]]:
    """Return a function that makes the test's providers."""
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(closing(TableLocks(*args, **options)))


@pytest.fixture(params=DATABASES)
def url(request: pytest.FixtureRequest) -> str:
    """Return the URL of an empty database of each kind that has a table of locks."""
    return str(request.getfixturevalue(request.param))


def execute(url: str, *statements: str) -> list[Any]:
    """Execute the statements, and return the rows of the last one."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as db:
        for statement in statements:
            found = db.exec_driver_sql(statement.replace("%", "%%"))
        return list(found) if found.returns_rows else []


def take(locks: TableLocks, keys: tuple[str, ...] = KEY, owner: Any = None, **options: Any) -> Any:
    options = {"ttl_s": 30.0, "with_fence": True, "wait_s": 0.0, **options}
    return locks.acquire(keys, owner or new_owner("m"), **options)


def names(locks: TableLocks) -> list[str]:
    return sorted(finding.name for finding in locks.check())


class TestMaking:
    """`taskguard locks create`, `ledger create --locks`, and as SQL."""

    def test_by_the_command(
        self, url: str, make_locks: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Running the command again changes no held lock."""
        assert main(["locks", "create", "--url", url]) == 0
        locks, owner = make_locks(url), new_owner("m")
        granted = take(locks, owner=owner)
        assert main(["locks", "create", "--url", url]) == 0
        assert take(locks, owner=owner) == granted
        assert capsys.readouterr().out.count("created: the lock table in ") == 2

    def test_as_sql(self, url: str, make_locks: Any) -> None:
        """The printed statements create a table that works."""
        execute(url, *ddl_statements(url))
        assert isinstance(take(make_locks(url)), Granted)

    def test_with_the_ledger(
        self, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """With `ledger://`, the locks are in the ledger's database, and use its connections."""
        monkeypatch.setenv("TASKGUARD_LEDGER_URL", url)
        monkeypatch.setenv("TASKGUARD_LOCKS_URL", "ledger://")
        assert main(["ledger", "create"]) == 0
        assert main(["locks", "create"]) == 0
        assert "created: the lock table in " in capsys.readouterr().out
        with closing(taskguard.connect()) as tg, tg.lock("order:1") as lease:
            assert lease.fence > 0
            assert isinstance(tg.runner.locks, TableLocks)
            assert execute(url, "select count(*) from taskguard_locks where until > 0") == [(1,)]
        assert main(["purge"]) == 0
        assert "0 locks" in capsys.readouterr().out

    def test_unlogged(self, pg_url: str, make_locks: Any) -> None:
        """PostgreSQL can create the table unlogged. Without a ledger that is a finding. Other
        databases refuse it."""
        assert main(["ledger", "create", "--locks", "--unlogged", "--url", pg_url]) == 0
        asked = "select relpersistence::text from pg_class where relname = 'taskguard_locks'"
        assert execute(pg_url, asked) == [("u",)]
        (finding,) = make_locks(pg_url).check()
        assert (finding.name, finding.level) == ("locks_unlogged", Level.WARNING)
        with pytest.raises(ConfigurationError, match="remove unlogged"):
            ddl_statements("mysql+pymysql://", unlogged=True)

    @on_two_databases
    def test_at_once(self, url: str) -> None:
        """Several processes can create the table at once."""
        command = [sys.executable, "-m", "taskguard", "locks", "create", "--url", url]
        processes = [subprocess.Popen(command) for _ in range(3)]
        assert [process.wait(patience_s()) for process in processes] == [0, 0, 0]

    def test_alembic_leaves_it_alone(self) -> None:
        """`include_name` excludes the table from Alembic's autogenerate, which would drop it."""
        assert not taskguard.include_name("taskguard_locks", "table", {})
        assert taskguard.include_name("locks", "table", {})

    @pytest.mark.parametrize(
        ("locks", "ledger", "says"),
        [
            ("ledger://", None, "needs a ledger"),
            ("ledger://", "sqlite://", "locks=None"),
            ("postgresql+psycopg2://h/d", None, "psycopg"),
            ("mysql+mysqldb://h/d", None, "pymysql"),
        ],
    )
    def test_what_cannot_be(self, locks: str, ledger: Any, says: str) -> None:
        """An unsupported option raises at configuration, with a replacement."""
        with pytest.raises(ConfigurationError, match=says):
            taskguard.connect(locks=locks, ledger=ledger)


class TestUnavailable:
    """If the table is missing or the user lacks rights, work goes on with a ledger."""

    def test_missing(self, url: str, make_locks: Any) -> None:
        """The error and the finding of a missing table name the command."""
        locks = make_locks(url)
        with pytest.raises(LockServerUnavailableError, match="taskguard locks create"):
            take(locks)
        (finding,) = locks.check()
        assert (finding.name, finding.level) == ("locks_table_missing", Level.ERROR)
        assert "taskguard locks create" in finding.fix

    def test_functions_missing(self, pg_url: str, make_locks: Any) -> None:
        """After a restore of tables alone, the table exists, but its functions do not."""
        locks = make_locks(pg_url)
        locks.create_table()
        execute(pg_url, "drop function taskguard_locks_take_1")
        with pytest.raises(LockServerUnavailableError, match="taskguard locks create"):
            take(locks)
        assert names(locks) == ["locks_table_missing"]

    def test_the_work_goes_on(self, pg_url: str, caplog: pytest.LogCaptureFixture) -> None:
        """Without the table the ledger decides, and the log names the command."""
        with closing(GuardedShop(pg_url, locks="ledger://")) as shop:

            def ship(guard: Guard) -> None:
                with guard.transaction() as db:
                    write(db)

            shop.deliver(ship)
            assert shop.effects == ["x"]
        assert "taskguard locks create" in caplog.text

    def test_privileges(self, postgres: Postgres, pg_url: str, make_locks: Any) -> None:
        """A user without the right to write gets an error and a finding that name the missing
        rights."""
        make_locks(pg_url).create_table()
        execute(
            pg_url,
            "drop role if exists reader",
            "create role reader login",
            "grant select on taskguard_locks to reader",
        )
        locks = make_locks(sa.make_url(pg_url).set(username="reader"))
        with pytest.raises(LockServerUnavailableError, match="INSERT, UPDATE and DELETE"):
            take(locks)
        assert names(locks) == ["locks_privileges"]
        execute(pg_url, "grant insert, update, delete on taskguard_locks to reader")
        assert isinstance(take(locks), Granted)
        assert names(locks) == []
        locks.close()
        execute(pg_url, "drop owned by reader", "drop role reader")

    @pytest.mark.debian
    def test_privileges_of_mysql_kinds(self, mariadb_url: str, make_locks: Any) -> None:
        """On MariaDB, a user without the right to write gets an error and a finding that name the
        missing rights."""
        make_locks(mariadb_url).create_table()
        user = f"u{os.getpid()}"
        database = sa.make_url(mariadb_url).database
        execute(
            mariadb_url,
            f"create user {user}@'%'",
            f"grant select on `{database}`.taskguard_locks to {user}@'%'",
        )
        locks = make_locks(sa.make_url(mariadb_url).set(username=user))
        with pytest.raises(LockServerUnavailableError, match="INSERT, UPDATE and DELETE"):
            take(locks)
        assert names(locks) == ["locks_privileges"]
        execute(mariadb_url, f"drop user {user}@'%'")


class TestFindings:
    """`check()`; what is missing or forbidden is in `TestUnavailable`."""

    def test_nothing(self, url: str, make_locks: Any) -> None:
        """A newly created table has no findings."""
        locks = make_locks(url)
        locks.create_table()
        assert names(locks) == []

    def test_read_only(self, pg_url: str, make_locks: Any) -> None:
        """A read-only database, as after a failover, grants no locks, and is a finding."""
        make_locks(pg_url).create_table()
        database = sa.make_url(pg_url).database
        execute(pg_url, f'alter database "{database}" set default_transaction_read_only = on')
        locks = make_locks(pg_url)
        with pytest.raises(LockServerUnavailableError, match="cannot write"):
            take(locks)
        assert names(locks) == ["locks_read_only"]

    @pytest.mark.debian
    def test_of_mariadb(self) -> None:
        """A read-only MariaDB, such as a replica, is a finding."""
        need(MariaDB)
        with MariaDB() as server:
            with closing(TableLocks(server.create_database("shop"))) as locks:
                locks.create_table()
                assert names(locks) == []
                execute(server.url_of("shop"), "set global read_only = 1")
                assert names(locks) == ["locks_read_only"]


class TestPooled:
    """PgBouncer pools transactions."""

    @pytest.fixture
    def pooled(self, postgres: Postgres, pg_url: str) -> Iterator[str]:
        need(PgBouncer)
        with closing(TableLocks(pg_url)) as locks:
            locks.create_table()
        with PgBouncer(postgres.port) as pooler:
            yield pooler.url_of(str(sa.make_url(pg_url).database))

    def test_locks_are_as_ever(self, pooled: str, make_locks: Any) -> None:
        """Locks are taken, refused, renewed and released, whichever sessions the statements get."""
        first, second, owner = make_locks(pooled), make_locks(pooled), new_owner("m")
        for _ in range(20):
            assert isinstance(take(first, owner=owner), Granted)
            assert isinstance(take(second), Held)
            assert second.renew([Hold(KEY, owner, 30.0)]) == [Renewal.RENEWED]
            assert second.release(KEY, owner)

    def test_waiters_look_for_themselves(self, pooled: str, make_locks: Any) -> None:
        """Waiters poll, and are granted the key long before their wait is over."""
        locks, holder = make_locks(pooled), new_owner("m")
        waited_s: list[float] = []

        def wait() -> None:
            began_s = time.monotonic()
            make_locks(pooled).wait(KEY[0], new_owner(), timeout_s=30.0)
            waited_s.append(time.monotonic() - began_s)

        for _ in range(5):
            take(locks, owner=holder)
            waiter = threading.Thread(target=wait)
            waiter.start()
            locks.release(KEY, holder)
            waiter.join(patience_s())
        assert min(waited_s) < 0.6


class TestWaiting:
    """LISTEN, where it works."""

    def test_a_release_notifies_only_if_there_is_a_waiter(
        self, pg_url: str, make_locks: Any
    ) -> None:
        """A release notifies only if a process waits, because notifying commits pass one after the
        other."""
        locks, other = make_locks(pg_url), make_locks(pg_url)
        locks.create_table()
        engine = sa.create_engine(pg_url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
        with engine.connect() as db:
            driver: Any = db.connection.driver_connection
            db.exec_driver_sql("listen taskguard_locks")
            for wait_s in (0.0, 30.0):
                owner = new_owner("m")
                take(locks, owner=owner)
                take(other, wait_s=wait_s)
                locks.release(KEY, owner)
            notifies = list(driver.notifies(timeout=5.0, stop_after=1))
        assert [note.payload for note in notifies] == [KEY[0]]

    def test_the_connection_that_listens_is_killed(self, pg_url: str, make_locks: Any) -> None:
        """If the listening connection is killed, waiters poll until the next one listens."""
        locks = make_locks(pg_url)
        locks.create_table()
        take(locks)
        hearing = (
            "from pg_stat_activity where query ilike 'listen%' and datname = current_database()"
        )
        listening = f"select pid {hearing}"

        def listens() -> list[Any]:
            locks.wait(KEY[0], new_owner(), timeout_s=0.5)
            return execute(pg_url, listening)

        wait_until(listens)
        [[pid]] = execute(pg_url, listening)
        execute(pg_url, f"select pg_terminate_backend(pid) {hearing}")

        def heard_again() -> bool:
            locks.wait(KEY[0], new_owner(), timeout_s=0.2)
            return bool([row for row in execute(pg_url, listening) if row[0] != pid])

        wait_until(heard_again)

    def test_a_fork(self, pg_url: str, make_locks: Any) -> None:
        """A child of a process that waits has a connection of its own, and leaves its parent's
        alone."""
        locks = make_locks(pg_url)
        locks.create_table()
        owner = new_owner("m")
        take(locks, owner=owner)
        locks.wait(KEY[0], new_owner(), timeout_s=0.3)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                locks.wait(KEY[0], new_owner(), timeout_s=0.3)
                status = 0 if isinstance(take(locks, ("other",)), Granted) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert locks.renew([Hold(KEY, owner, 30.0)]) == [Renewal.RENEWED]
        locks.wait(KEY[0], new_owner(), timeout_s=0.3)

    @on_two_databases
    def test_greenlets(self, url: str, make_locks: Any) -> None:
        """Under gevent, waiting greenlets let others run, and all get the key in the end."""
        make_locks(url).create_table()
        command = [sys.executable, "-m", "support.waiting_greenlets", url]
        environment = {**os.environ, "PYTHONPATH": str(TESTS)}

        def stood_still_s() -> float:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=patience_s(),
                check=False,
            )
            assert done.returncode == 0, done.stderr
            found = json.loads(done.stdout)
            assert found["got"] == 10
            return float(found["stood_still_s"])

        # A wait lasts this long; a busy machine may pause for a while.
        assert any(stood_still_s() < 1.0 for _ in range(5))


class TestRenewals:
    def test_few_round_trips(self, url: str, make_locks: Any, monkeypatch: Any) -> None:
        """Three hundred leases of different lengths are renewed in at most ten round trips."""
        locks = make_locks(url)
        locks.create_table()
        holds = [Hold((f"k{n}",), new_owner("m"), 600.0 + n) for n in range(300)]
        for hold in holds:
            take(locks, hold.keys, hold.owner, ttl_s=300.0)
        trips = counted(monkeypatch)
        assert locks.renew(holds) == [Renewal.RENEWED] * 300
        assert 1 <= len(trips) <= 10

    def test_a_row_that_another_session_has_locked(self, url: str, make_locks: Any) -> None:
        """A locked row is skipped, and the others are renewed."""
        locks = make_locks(url)
        locks.create_table()
        holds = [Hold((f"k{n}",), new_owner("m"), 600.0) for n in range(3)]
        for hold in holds:
            take(locks, hold.keys, hold.owner, ttl_s=20.0)
        engine = sa.create_engine(url, poolclass=sa.NullPool)
        with engine.begin() as db:
            quote = db.dialect.identifier_preparer.quote("key")
            db.exec_driver_sql(
                f"select * from taskguard_locks where {quote} = 'k1' for update"
            ).all()
            expected = [Renewal.RENEWED, Renewal.SKIPPED, Renewal.RENEWED]
            assert locks.renew(holds) == expected
        assert locks.renew(holds) == [Renewal.RENEWED] * 3


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the statements that are sent from here on."""
    from pymysql.connections import Connection

    sent: list[str] = []
    ask, command = Database.ask, Connection._execute_command

    def noted_ask(self: Any, statement: str, *args: Any, **options: Any) -> Any:
        sent.append(statement)
        return ask(self, statement, *args, **options)

    def noted_command(self: Any, number: int, sql: Any) -> Any:
        sent.append(str(sql)[:80])
        return command(self, number, sql)

    monkeypatch.setattr(Database, "ask", noted_ask)
    monkeypatch.setattr(Connection, "_execute_command", noted_command)
    return sent


class TestGrowth:
    """The table is in proportion to what is held, and to a day's tokens."""

    def test_without_tokens_nothing_stays(self, url: str, make_locks: Any) -> None:
        """Without tokens, as with a ledger, a release leaves no row."""
        locks = make_locks(url)
        locks.create_table()
        for number in range(5):
            owner = new_owner("m")
            take(locks, (f"k{number}", "z"), owner, with_fence=False)
            assert locks.release((f"k{number}", "z"), owner)
        assert execute(url, "select count(*) from taskguard_locks where owner <> ''") == [(0,)]
        # One release in 200 notes, in a row of no lock, that it has looked for old ones.
        kept = "select count(*) from taskguard_locks where fence = 0"
        assert execute(url, kept) == [(0,)]

    def test_tokens_stay_for_a_day(
        self, url: str, make_locks: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A purge removes free and expired rows whose token is older than a day. Held rows and
        younger ones stay."""
        # Some releases look for old rows in passing, and note that.
        monkeypatch.setattr("taskguard.lock_table.provider._RELEASES_PER_LOOK", 10**9)
        locks = make_locks(url)
        locks.create_table()
        kept, freed, dead, young = (new_owner(name) for name in ("k", "f", "d", "y"))
        take(locks, ("kept",), kept, ttl_s=86_400.0)
        take(locks, ("freed",), freed)
        locks.release(("freed",), freed)
        take(locks, ("dead",), dead)
        execute(
            url,
            "update taskguard_locks set fence = fence - 100000000000",
            "update taskguard_locks set until = until - 100000000000 where owner like '%/d'",
        )
        take(locks, ("young",), young)
        locks.release(("young",), young)
        assert locks.forget() == 2
        left = execute(url, "select count(*) from taskguard_locks")
        assert left == [(2,)]
        assert locks.renew([Hold(("kept",), kept, 30.0)]) == [Renewal.RENEWED]

    def test_in_passing(self, url: str, make_locks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """A release sometimes removes old rows, and not again shortly after."""
        monkeypatch.setattr("taskguard.lock_table.provider._RELEASES_PER_LOOK", 1)
        locks = make_locks(url)
        locks.create_table()

        def left_behind() -> int:
            take(locks, ("old",))
            execute(
                url,
                "update taskguard_locks set fence = 1, until = 1 where owner <> ''",
            )
            owner = new_owner("m")
            take(locks, KEY, owner)
            locks.release(KEY, owner)
            return int(execute(url, "select count(*) from taskguard_locks where until = 1")[0][0])

        assert left_behind() == 0
        assert left_behind() == 1


def test_a_deadlock_is_asked_again(
    url: str, make_locks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A statement that the database rolled back is repeated a few times."""
    locks = make_locks(url)
    locks.create_table()
    asked: list[None] = []
    once = locks._steps.take

    def rolled_back(*args: Any, **options: Any) -> Any:
        asked.append(None)
        if len(asked) < 3:
            raise TransactionRetryError("deadlock")
        return once(*args, **options)

    monkeypatch.setattr(locks._steps, "take", rolled_back)
    assert isinstance(take(locks), Granted)
    assert len(asked) == 3


def test_the_engine_of_the_users_own(url: str, make_locks: Any) -> None:
    """A user's Engine keeps its settings, and locks work whatever its isolation level is."""
    engine = sa.create_engine(url, isolation_level="REPEATABLE READ")
    locks = make_locks(engine)
    locks.create_table()
    owner = new_owner("m")
    assert isinstance(take(locks, ("a", "b"), owner), Granted)
    assert isinstance(take(locks, ("b",)), Held)
    assert locks.renew([Hold(("a", "b"), owner, 30.0)]) == [Renewal.RENEWED]
    assert locks.release(("a", "b"), owner)
    locks.close()
    engine.dispose()


def test_a_plain_redis_url_loads_none_of_it() -> None:
    """A process with locks on Redis loads neither SQLAlchemy nor the table's code."""
    code = (
        "import sys; from taskguard.settings import make_locks; make_locks('redis://localhost/1');"
        "print([name for name in sys.modules"
        " if name.startswith(('sqlalchemy', 'taskguard.lock_table'))])"
    )
    assert run_script(code) == "[]"
