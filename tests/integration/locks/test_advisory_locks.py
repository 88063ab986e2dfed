"""Behaviour of advisory locks and GET_LOCK: one session and its end, names, poolers, findings."""

from __future__ import annotations

import contextvars
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import taskguard
from support.advisory import advisory_url, execute, kill, session_of
from support.needs import need
from support.pgbouncer import PgBouncer
from support.standby import Standby
from support.waiting import patience_s, wait_until
from taskguard.advisory_locks import AdvisoryLocks, health, names
from taskguard.doctor.locks import check_locks
from taskguard.errors import ConfigurationError, KeyBusyError, LockServerUnavailableError
from taskguard.ledger.connections.database import Database
from taskguard.locks.base import NOBODY, Granted, Held, Hold, Renewal
from taskguard.model.lease import Owner, new_owner
from taskguard.settings import make_locks
from taskguard_sandbox.servers import MariaDB, Postgres

KEY = ("order:42",)
TESTS = Path(__file__).resolve().parents[2]


@pytest.fixture(
    params=[
        "pg_url",
        pytest.param("mariadb_url", marks=pytest.mark.debian),
        pytest.param("mysql_url", marks=pytest.mark.debian),
    ]
)
def url(request: pytest.FixtureRequest) -> str:
    """Return the URL of an empty database of each kind."""
    found: str = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def make_locks_on() -> Iterator[Callable[..., AdvisoryLocks]]:
    """Make the test's providers. A server that is only slow does not lose their sessions."""
    with ExitStack() as stack:

        def make(url: str, **options: Any) -> AdvisoryLocks:
            options = {"answer_s": patience_s(), **options}
            return stack.enter_context(closing(AdvisoryLocks(advisory_url(url), **options)))

        yield make


def take(
    locks: AdvisoryLocks,
    keys: tuple[str, ...] = KEY,
    owner: Owner | None = None,
    *,
    ttl_s: float = 600.0,
) -> Granted | Held:
    return locks.acquire(keys, owner or new_owner("m"), ttl_s=ttl_s, with_fence=False, wait_s=0.0)


def found_by(locks: AdvisoryLocks) -> list[str]:
    return [each.name for each in locks.check()]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the statements of sessions from here on."""
    asked: list[str] = []
    ask = Database.ask_alone

    def noted(self: Database, lone: Any, statement: str, *args: Any, **options: Any) -> Any:
        asked.append(statement)
        return ask(self, lone, statement, *args, **options)

    monkeypatch.setattr(Database, "ask_alone", noted)
    return asked


class TestUrls:
    @pytest.mark.parametrize("kind", ["postgresql", "mariadb", "mysql"])
    def test_their_own_word(self, kind: str) -> None:
        """The provider describes itself without the driver's name, and says what it lacks."""
        locks = make_locks(f"{kind}+advisory://shop:secret@localhost/shop")
        assert isinstance(locks, AdvisoryLocks)
        assert "secret" not in repr(locks)
        traits = locks.traits
        assert (traits.session, traits.tokens, traits.owners) == (True, False, False)
        assert (traits.fair, traits.shares) == (False, False)

    def test_they_need_a_ledger(self) -> None:
        """Advisory locks need a ledger, because they have no tokens."""
        with pytest.raises(ConfigurationError, match="no fencing tokens"):
            taskguard.connect(locks="postgresql+advisory://localhost/shop", ledger=None)

    @pytest.mark.parametrize("wrong", ["sqlite:///a", "postgresql+psycopg2://localhost/shop"])
    def test_another_database(self, wrong: str) -> None:
        """Another kind of database or driver is refused."""
        with pytest.raises(ConfigurationError, match="dvisory locks"):
            AdvisoryLocks(wrong)

    def test_greenlets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Advisory locks refuse gevent, because greenlets would share one socket with the thread
        that renews."""
        monkeypatch.setattr("taskguard.advisory_locks.provider.greenlets", lambda: "gevent")
        with pytest.raises(ConfigurationError, match="do not work with gevent"):
            AdvisoryLocks("postgresql+advisory://localhost/shop")

    def test_an_engine(self, url: str) -> None:
        """A user's Engine works as well. Its own connections do not change."""
        engine = sa.create_engine(url)
        with closing(AdvisoryLocks(engine)) as locks:
            assert isinstance(take(locks), Granted)
            with engine.connect() as db:
                driver: Any = db.connection.driver_connection
                commits = driver.autocommit
                assert not (commits if isinstance(commits, bool) else driver.get_autocommit())
        engine.dispose()


class TestNames:
    def test_they_stay(self) -> None:
        """Names of locks stay over versions: otherwise two processes could hold one key."""
        assert names.number_of("order:42") == 1148132305212126298
        assert names.name_of("order:42", database="Shop") == names.name_of(
            "order:42", database="shop"
        )
        assert names.name_of("order:42", database="shop") == (
            "taskguard:2a18863ac0c2cffc988a712c90d1fb619435c73ee98e48dec24116"
        )

    def test_keys_with_one_name(
        self, pg_url: str, make_locks_on: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Keys with one lock name exclude each other. One owner may have both, and releases each by
        itself."""
        monkeypatch.setattr("taskguard.advisory_locks.postgresql.number_of", lambda key: 7)
        locks, other, owner = make_locks_on(pg_url), make_locks_on(pg_url), new_owner("m")
        assert isinstance(take(locks, ("a", "b"), owner), Granted)
        for asker in (locks, other):
            held = take(asker, ("c",))
            assert isinstance(held, Held)
            assert held.key == "c"
        assert locks.release(("a",), owner)
        assert locks.renew([Hold(("a",), owner, 30.0), Hold(("b",), owner, 30.0)]) == [
            Renewal.GONE,
            Renewal.RENEWED,
        ]
        assert isinstance(take(other, ("a",)), Held)
        assert locks.release(("b",), owner)
        assert isinstance(take(other, ("a",)), Granted)

    @pytest.mark.debian
    def test_another_database_of_the_server(self, mariadb: MariaDB, make_locks_on: Any) -> None:
        """GET_LOCK is valid for the whole server, so the database's name is part of the lock's
        name."""
        first, second = (make_locks_on(mariadb.create_database(f"db{n}")) for n in (1, 2))
        assert isinstance(take(first), Granted)
        assert isinstance(take(second), Granted)


class TestSession:
    def test_round_trips(
        self, url: str, make_locks_on: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One round trip for a lock, one for its release, none for a key that the process holds,
        and one for a thousand renewals."""
        locks, owner = make_locks_on(url), new_owner("m")
        take(locks, ("first",))
        asked = counted(monkeypatch)
        take(locks, KEY, owner)
        assert len(asked) == 1
        take(locks)
        assert len(asked) == 1
        locks.release(KEY, owner)
        assert len(asked) == 2
        holds = [Hold((f"k{n}",), new_owner("m"), 600.0) for n in range(1_000)]
        for hold in holds:
            take(locks, hold.keys, hold.owner)
        asked.clear()
        assert locks.renew(holds) == [Renewal.RENEWED] * 1_000
        assert len(asked) == 1

    def test_who_holds(self, url: str, make_locks_on: Any) -> None:
        """Only the process that holds a lock can report its holder."""
        locks, owner = make_locks_on(url), new_owner("m")
        take(locks, KEY, owner)
        mine, theirs = take(locks), take(make_locks_on(url))
        assert isinstance(mine, Held)
        assert isinstance(theirs, Held)
        assert (mine.owner, theirs.owner) == (owner, NOBODY)

    def test_killed(self, url: str, make_locks_on: Any) -> None:
        """If an administrator kills the session, its keys are free, and the next renewal
        says so."""
        locks, owner = make_locks_on(url), new_owner("m")
        take(locks, KEY, owner)
        kill(url, session_of(locks))
        assert isinstance(take(make_locks_on(url), ("another",)), Granted)
        assert locks.renew([Hold(KEY, owner, 30.0)]) == [Renewal.GONE]
        assert isinstance(take(locks, KEY, owner), Granted)

    def test_released_after_it_was_killed(self, url: str, make_locks_on: Any) -> None:
        """If the session was killed, a release leaves the next holder's lock alone."""
        locks, other, owner, heir = *map(make_locks_on, (url, url)), new_owner("m"), new_owner("n")
        take(locks, KEY, owner)
        kill(url, session_of(locks))
        assert isinstance(take(other, KEY, heir), Granted)
        assert locks.release(KEY, owner) is True  # the provider cannot know better
        assert other.renew([Hold(KEY, heir, 30.0)]) == [Renewal.RENEWED]
        assert isinstance(take(locks), Held)

    def test_interrupted(
        self, url: str, make_locks_on: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A lock that was granted, but not yet noted when an interrupt came, is released."""
        locks, owner = make_locks_on(url), new_owner("m")
        take(locks, ("another",), owner)
        ask = Database.ask_alone

        def interrupted(*args: Any, **options: Any) -> Any:
            ask(*args, **options)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(Database, "ask_alone", interrupted)
            with pytest.raises(KeyboardInterrupt):
                take(locks)
        other = make_locks_on(url)
        wait_until(lambda: isinstance(take(other), Granted))
        assert locks.renew([Hold(("another",), owner, 30.0)]) == [Renewal.GONE]

    def test_a_fork(self, url: str, make_locks_on: Any) -> None:
        """A child has a session of its own. It leaves its parent's session open, even if it closes
        its provider."""
        locks, owner = make_locks_on(url), new_owner("m")
        take(locks, KEY, owner)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                taken = isinstance(take(locks), Held)
                knows = locks.renew([Hold(KEY, owner, 30.0)]) == [Renewal.RENEWED]
                own = isinstance(take(locks, ("other",)), Granted)
                locks.close()
                gc.collect()
                status = 0 if (taken, knows, own) == (True, False, True) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert locks.renew([Hold(KEY, owner, 30.0)]) == [Renewal.RENEWED]
        assert isinstance(take(make_locks_on(url)), Held)


# Holds a key and prints that. After a line of input, it prints whether it still holds the key.
_HOLDER = """\
import sys
from taskguard.advisory_locks import AdvisoryLocks, health
from taskguard.model.lease import new_owner
from taskguard.locks.base import Hold
locks, owner = AdvisoryLocks(sys.argv[1]), new_owner("m")
locks.acquire(("order:42",), owner, ttl_s=float(sys.argv[2]), with_fence=False, wait_s=0.0)
print("holds", flush=True)
sys.stdin.readline()
print(locks.renew([Hold(("order:42",), owner, 30.0)]), flush=True)
"""


@contextmanager
def holder(url: str, *, ttl_s: float) -> Iterator[subprocess.Popen[str]]:
    """Start another process that holds the key."""
    command = [sys.executable, "-c", _HOLDER, advisory_url(url), str(ttl_s)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        try:
            yield process
        finally:
            process.kill()


class TestDeadHolder:
    def test_killed(self, url: str, make_locks_on: Any) -> None:
        """The key of a killed process is free at once, however long its lease was."""
        locks = make_locks_on(url)
        with holder(url, ttl_s=600.0) as process:
            assert isinstance(take(locks), Held)
            process.kill()
            wait_until(lambda: isinstance(take(locks), Granted))

    def test_frozen(self, url: str, make_locks_on: Any) -> None:
        """The server ends the session of a frozen process, which learns that when it wakes. Its
        kernel still answers keep-alive probes."""
        locks = make_locks_on(url)
        take(locks, ("another",))  # so that it is connected
        with holder(url, ttl_s=5.0) as process:
            assert isinstance(take(locks), Held)
            process.send_signal(signal.SIGSTOP)
            wait_until(lambda: isinstance(take(locks), Granted))
            process.send_signal(signal.SIGCONT)
            out, _ = process.communicate("\n", timeout=patience_s())
            assert out == "['taken']\n"


class TestFindings:
    def test_nothing(self, url: str, make_locks_on: Any) -> None:
        """The check takes and releases a lock, and has no finding."""
        locks = make_locks_on(url)
        assert found_by(locks) == []
        assert check_locks(locks, (), has_ledger=True) == ([], True)

    def test_pooled(self, postgres: Postgres, pg_url: str, make_locks_on: Any) -> None:
        """Behind PgBouncer no lock is granted, because it would belong to the pooler's session."""
        need(PgBouncer)
        with PgBouncer(postgres.port) as pooler:
            locks = make_locks_on(pooler.url_of(str(sa.make_url(pg_url).database)))
            assert found_by(locks) == ["advisory_pooled"]
            with pytest.raises(LockServerUnavailableError, match="a pooler is in front"):
                take(locks)

    def test_a_standby(self, postgres: Postgres, make_locks_on: Any) -> None:
        """A standby is refused, because it would grant locks that its primary grants, too."""
        with Standby(postgres) as standby:
            locks = make_locks_on(standby.url)
            assert found_by(locks) == ["advisory_replica"]
            with pytest.raises(LockServerUnavailableError, match="it is a replica"):
                take(locks)

    @pytest.mark.debian
    def test_a_server_that_becomes_read_only(self, make_locks_on: Any) -> None:
        """If a server becomes read-only, as at a switch-over, its granted locks end, and it grants
        no more."""
        need(MariaDB)
        with MariaDB() as server:
            url = server.create_database("shop")
            locks, owner = make_locks_on(url), new_owner("m")
            take(locks, KEY, owner)
            execute(url, "set global read_only = 1")
            with pytest.raises(LockServerUnavailableError, match="it is a replica"):
                locks.renew([Hold(KEY, owner, 30.0)])
            assert found_by(locks) == ["advisory_replica"]
            execute(url, "set global read_only = 0")
            assert locks.renew([Hold(KEY, owner, 30.0)]) == [Renewal.GONE]

    @pytest.mark.debian
    def test_galera(
        self, mariadb_url: str, make_locks_on: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A node of a Galera cluster has `wsrep_on`. This server has no cluster, and the test sets
        the answer."""
        monkeypatch.setattr(health, "_IN_GALERA", "select 'wsrep_on', 'ON'")
        assert found_by(make_locks_on(mariadb_url)) == ["advisory_galera"]


def test_done_before_its_body_has_ended(pg_url: str, make_locks_on: Any) -> None:
    """A duplicate is not answered before the body has ended, because its result may still come."""
    apps = [taskguard.connect(locks=make_locks_on(pg_url), ledger=pg_url) for _ in range(2)]
    apps[0].ledger.create_schema()
    duplicate = apps[1].guarded(key="order:<order>", work="ship")(lambda order: "twice")

    @apps[0].guarded(key="order:<order>", work="ship")
    def ship(order: int, guard: taskguard.Guard) -> str:
        with guard.transaction():
            pass
        with pytest.raises(KeyBusyError):
            contextvars.Context().run(duplicate, order)  # as another process would
        return "once"

    assert ship(1) == "once"
    assert duplicate(1) == "once"
    for app in apps:
        app.close()
