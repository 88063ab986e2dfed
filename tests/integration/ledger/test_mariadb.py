"""The ledger on MariaDB and MySQL: behaviour that the contract suite does not cover."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pymysql
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from support.claims import request
from support.guarded_shop import GuardedShop, write
from support.proxy import Mode, Proxy
from support.threads import at_once
from support.waiting import patience_s, wait_until
from taskguard.errors import (
    CallTooLargeError,
    ConfigurationError,
    LedgerUnavailableError,
    StaleTokenError,
    TransactionRetryError,
    TransactionUsageError,
)
from taskguard.ledger.connections import taken
from taskguard.ledger.connections.errors import CannotWriteError
from taskguard.ledger.sql import SqlLedger
from taskguard.ledger.tables import KEYS, METADATA, WORK
from taskguard.locks.base import Renewal
from taskguard.model.claims import Busy, Claimed, MessageRef
from taskguard.model.states import State
from taskguard.run.encoding import MAX_RESULT_BYTES
from taskguard.run.guard import Guard
from taskguard_sandbox.servers import MariaDB

pytestmark = pytest.mark.debian


def claim(ledger: SqlLedger, number: int = 1, **values: Any) -> Claimed:
    found = ledger.claim(request(number, **values))
    assert isinstance(found, Claimed), found
    return found


@pytest.fixture(params=[False, True], ids=["url", "engine"])
def own(request: pytest.FixtureRequest) -> bool:
    """Return whether the Engine is the user's."""
    return bool(request.param)


@pytest.fixture(params=["mariadb_url", "mysql_url"])
def url(request: pytest.FixtureRequest) -> str:
    """Return the URL of an empty database of each kind."""
    return str(request.getfixturevalue(request.param))


@pytest.fixture
def server(request: pytest.FixtureRequest, url: str) -> Any:
    """Return the server of the database."""
    return request.getfixturevalue(sa.make_url(url).get_backend_name())


@pytest.fixture(params=["url", "engine"])
def shop(
    request: pytest.FixtureRequest, url: str, make_shop: Callable[..., GuardedShop]
) -> GuardedShop:
    """On the ledger's own connections, and on the user's Engine as MariaDB makes it."""
    return make_shop(url, sa.create_engine(url) if request.param == "engine" else None)


def as_mysql(url: str) -> str:
    return url.replace("mariadb+", "mysql+")


# -- tables and sessions ----------------------------------------------------------------------


@pytest.mark.parametrize("spelling", [str, as_mysql])
def test_two_create_the_tables_at_once(url: str, spelling: Any) -> None:
    """Several processes can create the tables at once, with either spelling of the URL. All tables
    are InnoDB's."""
    ledgers = [SqlLedger(spelling(url)) for _ in range(8)]

    def create(number: int) -> None:
        ledgers[number].create_schema()
        ledgers[number].check_schema()

    at_once(8, create)
    engine = sa.create_engine(url)
    with engine.connect() as db:
        tables = sa.text(
            "select engine from information_schema.tables where table_schema = database()"
        )
        assert list(db.execute(tables).scalars()) == ["InnoDB"] * len(METADATA.tables)
    engine.dispose()
    for ledger in ledgers:
        ledger.close()


def test_sessions_are_strict_and_lock_no_gaps(server: Any, url: str) -> None:
    """Whatever the server's settings, sessions are strict, lock no gaps, and read all requested
    rows."""
    mode = server.execute("select @@global.sql_mode")[0][0]
    server.execute("set global sql_mode = ''")
    server.execute("set global sql_select_limit = 1")
    try:
        ledger = SqlLedger(url)
        ledger.create_schema()
        with ledger.transaction(claim(ledger, keys=("order:1", "order:2")).claim) as tx:
            assert "STRICT_TRANS_TABLES" in tx.db.scalar(sa.text("select @@sql_mode"))
            assert tx.db.get_isolation_level() == "READ COMMITTED"
            if server.name == "MariaDB":  # MySQL ends no transaction that idles
                assert tx.db.scalar(sa.text("select @@idle_transaction_timeout")) == 60
        ledger.close()
    finally:
        server.execute(f"set global sql_mode = '{mode}'")
        server.execute("set global sql_select_limit = default")


def test_the_longest_result_is_stored_whole(shop: GuardedShop) -> None:
    """A TEXT column ends at 64 kB, and cuts off what is longer unless the session is strict."""
    text = "🙂" * ((MAX_RESULT_BYTES - 2) // 4)

    @shop.tg.guarded(key="order:<n>")
    def ship(n: int) -> str:
        return text

    assert ship(1) == text
    assert ship(1) == text


def test_a_work_that_is_too_long_is_refused_whole(shop: GuardedShop) -> None:
    """A work id that is too long is refused. Cutting it off would make one work of two."""
    for last in "ab":
        with pytest.raises(DBAPIError, match="too long"):
            shop.ledger.claim(request(work="w" * 768 + last))
    assert isinstance(shop.ledger.claim(request(work="é" * 768)), Claimed)


def test_sessions_of_the_users_engine_stay_as_they_are(server: Any, url: str) -> None:
    """Isolation level, lock timeout and idle timeout of the user's pool do not change."""
    engine = sa.create_engine(url, pool_size=1, max_overflow=0)
    names = "connection_id(), @@innodb_lock_wait_timeout, @@sql_mode"
    if server.name == "MariaDB":
        names += ", @@idle_transaction_timeout"
    settings = sa.text(f"select {names}")
    with engine.connect() as db:
        before = db.execute(settings).one(), db.get_isolation_level()
    ledger = SqlLedger(engine)
    ledger.create_schema()
    ledger.complete_alone(claim(ledger).claim, None)
    assert ledger.defer(request(2), lambda deferrals: None)
    with engine.connect() as db:
        assert (db.execute(settings).one(), db.get_isolation_level()) == before
    engine.dispose()


def asked(server: MariaDB, do: Callable[[], object]) -> list[str]:
    """Return the statements that the server got meanwhile, from sessions that it knew before."""
    sessions = {row[0] for row in server.execute("select id from information_schema.processlist")}
    server.execute("set global log_output = 'TABLE'")
    server.execute("truncate mysql.general_log")
    server.execute("set global general_log = 1")
    try:
        do()
    finally:
        server.execute("set global general_log = 0")
    log = "select thread_id, argument from mysql.general_log where command_type = 'Query'"
    rows = server.execute(f"{log} order by event_time")
    return [text for session, text in rows if session in sessions]


def test_a_claim_and_a_completion_ask_few_questions(mariadb: MariaDB, mariadb_url: str) -> None:
    """A claim and a completion take one statement each, prepared from the third on, without a
    ROLLBACK of the pool's.

    A body's transaction begins with a savepoint and a read of the claim, and ends in two
    statements.
    """
    ledger = SqlLedger(mariadb_url)
    ledger.create_schema()
    for number in range(2):  # by then its sessions are set, and have prepared repeated statements
        ledger.complete_alone(claim(ledger, number).claim, None)
    claims: list[Claimed] = []
    claiming = asked(mariadb, lambda: claims.append(claim(ledger, 2)))
    completing = asked(mariadb, lambda: ledger.complete_alone(claims[0].claim, None))
    answering = asked(mariadb, lambda: ledger.claim(request(2)))
    for questions in (claiming, completing, answering):
        # The server's log shows executed statements in addition to the requests.
        assert {first_word(each) for each in questions} <= {"execute", "begin"}
        assert [first_word(each) for each in questions].count("execute") == 1

    def transaction() -> None:
        with ledger.transaction(claims[1].claim) as tx:
            tx.complete_in_block(claims[1].claim, None)

    for number in (3, 4):
        claims[1:] = [claim(ledger, number)]
        ending = asked(mariadb, transaction)
    assert [first_word(each) for each in ending] == ["savepoint", "select", "begin", "commit"]
    ledger.close()


def test_a_session_that_forgot_what_was_prepared_is_asked_in_full(
    mariadb: MariaDB, mariadb_url: str
) -> None:
    """Behind a proxy that shares sessions, an unknown prepared statement is sent once more
    in full."""
    ledger = SqlLedger(mariadb_url)
    ledger.create_schema()
    for number in range(2):
        ledger.complete_alone(claim(ledger, number).claim, None)
    with ledger._database.pools.ledgers as engine:
        raw = engine.raw_connection()
        with raw.cursor() as cursor:
            for statement in raw.info["taskguard_prepared"]:
                cursor.execute(f"deallocate prepare {statement.split()[1]}")
        raw.close()
    claims: list[Claimed] = []
    claiming = asked(mariadb, lambda: claims.append(claim(ledger, 2)))
    assert "begin" in map(first_word, claiming)
    completing = asked(mariadb, lambda: ledger.complete_alone(claims[0].claim, None))
    assert list(map(first_word, completing)) == ["begin"]  # no longer by name
    view = ledger.view("ship order:2")
    assert view is not None
    assert (view.state.value, view.attempts) == ("DONE", 1)
    ledger.close()


def test_a_server_that_prepares_nothing_more_is_asked_in_full(
    server: Any, mariadb_url: str
) -> None:
    """If `max_prepared_stmt_count`, which all clients share, is reached, statements are sent in
    full."""
    server.execute("set global max_prepared_stmt_count = 0")
    try:
        ledger = SqlLedger(mariadb_url)
        ledger.create_schema()
        for number in range(4):
            ledger.complete_alone(claim(ledger, number).claim, None)
            view = ledger.view(f"ship order:{number}")
            assert view is not None
            assert (view.state.value, view.attempts) == ("DONE", 1)
        ledger.close()
    finally:
        server.execute("set global max_prepared_stmt_count = 16382")


def first_word(question: str) -> str:
    return question.split(maxsplit=1)[0].lower()


def test_a_completion_locks_the_key_before_the_work(url: str) -> None:
    """A completion locks the key first, as claims do. In the other order the two would deadlock."""
    ledger = SqlLedger(url)
    ledger.create_schema()
    claimed = claim(ledger).claim
    engine = sa.create_engine(url)
    key = sa.select(KEYS.c.key).with_for_update(skip_locked=True)

    def key_is_locked() -> bool:
        with engine.connect() as db:
            return db.execute(key).first() is None

    thread = threading.Thread(target=lambda: ledger.complete_alone(claimed, None))
    with engine.begin() as db:
        db.execute(sa.select(WORK).with_for_update())
        thread.start()
        wait_until(key_is_locked)
    thread.join()
    view = ledger.view("ship order:1")
    assert view is not None
    assert view.state is State.DONE
    engine.dispose()
    ledger.close()


def test_bodies_wait_for_locks_as_the_server_says(url: str) -> None:
    """Bodies have the server's lock timeout, because no body gets a session of claims."""
    ledger = SqlLedger(url)
    ledger.create_schema()
    engine = sa.create_engine(url)
    limit = sa.text("select @@innodb_lock_wait_timeout")
    with engine.connect() as db:
        servers = db.execute(limit).scalar()
    engine.dispose()
    assert servers != 1
    for number in range(3):
        message = MessageRef(f"m{number}")
        claimed = claim(ledger, number, message=message)
        assert ledger.renew([claimed.claim]) == [Renewal.RENEWED]
        assert ledger.defer(request(number, message=message), lambda deferrals: None)
        with ledger.transaction(claimed.claim) as tx:
            assert tx.db.execute(limit).scalar() == servers
            tx.complete_in_block(claimed.claim, None)
    ledger.close()


def test_a_connection_that_goes_back_has_no_transaction(url: str) -> None:
    """After a successful COMMIT a connection is not rolled back. After everything else it is."""
    ledger = SqlLedger(url)
    ledger.create_schema()
    claim(ledger)
    other = sa.create_engine(url)
    free = sa.select(KEYS.c.key).with_for_update(nowait=True)
    lock = sa.select(KEYS.c.key).with_for_update()
    engine = ledger._database.engine

    def is_free() -> bool:
        with other.connect() as db:
            return db.execute(free).scalar() == "order:1"

    raw = engine.raw_connection()
    raw.cursor().execute("select * from taskguard_keys for update")
    raw.close()
    assert is_free()
    db = engine.connect()
    db.execute(lock)
    del db  # without closing it
    gc.collect()
    assert is_free()
    with engine.connect() as db:
        db.execute(lock)
        db.commit()
        db.execute(lock)
    assert is_free()
    other.dispose()
    ledger.close()


def test_a_connection_that_counts_changed_rows_is_refused(server: Any, url: str) -> None:
    """A user's `creator` that counts changed rows is refused: storing the same progress again would
    look stale."""
    name = sa.make_url(url).database

    def connect() -> Any:
        return pymysql.connect(host="127.0.0.1", port=server.port, user="root", database=name)

    SqlLedger(url).create_schema()
    engine = sa.create_engine(sa.make_url(url).set(database=""), creator=connect)
    with pytest.raises(ConfigurationError, match="FOUND_ROWS"):
        SqlLedger(engine).claim(request())
    engine.dispose()


def test_an_engine_that_commits_each_statement_is_refused(url: str) -> None:
    """A user's Engine with AUTOCOMMIT is refused, because its claims would hold no locks."""
    SqlLedger(url).create_schema()
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        SqlLedger(engine).claim(request())
    engine.dispose()


def test_the_clock_is_the_servers_in_utc_and_after_all_waiting(url: str) -> None:
    """A claim that waited has its whole lease. A session's time zone changes nothing."""
    ledger = SqlLedger(url, lock_timeout_s=10.0)
    ledger.create_schema()
    engine = sa.create_engine(url)
    ledger.give_back(claim(ledger).claim)
    answers: list[Any] = []
    waiter = threading.Thread(target=lambda: answers.append(ledger.claim(request(ttl_s=30.0))))
    with engine.begin() as db:
        db.execute(sa.update(KEYS).values(fence=KEYS.c.fence))
        waiter.start()
        clock = sa.text("select cast(unix_timestamp(sysdate(6)) * 1000000 as signed)")
        db.execute(sa.text("select sleep(1.0)"))
        began_us = db.execute(clock).scalar_one()
    waiter.join()
    assert isinstance(answers[0], Claimed)
    with engine.connect() as db:
        assert db.execute(sa.select(KEYS.c.lease_until)).scalar_one() >= began_us + 30_000_000
    engine.dispose()
    ledger.close()
    zoned = sa.create_engine(url, connect_args={"init_command": "set time_zone = '-11:00'"})
    far = SqlLedger(zoned)
    far.give_back(answers[0].claim)
    claimed = claim(far, 2)
    view = far.view("ship order:2")
    assert view is not None
    assert view.started_s is not None
    assert abs(view.started_s * 1e6 - began_us) < 600e6
    assert claimed.claim.fence / 1e6 == pytest.approx(view.started_s)
    zoned.dispose()


# -- errors -----------------------------------------------------------------------------------


def test_a_server_that_became_read_only_cannot_write(server: Any, url: str) -> None:
    """On a server that became read-only, deliveries are deferred, and do not fail."""
    ledger = SqlLedger(url)
    ledger.create_schema()
    name = "tx_read_only" if server.name == "MariaDB" else "transaction_read_only"
    engine = sa.create_engine(url, connect_args={"init_command": f"set {name} = 1"})
    with pytest.raises(CannotWriteError):
        SqlLedger(engine).claim(request())
    engine.dispose()
    ledger.close()


def test_a_locked_key_is_busy_and_locked_work_is_reported(url: str) -> None:
    """Error 1205 rolls back one statement only. The claim rolls back the rest, so it leaves
    nothing."""
    ledger = SqlLedger(url, lock_timeout_s=0.1)
    ledger.create_schema()
    held = claim(ledger)
    ledger.give_back(held.claim)
    engine = sa.create_engine(url)
    with engine.begin() as db:
        db.exec_driver_sql("select * from taskguard_work for update")
        assert ledger.claim(request()) == Busy(None, None, same_work=False, started=True)
        # The key's row was locked first, and is free again.
        fence = sa.select(KEYS.c.fence).with_for_update(nowait=True)
        assert db.execute(fence).scalar_one() == held.claim.fence
    assert claim(ledger).claim.fence > held.claim.fence
    engine.dispose()
    ledger.close()


def test_a_lock_that_a_body_is_not_given_runs_it_again(shop: GuardedShop) -> None:
    """If a body gets no lock, it runs again. Its earlier writes are rolled back, although the
    server undid one statement only."""
    with shop.engine.begin() as db:
        db.execute(sa.text("create table goods (id int primary key)"))
        db.execute(sa.text("insert into goods values (1)"))
    attempts: list[int] = []
    locker = shop.engine.connect()
    locker.execute(sa.text("select * from goods for update"))

    @shop.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> None:
        attempts.append(n)
        with guard.transaction() as db:
            write(db)
            if len(attempts) > 1:
                locker.rollback()
            db.execute(sa.text("set innodb_lock_wait_timeout = 1"))
            db.execute(sa.text("update goods set id = 2"))

    ship(1)
    locker.close()
    assert (len(attempts), len(shop.effects), shop.states) == (2, 1, ["DONE"])


@pytest.mark.parametrize("nested", [False, True])
def test_a_deadlock_runs_the_body_again(shop: GuardedShop, nested: bool) -> None:
    """Two bodies that deadlock, in a savepoint or not, each have their effect once."""
    with shop.engine.begin() as db:
        db.execute(sa.text("create table goods (id int primary key, n int)"))
        db.execute(sa.text("insert into goods values (1, 0), (2, 0)"))
    barrier = threading.Barrier(2)
    attempts: list[int] = []
    update = sa.text("update goods set n = n + 1 where id = :id")

    @shop.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> None:
        attempts.append(n)
        with guard.transaction() as db:
            write(db, str(n))
            db.execute(update, {"id": n})
            if attempts.count(n) == 1:
                barrier.wait(patience_s())
            if nested:
                with db.begin_nested():
                    db.execute(update, {"id": 3 - n})
            else:
                db.execute(update, {"id": 3 - n})

    at_once(2, lambda number: ship(number + 1))
    assert len(attempts) > 2
    assert sorted(shop.effects) == ["1", "2"]
    with shop.engine.connect() as db:
        assert list(db.execute(sa.text("select n from goods")).scalars()) == [2, 2]


def test_a_body_that_swallows_a_deadlock_is_run_again(shop: GuardedShop) -> None:
    """A body that catches a deadlock runs again. The server has rolled it back, and would commit
    later writes by themselves."""
    with shop.engine.begin() as db:
        db.execute(sa.text("create table goods (id int primary key, n int)"))
        db.execute(sa.text("insert into goods values (1, 0), (2, 0)"))
        db.execute(sa.text("create table many (n int)"))
        db.execute(sa.text("insert into many values (:n)"), [{"n": n} for n in range(1000)])
    update = sa.text("update goods set n = n + 1 where id = :id")
    locked, swallowed = threading.Event(), []
    runs: list[int] = []

    def other() -> None:
        with shop.engine.begin() as db:
            db.execute(
                sa.text("update many set n = n + 1")
            )  # with more writes, so that the other one is the victim
            db.execute(update, {"id": 2})
            locked.set()
            db.execute(update, {"id": 1})

    thread = threading.Thread(target=other)

    @shop.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> None:
        runs.append(n)
        with guard.transaction() as db:
            write(db, "before")
            db.execute(update, {"id": 1})
            if len(runs) == 1:
                thread.start()
                locked.wait()
                try:
                    db.execute(update, {"id": 2})
                except DBAPIError as error:
                    swallowed.append(error)
            write(db, "after")

    ship(1)
    thread.join()
    assert swallowed
    assert len(runs) == 2
    assert (shop.effects, shop.states) == (["after", "before"], ["DONE"])


@pytest.mark.parametrize("statement", ["create table other (n int)", "commit", "rollback"])
def test_a_statement_that_ends_the_transaction_is_an_error(
    shop: GuardedShop, statement: str
) -> None:
    """CREATE TABLE commits earlier writes, without DONE. The body gets an error, and later writes
    are rolled back."""

    @shop.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> None:
        with guard.transaction() as db:
            db.exec_driver_sql(statement)
            write(db, "after")

    with pytest.raises(TransactionUsageError):
        ship(1)
    assert (shop.effects, shop.states) == ([], ["FAILED"])


# -- connections ------------------------------------------------------------------------------


@pytest.mark.parametrize("last_words", ["a statement", "complete", "swallowed"])
def test_a_session_that_is_killed_is_no_effect(shop: GuardedShop, last_words: str) -> None:
    """After KILL in the block, the driver does not reconnect silently, and the body runs again."""
    ledger = shop.ledger
    claimed = claim(ledger)
    with pytest.raises(TransactionRetryError):
        with ledger.transaction(claimed.claim) as tx:
            write(tx.db)
            pid = tx.db.execute(sa.text("select connection_id()")).scalar()
            with shop.engine.begin() as db:
                db.exec_driver_sql(f"kill {pid}")
            if last_words == "a statement":
                write(tx.db)
            elif last_words == "swallowed":
                for _ in range(2):
                    with pytest.raises(sa.exc.SQLAlchemyError):
                        write(tx.db)
            tx.complete_in_block(claimed.claim, None)
    assert (shop.effects, shop.states) == ([], ["PROCESSING"])
    ledger.complete_alone(claimed.claim, None)
    assert shop.states == ["DONE"]


def test_a_frozen_holders_transaction_ends(mariadb_url: str) -> None:
    """MariaDB ends the idle transaction of a frozen holder. Until then the key is busy."""
    frozen, other = SqlLedger(mariadb_url, idle_in_transaction_s=1.0), SqlLedger(mariadb_url)
    frozen.create_schema()
    holder = claim(frozen, ttl_s=0.3)
    with pytest.raises(TransactionRetryError), frozen.transaction(holder.claim) as tx:
        tx.complete_in_block(
            holder.claim, None
        )  # key and work are locked now, and the process is frozen
        wait_until(lambda: isinstance(other.claim(request()), Claimed))
        tx.db.execute(sa.text("select 1"))
    for each in (frozen, other):
        each.close()


class Interrupt(Exception):  # noqa: N818
    """An error like a soft time limit or a lost lease, raised in a body's thread."""


@pytest.mark.parametrize("within", ["a body", "the ledger", "a claim", "a completion"])
def test_a_reply_that_an_interrupt_left_unread_reaches_no_other_call(
    url: str, within: str, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """A connection with an unread reply is not used again: PyMySQL would take it for the answer to
    the next query."""
    engine = sa.create_engine(url, pool_size=1, max_overflow=0)
    ledger = SqlLedger(engine if own else url)
    ledger.create_schema()
    claimed = claim(ledger).claim
    read = pymysql.connections.Connection._read_query_result

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(pymysql.connections.Connection, "_read_query_result", read)
        raise Interrupt

    def strike() -> None:
        monkeypatch.setattr(pymysql.connections.Connection, "_read_query_result", interrupt)

    with pytest.raises(Interrupt):
        if within == "a body":
            with ledger.transaction(claimed) as tx:
                strike()
                tx.db.execute(sa.text("select 'a stranger''s'"))
        elif within == "a completion":
            with ledger.transaction(claimed) as tx:
                strike()
                tx.complete_in_block(claimed, None)
        else:
            strike()
            ledger.claim(request(9)) if within == "a claim" else ledger.view("ship order:1")
    for number in range(2, 5):
        view = ledger.view("ship order:1")
        assert view is not None
        assert (view.id, view.state) == ("ship order:1", State.PROCESSING)
        ledger.complete_alone(claim(ledger, number).claim, None)
    ledger.complete_alone(claimed, None)
    ledger.close()
    engine.dispose()


def test_a_second_interrupt_leaves_no_reply_to_others(
    mariadb_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first interrupt hits while a reply is awaited, the second while taskguard handles the
    first. No reply is left."""
    ledger = SqlLedger(mariadb_url)
    ledger.create_schema()
    for number in range(3):
        claim(ledger, number)

    def interrupt(*_: Any, **__: Any) -> Any:
        raise Interrupt

    with monkeypatch.context() as patched:
        patched.setattr(pymysql.connections.Connection, "_read_query_result", interrupt)
        patched.setattr(taken.DriverCall, "__exit__", interrupt)
        with pytest.raises(Interrupt):
            ledger.claim(request(3))
    for number in range(4, 7):
        assert claim(ledger, number).claim.work == f"ship order:{number}"
    ledger.close()


def test_renewals_need_no_connection_of_the_bodies(url: str) -> None:
    """A lease is renewed even if the body has the pool's only connection."""
    engine = sa.create_engine(url, pool_size=1, max_overflow=0, pool_timeout=1)
    ledger = SqlLedger(engine)
    ledger.create_schema()
    first, second = claim(ledger).claim, claim(ledger, 2).claim
    with ledger.transaction(first):
        for _ in range(2):
            assert ledger.renew([second]) == [Renewal.RENEWED]
    ledger.close()


@pytest.fixture
def proxied(server: Any, url: str, make_shop: Any) -> Iterator[tuple[Any, Proxy]]:
    """A shop whose ledger connects through the proxy."""
    with Proxy(server.port) as proxy:
        way = url.replace(f":{server.port}/", f":{proxy.port}/")
        yield make_shop(url, way), proxy


def test_a_commit_without_an_answer_that_happened_is_done(proxied: tuple[Any, Proxy]) -> None:
    """If COMMIT arrives and its reply is lost, the ledger reads the record, and the block
    succeeds."""
    shop, proxy = proxied

    @shop.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> None:
        with guard.transaction() as db:
            write(db)
            proxy.lose_reply_to(b"COMMIT", then=Mode.CUT)

    ship(1)
    assert not proxy.armed
    assert (len(shop.effects), shop.states) == (1, ["DONE"])


@pytest.mark.parametrize("progress", ["the same as before", "another one"])
@pytest.mark.parametrize("arrives", [True, False])
def test_what_became_of_a_checkpoint_is_learnt_by_its_progress(
    proxied: tuple[Any, Proxy], arrives: bool, progress: str
) -> None:
    """If a checkpoint's COMMIT has no answer, its progress shows whether it happened. Equal
    progress gets a blank."""
    shop, proxy = proxied
    claimed = claim(shop.ledger).claim
    second = '"half"' if progress == "the same as before" else '"more"'
    with shop.ledger.transaction(claimed) as tx:
        tx.checkpoint(claimed, '"half"')
    try:
        with shop.ledger.transaction(claimed) as tx:
            write(tx.db)
            tx.checkpoint(claimed, second)
            if arrives:
                proxy.lose_reply_to(b"COMMIT", then=Mode.CUT)
            else:
                proxy.cut()
        assert arrives
    except TransactionRetryError:
        assert not arrives
    view = shop.ledger.view("ship order:1")
    assert json.loads(view.progress_json) == json.loads(second if arrives else '"half"')
    assert len(shop.effects) == arrives
    shop.ledger.complete_alone(claimed, None)


@pytest.mark.once
def test_a_server_that_says_nothing_is_given_up(proxied: tuple[Any, Proxy]) -> None:
    """A silent server is noticed at the greeting. A body's statement may take longer than that."""
    shop, proxy = proxied
    claimed = claim(shop.ledger)
    with shop.ledger.transaction(claimed.claim) as tx:
        assert tx.db.execute(sa.text("select sleep(6)")).scalar() == 0
    shop.ledger.close()
    proxy.mode = Mode.BLACK_HOLE
    with pytest.raises(LedgerUnavailableError):
        shop.ledger.claim(request(2))
    proxy.mode = Mode.PASS
    proxy.cut()


# -- neighbours -------------------------------------------------------------------------------


def test_claims_lock_no_gaps(shop: GuardedShop) -> None:
    """While a first claim is in progress, neighbouring keys and work can be claimed."""
    ledger = shop.ledger
    claim(ledger, 10)
    claim(ledger, 30)
    with shop.engine.connect() as db:
        with ledger._database.transaction(lock_timeout_s=5.0) as open_one:
            missing = sa.select(KEYS).where(KEYS.c.key == "order:20").with_for_update()
            assert open_one.execute(missing).first() is None
            assert isinstance(ledger.claim(request(21)), Claimed)
        assert db.execute(sa.select(sa.func.count()).select_from(KEYS)).scalar() == 3


def test_purge_and_requeue_leave_others_alone(shop: GuardedShop) -> None:
    """A purge leaves a locked row, and a requeue does not change one."""
    ledger = shop.ledger
    for number in (1, 2, 3):
        claimed = claim(ledger, number, message=MessageRef(f"m{number}"))
        assert ledger.defer(
            request(number, message=MessageRef(f"m{number}")), lambda deferrals: None
        )
        ledger.fail(claimed.claim, "x")
    with shop.engine.begin() as db:
        for table in ("work", "keys", "messages"):
            column = {"work": "finished", "keys": "fence", "messages": "updated"}[table]
            db.exec_driver_sql(f"update taskguard_{table} set `{column}` = 1")
    with shop.engine.begin() as db:
        db.exec_driver_sql("select * from taskguard_work where id = 'ship order:1' for update")
        db.exec_driver_sql("select * from taskguard_messages where message = 'm1' for update")
        assert ledger.requeue("ship order:2", reason="again")
        purged = ledger.purge(older_than_s=3600)
        assert (purged.work_items, purged.messages, purged.keys) == (1, 1, 3)
    purged = ledger.purge(older_than_s=3600)
    assert (purged.work_items, purged.messages, purged.keys) == (1, 1, 0)
    assert [each.id for each in ledger.list_work(State.NEW)] == ["ship order:2"]


@pytest.fixture
def small_packets(server: Any) -> Iterator[None]:
    """Limit statements of new connections to a megabyte."""
    [[before]] = server.execute("select @@global.max_allowed_packet")
    server.execute("set global max_allowed_packet = 1048576")
    yield
    server.execute(f"set global max_allowed_packet = {before}")


@pytest.mark.usefixtures("small_packets")
@pytest.mark.parametrize("text", ["x" * 1_100_000, '"' * 400_000], ids=["long", "escaped"])
def test_a_call_that_cannot_be_stored_is_its_own_error(url: str, own: bool, text: str) -> None:
    """A message beyond the server's packet, with its escapes, raises its own error before it is
    sent. Otherwise it would look like a lasting outage."""
    engine = sa.create_engine(url)
    ledger = SqlLedger(engine if own else url)
    ledger.create_schema()
    asked = request(call=json.dumps({"message": "m", "body": text}), task="shop.recover")
    with pytest.raises(CallTooLargeError, match=r"shop.recover order:1: .* call of") as caught:
        ledger.claim(asked)
    assert caught.value.key == "order:1"
    with pytest.raises(CallTooLargeError):
        ledger.enqueue(None, asked)
    with engine.begin() as db, pytest.raises(CallTooLargeError):
        ledger.enqueue(db, asked)
    assert ledger.view("ship order:1") is None
    for number in (1, 2):
        fits = request(number, call=json.dumps({"body": text[: len(text) // 2]}))
        if number == 1:
            ledger.enqueue(None, fits)
        assert isinstance(ledger.claim(fits), Claimed)
    ledger.close()
    engine.dispose()


def test_a_call_beyond_its_column_is_its_own_error(mariadb_url: str) -> None:
    """A message beyond its column raises its own error, whatever packet the server accepts."""
    ledger = SqlLedger(mariadb_url)
    ledger.create_schema()
    with pytest.raises(CallTooLargeError, match="17,000,000 bytes"):
        ledger.claim(request(call="x" * 17_000_000))
    ledger.close()


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("strict", [0, 1])
def test_a_body_on_a_snapshot(mariadb_url: str, level: str, strict: int) -> None:
    """On the user's Engine, a body on a snapshot commits after a renewal, and is refused after a
    takeover.

    `strict` (innodb_snapshot_isolation) refuses to change rows that are newer than the snapshot.
    """
    init = {"init_command": f"set innodb_snapshot_isolation = {strict}"}
    engine = sa.create_engine(mariadb_url, isolation_level=level, connect_args=init)
    ledger, other = SqlLedger(engine), SqlLedger(mariadb_url)
    ledger.create_schema()
    claimed = claim(ledger).claim
    with ledger.transaction(claimed) as tx:
        tx.db.execute(sa.select(WORK)).all()
        assert other.renew([claimed])[0] in {Renewal.RENEWED, Renewal.SKIPPED}
        assert isinstance(other.claim(request()), Busy)
        tx.complete_in_block(claimed, None)
    stale = claim(ledger, 2, ttl_s=0.05).claim
    wait_until(lambda: isinstance(other.claim(request(2)), Claimed))
    with pytest.raises(StaleTokenError), ledger.transaction(stale, look_first=False) as tx:
        tx.complete_in_block(stale, None)
    engine.dispose()
    other.close()


def test_on_the_users_engine_an_open_body_locks_nothing(url: str) -> None:
    """A frozen holder on MariaDB's default, a snapshot, locks nothing: it is overtaken, and
    refused."""
    engine = sa.create_engine(url)
    ledger, other = SqlLedger(engine), SqlLedger(url)
    ledger.create_schema()
    frozen = claim(ledger, ttl_s=0.05).claim
    with pytest.raises(StaleTokenError), ledger.transaction(frozen) as tx:
        tx.db.execute(sa.select(WORK)).all()
        wait_until(lambda: isinstance(other.claim(request()), Claimed))
        tx.complete_in_block(frozen, None)
    engine.dispose()
    other.close()


def test_what_a_body_wrote_before_a_commit_that_was_refused_is_never_committed(
    shop: GuardedShop,
) -> None:
    """After a refused commit the connection's writes are dropped, so that FAILED or other work does
    not commit them."""

    @shop.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> None:
        with guard.transaction() as db:
            write(db)
            if n == 1:
                db.commit()

    with pytest.raises(TransactionUsageError):
        ship(1)
    assert (shop.effects, shop.states) == ([], ["FAILED"])


def test_claims_go_through_again_whatever_idle_connections_a_restart_left(
    server: Any, url: str
) -> None:
    """One dead connection removes all others from the pool."""
    ledger = SqlLedger(url)
    ledger.create_schema()
    database = ledger._database
    with ExitStack() as at_once:  # three claims at once
        for _ in range(3):
            claiming = database.transaction(lock_timeout_s=database.lock_timeout_s, claim=True)
            at_once.enter_context(claiming).exec_driver_sql("select 1")
    name = sa.make_url(url).database
    for (pid,) in server.execute(
        f"select id from information_schema.processlist where db = '{name}'"
    ):
        server.execute(f"kill {pid}")
    claim(ledger)
    ledger.close()
