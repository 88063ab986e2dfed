"""The PostgreSQL ledger while the server or its connection fails."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import sqlalchemy as sa

from support.claims import request
from support.needs import need
from support.proxy import Mode, Proxy
from support.threads import at_once
from support.waiting import wait_until
from taskguard.errors import (
    CommitUnknownError,
    LedgerUnavailableError,
    StaleTokenError,
    TransactionRetryError,
)
from taskguard.ledger.connections.database import Database
from taskguard.ledger.lines import postgresql
from taskguard.ledger.sql import SqlLedger
from taskguard.ledger.tables import KEYS
from taskguard.locks.base import Renewal
from taskguard.model.claims import Claim, Claimed, MessageRef
from taskguard.model.states import State
from taskguard_sandbox.servers import MariaDB, Postgres


class Bench:
    """A ledger behind a proxy, and the database itself."""

    def __init__(self, url: str, port: int, proxy: Proxy) -> None:
        self.proxied = url.replace(f":{port}/", f":{proxy.port}/")
        self.ledger = SqlLedger(self.proxied, resolve_timeout_s=5.0)
        self.proxy = proxy
        self.direct = SqlLedger(url)
        self.direct.create_schema()
        self.engine = sa.create_engine(url)
        with self.engine.begin() as db:
            db.execute(sa.text("create table effects (item text)"))

    def claim(self, number: int = 1, **values: Any) -> Claimed:
        found = self.ledger.claim(request(number, **values))
        assert isinstance(found, Claimed)
        return found

    def effects(self) -> int:
        with self.engine.connect() as db:
            return int(db.execute(sa.text("select count(*) from effects")).scalar_one())

    def state(self, number: int = 1) -> str:
        view = self.direct.view(f"ship order:{number}")
        assert view is not None
        return view.state.value

    def close(self) -> None:
        for each in (self.ledger, self.direct):
            each.close()
        self.engine.dispose()


@pytest.fixture
def bench(postgres: Postgres, pg_url: str) -> Iterator[Bench]:
    with Proxy(postgres.port) as proxy:
        made = Bench(pg_url, postgres.port, proxy)
        yield made
        made.close()


def write(db: Any) -> None:
    db.execute(sa.text("insert into effects values ('1')"))


def test_a_commit_without_an_answer_that_happened_is_done(bench: Bench) -> None:
    """If COMMIT arrives and its reply is lost, the ledger reads the record, and the block
    succeeds."""
    claimed = bench.claim()
    with bench.ledger.transaction(claimed.claim) as tx:
        write(tx.db)
        tx.complete_in_block(claimed.claim, "1")
        bench.proxy.lose_reply_to(b"COMMIT", then=Mode.CUT)
    assert not bench.proxy.armed
    assert (bench.effects(), bench.state()) == (1, "DONE")


def test_the_completion_and_its_commit_are_one_message(bench: Bench) -> None:
    """A body's transaction is BEGIN, the body's statements, and one message for completion and
    COMMIT."""
    messages = []
    for number in range(4):
        claimed = bench.claim(number)
        before = bench.proxy.requests
        with bench.ledger.transaction(claimed.claim, look_first=False) as tx:
            write(tx.db)
            tx.complete_in_block(claimed.claim, "1")
        messages.append(bench.proxy.requests - before)
    assert messages[2:] == [3, 3]  # before, statements are prepared


def test_a_message_longer_than_the_sockets_buffers_arrives(bench: Bench) -> None:
    """The end of a body with a long result, again and again on one connection."""
    result = json.dumps("x" * 6_000_000)
    for number in range(3):
        claimed = bench.claim(number)
        with bench.ledger.transaction(claimed.claim) as tx:
            write(tx.db)
            tx.complete_in_block(claimed.claim, result)
        view = bench.direct.view(f"ship order:{number}")
        assert view is not None
        assert view.result_json == result
    assert bench.effects() == 3


def test_a_message_that_the_socket_takes_in_small_parts_arrives(bench: Bench) -> None:
    """A message arrives if the socket takes it in small parts, as over a real network."""
    claimed, result = bench.claim(), json.dumps("x" * 900_000)
    with interrupted_after(30.0), bench.ledger.transaction(claimed.claim) as tx:
        write(tx.db)
        with socket.socket(fileno=os.dup(tx.db.connection.dbapi_connection.fileno())) as shared:
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
        tx.complete_in_block(claimed.claim, result)
    assert (bench.effects(), bench.state()) == (1, "DONE")


def test_an_interrupt_while_the_end_is_awaited_leaves_one_outcome(bench: Bench) -> None:
    """An interrupt leaves either effects and DONE, or neither and work that can be given back.
    Other work goes on."""
    with bench.engine.begin() as db:
        db.execute(SLOW_COMMIT)
    done = 0
    for number, pause_s in enumerate((0.01, 0.1, 0.19, 0.3, 30.0)):
        claimed = bench.claim(number)
        with contextlib.suppress(Interrupt), interrupted_after(pause_s):
            with bench.ledger.transaction(claimed.claim) as tx:
                write(tx.db)
                tx.complete_in_block(claimed.claim, "1")
        # The server may still run the statement, and keeps the row locked meanwhile.
        state = wait_until(functools.partial(_settled, bench, claimed.claim, number))
        done += state == "DONE"
        assert bench.effects() == done
    assert done


def _settled(bench: Bench, claim: Claim, number: int) -> str | None:
    """Wait until the work is NEW, after giving it back, or DONE."""
    try:
        return "NEW" if bench.direct.give_back(claim) else bench.state(number)
    except LedgerUnavailableError:
        return None


class Interrupt(BaseException):
    """The exception of a time limit."""


@contextlib.contextmanager
def interrupted_after(pause_s: float) -> Iterator[None]:
    """Interrupt the block's thread, the main one, after this time."""

    def interrupt(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, pause_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# A COMMIT that takes 200 ms.
SLOW_COMMIT = sa.text("""
    create function linger() returns trigger language plpgsql as
        $$ begin perform pg_sleep(0.2); return null; end $$;
    create constraint trigger lingers after insert on effects
        deferrable initially deferred for each row execute function linger();
""")


def test_an_end_that_is_late_is_not_said_to_have_come_to_nothing(bench: Bench) -> None:
    """If the connection breaks while the last message is on its way, the outcome is unknown until
    the server's session has ended."""
    claimed = bench.claim()
    deliver = threading.Timer(1.0, bench.proxy.deliver)
    with bench.ledger.transaction(claimed.claim) as tx:
        write(tx.db)
        tx.complete_in_block(claimed.claim, "1")
        bench.proxy.delay(b"COMMIT")
        deliver.start()
    deliver.join()
    assert (bench.effects(), bench.state()) == (1, "DONE")


def test_an_end_that_never_comes_and_may_come_yet_is_unknown(bench: Bench) -> None:
    """If the session stays open at the server, CommitUnknownError says so."""
    claimed = bench.claim()
    with pytest.raises(CommitUnknownError, match=r"session \d+ is open yet"):
        with bench.ledger.transaction(claimed.claim) as tx:
            write(tx.db)
            tx.complete_in_block(claimed.claim, "1")
            bench.proxy.delay(b"COMMIT")
    bench.proxy.deliver()
    wait_until(lambda: bench.state() == "DONE")
    assert bench.effects() == 1


def test_a_commit_that_never_arrived_is_tried_again(bench: Bench) -> None:
    """If the connection is cut before COMMIT, nothing is written, and the body runs again."""
    claimed = bench.claim()
    with pytest.raises(TransactionRetryError):
        with bench.ledger.transaction(claimed.claim) as tx:
            write(tx.db)
            tx.complete_in_block(claimed.claim, None)
            bench.proxy.cut()
    assert (bench.effects(), bench.state()) == (0, "PROCESSING")
    with bench.ledger.transaction(claimed.claim) as tx:
        write(tx.db)
        tx.complete_in_block(claimed.claim, None)
    assert (bench.effects(), bench.state()) == (1, "DONE")


def test_a_commit_that_never_arrived_after_a_takeover_is_stale(bench: Bench) -> None:
    """If another holder took over before the outcome was known, the commit is refused, and the body
    does not run again."""
    claimed = bench.claim(ttl_s=0.05)
    with pytest.raises(StaleTokenError):
        with bench.ledger.transaction(claimed.claim) as tx:
            write(tx.db)
            taken = wait_until(lambda: _granted(bench.direct.claim(request())))
            bench.proxy.cut()
    assert taken.takeover
    assert (bench.effects(), bench.state()) == (0, "PROCESSING")


def _granted(answer: Any) -> Any:
    return answer if isinstance(answer, Claimed) else None


def test_an_outcome_that_cannot_be_learnt_is_said(postgres: Postgres, pg_url: str) -> None:
    """If the database stays down, CommitUnknownError is raised, and the message is not
    acknowledged."""
    with Proxy(postgres.port) as proxy:
        bench = Bench(pg_url, postgres.port, proxy)
        bench.ledger = SqlLedger(bench.proxied, resolve_timeout_s=0.5)
        claimed = bench.claim()
        with pytest.raises(CommitUnknownError) as caught:
            with bench.ledger.transaction(claimed.claim) as tx:
                write(tx.db)
                tx.complete_in_block(claimed.claim, None)
                proxy.lose_reply_to(b"COMMIT", then=Mode.CUT, others=Mode.CUT)
        assert caught.value.key == "order:1"
        assert caught.value.__cause__ is not None
        assert "is not available" in str(caught.value)
        proxy.mode = Mode.PASS
        assert (bench.effects(), bench.state()) in {(0, "PROCESSING"), (1, "DONE")}
        bench.close()


def test_a_lost_reply_to_a_claim_is_the_same_grant(bench: Bench) -> None:
    """If the reply to a claim is lost, the repeated claim of the same owner is the same grant, and
    counts nothing."""
    bench.claim(2)  # connected
    bench.proxy.lose_reply_to(b"order:1", then=Mode.CUT)
    claimed = bench.claim()
    assert not bench.proxy.armed
    assert (claimed.attempt, claimed.crashes) == (1, 0)
    bench.ledger.complete_alone(claimed.claim, None)


def test_a_lost_reply_to_a_lone_completion_is_done(bench: Bench) -> None:
    """Bodies without a transaction of their own complete in one statement."""
    claimed = bench.claim()
    bench.proxy.lose_reply_to(str(claimed.claim.owner).encode(), then=Mode.CUT)
    bench.ledger.complete_alone(claimed.claim, "1")
    assert bench.state() == "DONE"


@pytest.mark.parametrize(("failing", "begun"), [(1, 2), (9, 2)])
def test_a_completion_in_several_statements_is_tried_twice(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, failing: int, begun: int
) -> None:
    """A completion is repeated once if the database gives no answer, so that the body need not run
    again."""
    ledger = SqlLedger(sqlite_url)
    ledger.create_schema()
    claimed = ledger.claim(request())
    assert isinstance(claimed, Claimed)
    begin, asked = Database.begin, []

    def no_answer(*args: Any, **options: Any) -> Any:
        asked.append(args)
        if len(asked) <= failing:
            raise LedgerUnavailableError("away")
        return begin(*args, **options)

    monkeypatch.setattr(Database, "begin", no_answer)
    with contextlib.suppress(LedgerUnavailableError):
        ledger.complete_alone(claimed.claim, "1")
    view = ledger.view(str(claimed.claim.work))
    assert view is not None
    assert view.state.value == ("DONE" if failing == 1 else "PROCESSING")
    assert len(asked) == begun
    ledger.close()


def test_a_session_that_the_server_ends_is_no_effect(bench: Bench) -> None:
    """If pg_terminate_backend ends the session within the block, it is rolled back, and the body
    runs again."""
    claimed = bench.claim()
    with pytest.raises(TransactionRetryError):
        with bench.ledger.transaction(claimed.claim) as tx:
            write(tx.db)
            pid = tx.db.execute(sa.text("select pg_backend_pid()")).scalar()
            with bench.engine.begin() as db:
                db.execute(sa.text("select pg_terminate_backend(:pid)"), {"pid": pid})
            write(tx.db)
    assert bench.effects() == 0
    bench.ledger.complete_alone(claimed.claim, None)


def test_a_deadlock_is_to_be_run_again(bench: Bench) -> None:
    """If two holders deadlock in their own tables, one of them gets TransactionRetryError."""
    with bench.engine.begin() as db:
        db.execute(sa.text("create table goods (id int primary key, n int)"))
        db.execute(sa.text("insert into goods values (1, 0), (2, 0)"))
    barrier = threading.Barrier(2)
    outcomes: list[str] = []

    def hold(which: int) -> None:
        number = which + 1
        claimed = bench.claim(number)
        for attempt in range(1, 50):
            try:
                with bench.ledger.transaction(claimed.claim) as tx:
                    for good in (number, 3 - number):
                        tx.db.execute(
                            sa.text("update goods set n = n + 1 where id = :good"), {"good": good}
                        )
                        if attempt == 1 and good == number:
                            barrier.wait()
                    tx.complete_in_block(claimed.claim, None)
                outcomes.append("done")
                return
            except TransactionRetryError:
                outcomes.append("retry")

    at_once(2, hold)
    # The victim may be quick enough to run into the same deadlock again.
    assert outcomes.count("done") == 2
    assert "retry" in outcomes
    with bench.engine.connect() as db:
        assert set(db.execute(sa.text("select n from goods")).scalars()) == {2}


def test_a_holder_that_freezes_in_its_transaction_blocks_others_briefly(
    postgres: Postgres, pg_url: str
) -> None:
    """PostgreSQL ends the idle transaction of a frozen holder. Until then the key is busy, and
    other leases are renewed.

    The completion takes steps here, because otherwise nothing comes between it and its COMMIT.
    """
    frozen = SqlLedger(pg_url, idle_in_transaction_s=1.0, one_statement=False)
    frozen.create_schema()
    other = SqlLedger(pg_url)
    holder = frozen.claim(request(1, ttl_s=0.3))
    second = other.claim(request(2))
    assert isinstance(holder, Claimed)
    assert isinstance(second, Claimed)
    with pytest.raises(TransactionRetryError), frozen.transaction(holder.claim) as tx:
        tx.complete_in_block(
            holder.claim, None
        )  # key and work are locked now, and the process freezes
        answers = []

        def taken_over() -> bool:
            assert other.renew([second.claim]) == [Renewal.RENEWED]
            answers.append(other.claim(request(1)))
            return isinstance(answers[-1], Claimed)

        wait_until(taken_over)
        assert len(answers) > 1
        tx.db.execute(sa.text("select 1"))
    for each in (frozen, other):
        each.close()


@pytest.mark.parametrize("kind", [Postgres, pytest.param(MariaDB, marks=pytest.mark.debian)])
def test_after_a_restart_the_next_claim_goes_through(kind: type[Postgres | MariaDB]) -> None:
    """After a restart, dead connections of the pool cause no error. While the server is down, the
    ledger says so."""
    need(kind)
    with kind() as server:
        ledger = SqlLedger(server.create_database("again"))
        ledger.create_schema()
        claimed = ledger.claim(request())
        assert isinstance(claimed, Claimed)
        server.restart()
        ledger.complete_alone(claimed.claim, None)
        server.halt()
        with pytest.raises(LedgerUnavailableError) as caught:
            ledger.claim(request(2))
        assert "@" not in str(caught.value)
        with pytest.raises(LedgerUnavailableError):
            ledger.renew([claimed.claim])
        server.start()
        wait_until(lambda: isinstance(_try(ledger), Claimed))
        view = ledger.view("ship order:1")
        assert view is not None
        assert view.state is State.DONE
        ledger.close()


@pytest.mark.parametrize(
    ("own_engine", "last_words"),
    [
        (False, "a statement"),
        (False, "complete"),
        (False, "an error of the body"),
        (True, "complete"),
    ],
)
def test_a_server_that_dies_in_the_block_is_no_effect(own_engine: bool, last_words: str) -> None:
    """A server that is killed in the block leaves no effect: the body runs again, and the next
    transaction reports it as down."""
    with Postgres(fsync="off") as server:
        url = server.create_database("dies")
        ledger = SqlLedger(sa.create_engine(url) if own_engine else url)
        ledger.create_schema()
        claimed = ledger.claim(request())
        assert isinstance(claimed, Claimed)
        expected = ZeroDivisionError if last_words == "an error of the body" else None
        with pytest.raises(expected or TransactionRetryError):
            with ledger.transaction(claimed.claim) as tx:
                tx.db.execute(sa.text("create table effects ()"))
                server.kill()
                if last_words == "a statement":
                    tx.db.execute(sa.text("select 1"))
                elif last_words == "complete":
                    tx.complete_in_block(claimed.claim, None)
                else:
                    raise ZeroDivisionError
        with pytest.raises(LedgerUnavailableError), ledger.transaction(claimed.claim):
            pass
        server.start()
        # The claim was not flushed, so it may be lost. Then it is claimed again.
        again = ledger.claim(request(owner=claimed.claim.owner))
        assert isinstance(again, Claimed)
        ledger.complete_alone(again.claim, None)
        ledger.close()


def _try(ledger: SqlLedger) -> Any:
    try:
        return ledger.claim(request(3))
    except LedgerUnavailableError:
        return None


def test_a_server_that_says_nothing_is_given_up(bench: Bench) -> None:
    """A server that does not answer is noticed within the connection's own timeouts."""
    bench.claim()
    bench.proxy.mode = Mode.BLACK_HOLE
    bench.ledger.close()
    began_s = time.monotonic()
    with pytest.raises(LedgerUnavailableError):
        bench.ledger.claim(request(2))
    assert time.monotonic() - began_s < 60
    bench.proxy.mode = Mode.PASS
    bench.proxy.cut()


def test_an_unflushed_claim_that_a_crash_lost_cannot_commit(bench: Bench) -> None:
    """A claim is not flushed. If a crash loses it, its holder finds no record, and is refused."""
    claimed = bench.claim()
    with bench.engine.begin() as db:  # the state after recovery if the claim's WAL was lost
        db.execute(sa.text("delete from taskguard_keys"))
        db.execute(sa.text("delete from taskguard_work"))
    with pytest.raises(StaleTokenError):
        bench.ledger.complete_alone(claimed.claim, None)
    again = bench.claim()
    assert again.claim.fence > claimed.claim.fence


def test_a_paused_holder_cannot_commit_behind_a_takeover_that_a_crash_could_lose() -> None:
    """A claim of a key that its former holder never released is flushed: it survives kill -9."""
    need(Postgres)
    with Postgres() as server:
        ledger = SqlLedger(server.create_database("crashes"))
        ledger.create_schema()
        paused = ledger.claim(request(1, work="a", ttl_s=0.3))
        assert isinstance(paused, Claimed)
        time.sleep(1.0)  # by now this claim is on disk, and its lease has expired
        second = ledger.claim(request(1, work="b"))
        assert isinstance(second, Claimed)
        _kill_all_of(server)
        server.restart()
        with pytest.raises(StaleTokenError):
            ledger.complete_alone(paused.claim, None)
        ledger.complete_alone(second.claim, None)
        ledger.close()


def test_a_parked_message_survives_a_crash_of_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record of a parked message is flushed before the message is acknowledged, so it survives
    kill -9."""
    need(Postgres)
    off = "set_config('synchronous_commit', 'off', true)"
    park = postgresql.PARK.replace("as now_us,", f"as now_us, {off},", 1)
    assert off in park
    with Postgres() as server:
        ledger = SqlLedger(server.create_database("crashes"))
        ledger.create_schema()
        for number, flushed in ((1, True), (2, False)):
            if not flushed:
                monkeypatch.setattr(postgresql, "PARK", park)
            call = json.dumps({"queue": "test", "message": f"m{number}"})
            message = MessageRef(f"m{number}")
            assert ledger.park(request(number, message=message, keys=("account",), call=call))
            _kill_all_of(server)
            server.restart()
            waiting = [each.message for each in ledger.waiting("account")]
            assert waiting == ["m1"]
        ledger.close()


def _kill_all_of(server: Postgres) -> None:
    parent = psutil.Process(server.pid)
    family = [parent, *parent.children(recursive=True)]
    # Collect them by name before one is killed, because that ends others.
    servers = [each for each in family if _is_called(each, "postgres")]
    for process in servers:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _is_called(process: psutil.Process, name: str) -> bool:
    try:
        return bool(process.name().startswith(name))
    except psutil.NoSuchProcess:
        return False


def test_only_a_fence_from_the_clock_skips_the_flush(bench: Bench) -> None:
    """A claim skips the flush only with a fence from the clock, on a key that was released."""
    database = bench.ledger._database
    rows: list[Any] = []
    ask = database.ask

    def asked(*values: Any) -> list[Any]:
        found = ask(*values)
        rows.append(found[0] if found else (None,))  # the small claim of new work changed nothing
        return found

    database.ask = asked  # type: ignore[method-assign,assignment]
    bench.claim(1)
    bench.claim(2, work=None)
    with bench.engine.begin() as db:
        db.execute(sa.update(KEYS).values(fence=2**61, lease_until=0))
        db.execute(sa.text("update taskguard_work set lease_until = 0"))
    assert bench.claim(1).claim.fence == 2**61 + 1
    bench.claim(2, work=None)
    bench.claim(3)
    with bench.engine.begin() as db:
        db.execute(sa.text("update taskguard_keys set lease_until = 0"))
    bench.claim(3, work="other")
    found = ["off" if row[-1] == "off" else None for row in rows]
    assert found == ["off", "off", *[None] * 3, None, "off", *[None] * 3]
    with bench.ledger._database.engine.connect() as db:
        assert db.execute(sa.text("show synchronous_commit")).scalar() == "on"


def test_what_was_delivered_before_is_asked_for_at_once(bench: Bench) -> None:
    """If the queue says that a message was delivered before, its takeover or duplicate takes one
    statement."""
    database = bench.ledger._database
    bench.claim(1)
    with bench.engine.begin() as db:
        for table in ("keys", "work"):
            db.execute(sa.text(f"update taskguard_{table} set lease_until = 1"))
    asked: list[str] = []
    ask = database.ask
    database.ask = lambda *each: asked.append(each[0]) or ask(*each)  # type: ignore[func-returns-value,method-assign]
    taken = bench.claim(1, redelivered=True)
    assert (taken.takeover, len(asked)) == (True, 1)
    bench.ledger.complete_alone(taken.claim, None)
    asked.clear()
    assert not isinstance(bench.ledger.claim(request(1, redelivered=True)), Claimed)
    assert len(asked) == 1
