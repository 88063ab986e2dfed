"""Bodies that need a second connection within their transaction, as many at once as possible."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa

from support.guarded_shop import GuardedShop, write
from support.waiting import patience_s, wait_until
from taskguard.errors import LedgerUnavailableError
from taskguard.ledger.connections import pools
from taskguard.model.delivery import Deferred
from taskguard.run.guard import Guard

SERVERS = ["pg_url", "mariadb_url", "mysql_url"]
MANY = 80
MAKE_ENGINES: dict[str, Callable[[str], Any]] = {
    "url": str,
    "pool of one": lambda url: sa.create_engine(url, pool_size=1, max_overflow=0, pool_timeout=60),
    "pool of one, with options": lambda url: sa.create_engine(
        url, pool_size=1, max_overflow=0, pool_timeout=60
    ).execution_options(compiled_cache=None),
    "no pool": lambda url: sa.create_engine(url, poolclass=sa.pool.NullPool),
}


@pytest.fixture(params=SERVERS)
def server_url(request: pytest.FixtureRequest) -> str:
    """Return the URL of an empty database with more than one writer."""
    return str(request.getfixturevalue(request.param))


def in_threads(count: int, function: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(function, range(count)))


class Crowd:
    """Bodies that go on within their transactions when as many as possible have one."""

    def __init__(self, expected: int) -> None:
        self.inside = 0
        self._expected = expected
        self._mutex = threading.Lock()
        self._full = threading.Event()

    def wait(self) -> None:
        with self._mutex:
            self.inside += 1
            if self.inside >= self._expected:
                self._full.set()
        assert self._full.wait(patience_s()), self.inside


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """Limit how many bodies of a process have a transaction to fewer than its threads."""
    monkeypatch.setattr(pools, "_MOST_OF_BODIES", 12)
    return 12


@pytest.mark.parametrize("inner", ["plain", "transaction"])
def test_bodies_cannot_use_up_what_those_within_them_need(
    pg: GuardedShop, few: int, inner: str
) -> None:
    """A body with a transaction can always run another guarded body within it."""
    crowd = Crowd(few)

    @pg.tg.guarded(key="inner:<n>")
    def within(n: int, guard: Guard) -> None:
        if inner == "transaction":
            with guard.transaction() as db:
                write(db, "inner")

    @pg.tg.guarded(key="outer:<n>")
    def outer(n: int, guard: Guard) -> None:
        with guard.transaction() as db:
            write(db, "outer")
            crowd.wait()
            within(n)

    in_threads(24, outer)
    assert pg.effects.count("outer") == 24
    assert pg.effects.count("inner") == (24 if inner == "transaction" else 0)
    assert set(pg.states) == {"DONE"}


def test_eighty_threads_take_locks_within_their_transactions(pg: GuardedShop) -> None:
    """50 of eighty threads have a transaction at a time, and all of them get a lock within it."""
    crowd = Crowd(50)

    @pg.tg.guarded(key="outer:<n>")
    def outer(n: int, guard: Guard) -> None:
        with guard.transaction() as db:
            write(db, "outer")
            crowd.wait()
            with pg.tg.lock(f"lock:{n}"):
                pass

    in_threads(MANY, outer)
    assert pg.effects.count("outer") == MANY
    assert set(pg.states) == {"DONE"}


@pytest.mark.parametrize("kind", MAKE_ENGINES)
def test_a_lock_and_a_body_within_a_transaction_on_any_engine(
    server_url: str, make_shop: Any, kind: str
) -> None:
    """Within a transaction, a body can take a lock and run another body, even if the user's Engine
    has one connection."""
    shop = make_shop(server_url, MAKE_ENGINES[kind](server_url))

    @shop.tg.guarded(key="innermost:<n>")
    def innermost(n: int, guard: Guard) -> str:
        with guard.transaction() as db:
            write(db, "innermost")
        return "innermost"

    @shop.tg.guarded(key="inner:<n>")
    def within(n: int, guard: Guard) -> str:
        with guard.transaction() as db:
            write(db, "inner")
            return innermost(n)

    @shop.tg.guarded(key="plain:<n>")
    def plain(n: int) -> str:
        return "plain"

    @shop.tg.guarded(key="outer:<n>")
    def outer(n: int, guard: Guard) -> tuple[str, str]:
        with guard.transaction() as db:
            write(db, "outer")
            with shop.tg.lock(f"lock:{n}") as lease:
                lease.check()
                return within(n), plain(n)

    assert in_threads(4, outer) == [("innermost", "plain")] * 4
    assert sorted(set(shop.effects)) == ["inner", "innermost", "outer"]
    assert len(shop.effects) == 12
    assert set(shop.states) == {"DONE"}


def test_the_user_may_have_the_only_connection_of_the_engine(pg_url: str, make_shop: Any) -> None:
    """A handler that has the Engine's only connection can take a lock, and call a body without a
    transaction."""
    engine = sa.create_engine(pg_url, pool_size=1, max_overflow=0, pool_timeout=60)
    shop = make_shop(pg_url, engine)

    @shop.tg.guarded(key="plain:<n>")
    def plain(n: int) -> str:
        return "plain"

    with engine.begin() as db:
        write(db, "mine")
        with shop.tg.lock("order:1"):
            assert plain(1) == "plain"
    assert shop.effects == ["mine"]


def connections(shop: GuardedShop) -> int:
    """To the shop's database, but the one that asks, and the server's own (autovacuum)."""
    with shop.engine.connect() as db:
        count = db.exec_driver_sql(
            "select count(*) from pg_stat_activity where datname = current_database() "
            "and backend_type = 'client backend' and pid <> pg_backend_pid()"
        ).scalar_one()
    return int(count)


def test_connections_are_bounded(pg: GuardedShop, few: int) -> None:
    """There are at most `few` connections for bodies, 10 for nested bodies, 20 for the ledger, and
    one for renewals."""
    most = [0]
    crowd = Crowd(few)

    @pg.tg.guarded(key="inner:<n>")
    def within(n: int, guard: Guard) -> None:
        with guard.transaction():
            most[0] = max(most[0], connections(pg))

    @pg.tg.guarded(key="outer:<n>")
    def outer(n: int, guard: Guard) -> None:
        with guard.transaction():
            crowd.wait()
            within(n)

    in_threads(40, outer)
    # Threads that ask have connections of their own: at most fifteen.
    assert few < most[0] <= few + 10 + 20 + 1 + 15


def test_one_body_after_the_other_needs_one_connection(pg_url: str, make_shop: Any) -> None:
    """A process that runs one body after the other uses one connection."""
    shop = make_shop(pg_url)

    @shop.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> str:
        with guard.transaction() as db:
            write(db)
        return "stored later"

    for n in range(3):
        ship(n)
    shop.ledger.close()  # what made the tables
    wait_until(lambda: connections(shop) == 0)
    for n in range(3, 6):
        ship(n)
    assert connections(shop) == 1


def test_a_small_engine_of_the_users_stays_small(pg_url: str, make_shop: Any) -> None:
    """A small Engine of the user's gets as many connections again for the ledger, and one for
    nested bodies."""
    engine = sa.create_engine(pg_url, pool_size=1, max_overflow=0, pool_timeout=60)
    shop = make_shop(pg_url, engine)
    most: list[int] = []

    @shop.tg.guarded(key="inner:<n>")
    def within(n: int, guard: Guard) -> None:
        with guard.transaction():
            most.append(connections(shop))

    @shop.tg.guarded(key="outer:<n>")
    def outer(n: int, guard: Guard) -> None:
        with guard.transaction():
            within(n)

    in_threads(8, outer)
    assert max(most) == 3
    engine.dispose()
    wait_until(lambda: connections(shop) == 0)


def test_a_call_without_a_connection_fails_soon_and_once(
    pg: GuardedShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delivery without a free connection is deferred, however often. It does not count as a
    failure."""
    monkeypatch.setattr(pools, "_LONGEST_WAIT_S", 0.1)
    monkeypatch.setattr(pools, "_MOST_OF_BODIES", 1)
    asked: list[float | None] = []

    class Noting(queue.SimpleQueue):  # type: ignore[type-arg]
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            try:
                return super().get(block, timeout)
            except queue.Empty:
                asked.append(timeout)
                raise

    monkeypatch.setattr(queue, "SimpleQueue", Noting)

    def body(guard: Guard) -> None:
        with guard.transaction() as db:
            write(db)

    share = pg.ledger._database.pools.of_body(0)
    with share:
        for deferrals in range(6):
            assert isinstance(pg.deliver(body, deferrals=deferrals), Deferred)
            assert pg.states == ["NEW"]
        assert asked == [0.1] * 6
        with pytest.raises(LedgerUnavailableError, match="fewer threads or greenlets"):
            pg.tg.guarded(key="order:2")(body)()
    pg.deliver(body, deferrals=6)
    assert pg.effects == ["x"]


def test_a_users_pool_that_is_used_up_is_asked_once(server_url: str, make_shop: Any) -> None:
    """A user's full pool is waited for once, not twice."""
    engine = sa.create_engine(server_url, pool_size=1, max_overflow=0, pool_timeout=0.1)
    shop = make_shop(server_url, engine)
    waited = []
    connect = engine.pool.connect
    engine.pool.connect = lambda: waited.append(1) or connect()  # type: ignore[func-returns-value,method-assign]

    @shop.tg.guarded(key="order:1")
    def body(guard: Guard) -> None:
        with guard.transaction():
            pass

    with engine.connect():
        waited.clear()
        with pytest.raises(LedgerUnavailableError, match="No connection to"):
            body()
    assert len(waited) == 1
    body()


def test_a_forked_child_has_connections_of_its_own(pg_url: str, make_shop: Any) -> None:
    """A child that is forked within a body's transaction has connections of its own."""
    shop = make_shop(pg_url, sa.create_engine(pg_url, pool_size=1, max_overflow=0))

    @shop.tg.guarded(key="inner:<n>")
    def within(n: int, guard: Guard) -> None:
        with guard.transaction() as db:
            write(db, f"inner {n}")

    @shop.tg.guarded(key="outer:<n>")
    def outer(n: int, guard: Guard) -> None:
        with guard.transaction() as db:
            within(1)
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    within(2)
                    within(3)
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitpid(child, 0)[1] == 0
            within(4)
            write(db, "outer")

    outer(1)
    assert shop.effects == ["inner 1", "inner 2", "inner 3", "inner 4", "outer"]


GREENLETS = """
    from gevent import monkey; monkey.patch_all()
    import sys
    import gevent
    import sqlalchemy as sa
    import taskguard

    tg = taskguard.connect(locks=None, ledger=sys.argv[1])

    @tg.guarded(key="inner:<n>")
    def within(n, guard):
        with guard.transaction() as db:
            db.execute(sa.text("insert into effects values ('inner')"))

    @tg.guarded(key="outer:<n>")
    def outer(n, guard):
        with guard.transaction() as db:
            db.execute(sa.text("insert into effects values ('outer')"))
            gevent.sleep(0.2)
            with tg.lock(f"lock:{n}"):
                within(n)

    gevent.joinall([gevent.spawn(outer, n) for n in range(80)], raise_error=True)
"""


def test_eighty_greenlets(pg: GuardedShop, pg_url: str) -> None:
    """Eighty greenlets all have their effect."""
    pytest.importorskip("gevent")
    script = [sys.executable, "-c", textwrap.dedent(GREENLETS), pg_url]
    done = subprocess.run(script, capture_output=True, text=True, timeout=patience_s(), check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (pg.effects.count("outer"), pg.effects.count("inner")) == (MANY, MANY)
    assert set(pg.states) == {"DONE"}
