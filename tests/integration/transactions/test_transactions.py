"""What bodies do with their transaction: all writes commit with DONE, or none do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from support.claims import request
from support.databases import DATABASES
from support.guarded_shop import GuardedShop, NotingQueue, write
from support.proxy import Mode, Proxy
from support.threads import at_once
from taskguard.errors import ConfigurationError, TransactionUsageError
from taskguard.model.claims import Claimed, MessageRef
from taskguard.run.guard import Guard

SNAPSHOTS = ["REPEATABLE READ", "SERIALIZABLE"]


@pytest.fixture(params=[*DATABASES, "engine"])
def shop(request: pytest.FixtureRequest, make_shop: Any) -> GuardedShop:
    """Return a shop on the ledger's own connections to each kind of database, and on the user's
    Engine."""
    own = request.param == "engine"
    url = request.getfixturevalue("pg_url" if own else request.param)
    return make_shop(url, sa.create_engine(url) if own else None)


@pytest.fixture
def behind_proxy(postgres: Any, pg_url: str, make_shop: Any) -> Iterator[tuple[GuardedShop, Proxy]]:
    """Return a shop whose ledger connects through the proxy."""
    with Proxy(postgres.port) as proxy:
        yield make_shop(pg_url, pg_url.replace(f":{postgres.port}/", f":{proxy.port}/")), proxy


# -- its timeouts -------------------------------------------------------------------------------


@pytest.mark.parametrize("shop", ["pg_url", "engine"], indirect=True)
def test_every_transaction_is_bounded(shop: GuardedShop) -> None:
    """Every transaction has its timeouts, also after a rollback, and after a body that set those of
    its session."""
    names = ("idle_in_transaction_session_timeout", "client_connection_check_interval")
    settings = sa.select(*(sa.func.current_setting(name) for name in names))
    found: list[Any] = []

    @shop.tg.guarded(key="order:<order>")
    def peek(order: int, guard: Guard) -> None:
        with guard.transaction() as db:
            found.append(tuple(db.execute(settings).one()))
            if order == 1:
                raise RuntimeError("rolled back")
            db.execute(sa.text("set idle_in_transaction_session_timeout = 0"))

    with pytest.raises(RuntimeError):
        peek(1)
    peek(2)
    peek(3)
    assert found == [("1min", "2s")] * 3


@pytest.mark.parametrize("url", ["pg_url", "sqlite_url"])
def test_what_stops_a_commit_leaves_nothing_to_whoever_is_next(
    request: pytest.FixtureRequest, url: str, make_shop: Any
) -> None:
    """After an interrupt before COMMIT, the connection's next transaction commits only its own
    writes."""
    url = request.getfixturevalue(url)
    engine = sa.create_engine(url, poolclass=sa.pool.QueuePool, pool_size=1, max_overflow=0)
    shop = make_shop(url, engine)
    armed: list[str] = []

    @sa.event.listens_for(engine, "commit")
    def interrupt(db: sa.Connection) -> None:
        if armed:
            raise KeyboardInterrupt(armed.pop())

    @shop.tg.guarded(key="order:<order>")
    def ship(order: int, guard: Guard) -> None:
        with guard.transaction() as db:
            write(db, str(order))
            if order == 1:
                armed.append("now")

    with pytest.raises(KeyboardInterrupt):
        ship(1)
    ship(2)
    assert shop.effects == ["2"]


def test_a_users_kind_of_cursor_stays(pg_url: str, make_shop: Any) -> None:
    """With a user's cursor class that binds values in the client, because of a pooler, nothing is
    prepared."""
    engine = sa.create_engine(pg_url, connect_args={"cursor_factory": psycopg.ClientCursor})
    shop = make_shop(pg_url, engine)

    @shop.tg.guarded(key="order:<order>")
    def ship(order: int, guard: Guard) -> None:
        with guard.transaction() as db:
            write(db, str(order))

    for order in range(8):
        ship(order)
        ship(order)
    assert len(shop.effects) == 8
    with engine.connect() as db:
        prepared = db.execute(sa.text("select count(*) from pg_prepared_statements"))
        assert prepared.scalar_one() == 0


# -- the body ends it -------------------------------------------------------------------------


def _session_rolls_back(db: Any) -> None:
    with Session(bind=db) as session:
        write(session, "s")
        session.rollback()


def _session_in_control(db: Any) -> None:
    with Session(bind=db, join_transaction_mode="control_fully") as session:
        write(session, "s")
        session.commit()


ENDS: dict[str, Callable[[Any], Any]] = {
    "commit": lambda db: db.commit(),
    "rollback": lambda db: db.rollback(),
    "close": lambda db: db.close(),
    "a Session's rollback": _session_rolls_back,
    "a Session that controls fully": _session_in_control,
    "commit of the transaction": lambda db: db.get_transaction().commit(),
    "rollback of the transaction": lambda db: db.get_transaction().rollback(),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("fails", [True, False])
def test_a_body_that_ends_its_transaction_gets_an_error(
    shop: GuardedShop, end: str, fails: bool
) -> None:
    """If a body ends its transaction, nothing of it is written, and the work can be done again."""

    @shop.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> None:
        with guard.transaction() as db:
            write(db, "before")
            ENDS[end](db)
            if end != "close":
                write(db, "after")
            if fails:
                raise ZeroDivisionError

    expected = ZeroDivisionError if fails and end == "close" else TransactionUsageError
    with pytest.raises(expected):
        ship(1)
    assert (shop.effects, shop.states) == ([], ["FAILED"])


def test_a_session_joins_the_block(shop: GuardedShop) -> None:
    """A Session on `guard.db` joins the block: an error after its commit() rolls its writes
    back."""

    @shop.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> None:
        with guard.transaction() as db:
            with Session(bind=db) as session:
                write(session)
                session.commit()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ship(1)
    assert shop.effects == []


def test_a_session_that_is_closed_leaves_what_it_wrote(shop: GuardedShop) -> None:
    """The block commits the writes of a Session that was closed without a commit."""

    @shop.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> None:
        with guard.transaction() as db:
            session = Session(bind=db)
            write(session)
            session.close()

    ship(1)
    assert (shop.effects, shop.states) == (["x"], ["DONE"])


def test_a_savepoint_may_be_rolled_back(shop: GuardedShop) -> None:
    """A savepoint can be rolled back, and the rest commits with DONE."""

    @shop.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> None:
        with guard.transaction() as db:
            write(db, "kept")
            savepoint = db.begin_nested()
            write(db, "dropped")
            savepoint.rollback()

    ship(1)
    assert (shop.effects, shop.states) == (["kept"], ["DONE"])


def test_an_sqlite_engine_that_commits_each_statement_is_refused(
    sqlite_url: str, make_shop: Any
) -> None:
    """An SQLite Engine with autocommit is refused, because effects and DONE could not commit
    together."""
    shop = make_shop(sqlite_url, sa.create_engine(sqlite_url, isolation_level="AUTOCOMMIT"))

    @shop.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> None:
        with guard.transaction() as db:
            write(db)
            raise ZeroDivisionError

    with pytest.raises(ConfigurationError):
        ship(1)
    assert shop.effects == []


# -- forks ------------------------------------------------------------------------------------


def test_a_child_that_leaves_the_block_ends_nothing(pg: GuardedShop) -> None:
    """If a forked child leaves the block, its parent's transaction goes on, and commits."""

    class ChildIsDoneError(Exception):
        pass

    @pg.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> None:
        try:
            with guard.transaction() as db:
                write(db)
                pid = os.fork()
                if pid == 0:
                    raise ChildIsDoneError
                os.waitpid(pid, 0)
        except ChildIsDoneError:
            os._exit(0)

    ship(1)
    assert (pg.effects, pg.states) == (["x"], ["DONE"])


@pytest.mark.parametrize("error", [SystemExit, ZeroDivisionError])
def test_a_child_that_unwinds_ends_nothing(pg: GuardedShop, error: type[BaseException]) -> None:
    """If a forked child leaves the body by an error, its parent's claim and lease remain."""
    me = os.getpid()

    @pg.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> None:
        pid = os.fork()
        if pid == 0:
            raise error
        os.waitpid(pid, 0)
        with guard.transaction() as db:
            write(db)

    try:
        ship(1)
    finally:
        if os.getpid() != me:
            os._exit(0)
    assert (pg.effects, pg.states) == (["x"], ["DONE"])


def test_a_child_cannot_commit_for_its_parent(pg: GuardedShop) -> None:
    """In a forked child `transaction()` raises, because it holds nothing."""

    @pg.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                with guard.transaction() as db:
                    write(db, "the child's")
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        with guard.transaction() as db:
            write(db, "the parent's")
        return 1

    assert ship(1) == 1
    assert (pg.effects, pg.states) == (["the parent's"], ["DONE"])


# -- the database says no, or nothing ---------------------------------------------------------


def test_a_checkpoint_whose_commit_got_no_answer_is_not_done_twice(
    behind_proxy: tuple[GuardedShop, Proxy],
) -> None:
    """If a checkpoint's COMMIT got no answer, PostgreSQL is asked for the transaction's outcome."""
    shop, proxy = behind_proxy
    armed = [1]

    @shop.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> None:
        if guard.progress is None:
            with guard.checkpoint(1) as db:
                write(db, "part one")
                if armed:
                    armed.clear()
                    proxy.lose_reply_to(b"COMMIT", then=Mode.CUT)
        with guard.transaction() as db:
            write(db, "part two")

    ship(1)
    assert shop.effects == ["part one", "part two"]


def test_several_keys_are_completed_again_over_a_new_connection(
    behind_proxy: tuple[GuardedShop, Proxy],
) -> None:
    """If the connection breaks in a completion of several keys, the completion is repeated, and the
    body is not."""
    shop, proxy = behind_proxy
    runs = []

    @shop.tg.guarded(key=["order:<n>", "account:<n>"])
    def ship(n: int) -> None:
        runs.append(1)
        if len(runs) == 1:
            proxy.lose_reply_to(b"UPDATE taskguard_work", then=Mode.CUT)

    ship(1)
    assert (len(runs), shop.states) == (1, ["DONE"])


def test_a_constraint_that_fails_at_commit_is_the_bodys_error(pg: GuardedShop) -> None:
    """A constraint that fails at COMMIT is the body's error: it is neither repeated nor
    deferred."""
    with pg.engine.begin() as db:
        db.execute(sa.text("create table u (id int unique deferrable initially deferred)"))
    runs, queue = [], NotingQueue()

    def body(guard: Guard) -> None:
        runs.append(1)
        with guard.transaction() as db:
            db.execute(sa.text("insert into u values (1), (1)"))

    with pytest.raises(sa.exc.IntegrityError):
        pg.deliver(body, queue)
    assert (len(runs), queue.deferrals, pg.states) == (1, [], ["FAILED"])


@pytest.mark.parametrize("level", SNAPSHOTS)
def test_duplicates_are_put_off_at_once_on_a_snapshot(
    pg_url: str, make_shop: Any, level: str
) -> None:
    """A serialization failure between duplicates is no error: they are deferred at once."""
    shop = make_shop(pg_url, sa.create_engine(pg_url, isolation_level=level))
    holder = request(work="h", message=MessageRef("h"))
    assert isinstance(shop.ledger.claim(holder), Claimed)
    outcomes: list[Any] = []

    class SlowQueue(NotingQueue):
        def publish_again(self, deferrals: int, delay_s: float) -> None:
            time.sleep(0.05)
            super().publish_again(deferrals, delay_s)

    at_once(4, lambda _: outcomes.append(shop.deliver(lambda guard: None, SlowQueue())))
