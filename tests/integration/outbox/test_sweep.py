"""Sweeps, and enqueueing in the user's transaction, with a queue that only notes."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import orm

import taskguard
from support.databases import DATABASES
from support.waiting import patience_s
from taskguard import Guard
from taskguard.errors import (
    ConfigurationError,
    KeyBusyError,
    StoredCallError,
    TransactionRetryError,
)
from taskguard.integration import Delivery, MessageRef, Sweeper, Swept, enqueue_in
from taskguard.ledger.sql import SqlLedger
from taskguard.ledger.tables import WORK
from taskguard.model.claims import Claimed, ClaimRequest
from taskguard.model.lease import new_owner
from taskguard.model.policy import make_policy
from taskguard.model.states import State


class SweepRig:
    """A runtime on a real database, and a queue that notes what it is sent, or refuses it."""

    def __init__(self, url: str) -> None:
        self.ledger = SqlLedger(url)
        self.ledger.create_schema()
        self.runtime = taskguard.connect(locks="memory://", ledger=self.ledger)
        self.engine = sa.create_engine(url)
        self.sent: list[tuple[str, int, int]] = []
        self.refused: set[str] = set()

    def send(self, call: dict[str, Any], message: MessageRef) -> None:
        if call["order"] in self.refused:
            raise ConnectionError("the broker is away")
        self.sent.append((call["order"], message.retries, message.deferrals))

    def delivery(self, order: str = "1", message: str | None = None) -> Delivery:
        return Delivery(
            keys=(f"order:{order}",),
            work=f"ship order:{order}",
            task="ship",
            message=MessageRef(message or f"m{order}"),
            policy=make_policy({}, task="ship", busy="raise"),
            call=json.dumps({"queue": "test", "order": order}),
        )

    def enqueue(self, session: Any, order: str = "1", message: str | None = None) -> Any:
        return enqueue_in(session, self.runtime, self.delivery(order, message), self.send)

    def sweep(self, **options: Any) -> Swept:
        return Sweeper(self.runtime, {"test": self.send}, **options).sweep()

    def pass_time(self) -> None:
        with self.engine.begin() as db:
            db.execute(sa.text("update taskguard_work set due = 1 where due is not null"))
            db.execute(sa.text("update taskguard_work set lease_until = 1 where lease_until > 0"))
            db.execute(sa.text("update taskguard_keys set lease_until = 1 where lease_until > 0"))

    def close(self) -> None:
        self.runtime.close()
        self.engine.dispose()


# The other tests are about decisions. The contract suite has the SQL of each database.
on_each_database = pytest.mark.parametrize("rig", DATABASES, indirect=True)


@pytest.fixture(params=["sqlite_url"])
def rig(request: pytest.FixtureRequest) -> Iterator[SweepRig]:
    made = SweepRig(request.getfixturevalue(request.param))
    yield made
    made.close()


def put_orders(rig: SweepRig, *orders: str) -> None:
    """Commit orders whose process died before it could send them."""
    with rig.engine.begin() as db:
        for order in orders:
            rig.enqueue(db, order)
    rig.pass_time()


# -- sweeps -----------------------------------------------------------------------------------


@on_each_database
def test_what_is_overdue_is_sent_once_and_again_after_a_while(rig: SweepRig) -> None:
    """A sweep sends overdue work in pages. A second one sends nothing until the messages count as
    lost again."""
    put_orders(rig, "1", "2", "3", "4", "5")
    assert rig.sweep(batch=2) == Swept(sent=5)
    assert rig.sweep() == Swept()
    rig.pass_time()
    assert rig.sweep() == Swept(sent=5)
    assert sorted(rig.sent) == sorted([(str(order), 0, 0) for order in range(1, 6)] * 2)


@on_each_database
def test_a_queue_that_is_behind_is_not_filled_by_sweeps(rig: SweepRig) -> None:
    """The delay doubles after each sending without a claim, up to a day. A claim resets it."""
    put_orders(rig, "1")

    def pause_s() -> float:
        with rig.engine.connect() as db:
            [due] = db.execute(sa.select(WORK.c.due)).scalars()
        return float(due / 1e6) - time.time()

    pauses_h = []
    for _ in range(7):
        assert rig.sweep().sent == 1
        pauses_h.append(round(pause_s() / 3600, 1))
        rig.pass_time()
    assert pauses_h == [1, 2, 4, 8, 16, 24, 24]
    owner = new_owner("m1")
    asked = ClaimRequest(
        keys=("order:1",), owner=owner, ttl_s=30, work="ship order:1", message=MessageRef("m1")
    )
    assert isinstance(rig.ledger.claim(asked), Claimed)
    rig.pass_time()
    assert rig.sweep().sent == 1
    assert round(pause_s() / 3600, 1) == 1
    rig.pass_time()
    assert rig.sweep(again_after_s=100_000).sent == 1
    assert round(pause_s()) == pytest.approx(100_000, abs=600)


@pytest.fixture
def elsewhere(
    rig: SweepRig, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[[], str]]:
    """Makes another database of the rig's kind, on the same server."""
    kind = rig.engine.dialect.name
    made: list[tuple[Any, str]] = []

    def make() -> str:
        if kind == "sqlite":
            return f"sqlite:///{tmp_path / 'elsewhere.sqlite'}"
        names = {"postgresql": "postgres", "mariadb": "mariadb", "mysql": "mysql"}
        url = rig.engine.url
        server = request.getfixturevalue(names[kind])
        if kind == "mysql" and url.port != server.port:
            server = request.getfixturevalue("mariadb")
        name = f"elsewhere_{uuid.uuid4().hex[:8]}"
        made.append((server, name))
        return str(server.create_database(name))

    yield make
    for server, name in made:
        server.drop_database(name)


@on_each_database
@pytest.mark.parametrize("tables", [True, False])
def test_a_transaction_on_another_database_is_refused(
    rig: SweepRig, elsewhere: Callable[[], str], tables: bool
) -> None:
    """A transaction on another database is refused, even if it has taskguard's tables: no sweep
    would find the work."""
    url = elsewhere()
    if tables:
        ledger = SqlLedger(url)
        ledger.create_schema()
    engine = sa.create_engine(url)
    if tables:  # a ledger itself, of another application
        with engine.begin() as db:
            ledger.enqueue(db, rig.runtime.runner.request(rig.delivery()))
        ledger.close()
    for _ in range(2):
        with orm.Session(engine) as session:
            with pytest.raises(ConfigurationError, match="not in the ledger's database"):
                rig.enqueue(session, "2")
            session.rollback()
        with engine.connect() as db:
            with pytest.raises(ConfigurationError, match="not in the ledger's database"):
                rig.enqueue(db, "2")
    engine.dispose()
    assert rig.sent == []
    assert rig.ledger.view("ship order:2") is None
    with orm.Session(rig.engine) as session, session.begin():
        rig.enqueue(session, "2")
    assert rig.sent == [("2", 0, 0)]


@on_each_database
def test_a_snapshot_from_before_the_ledgers_first_use(rig: SweepRig) -> None:
    """It does not see the mark by which the ledger knows its database. So the transaction runs
    again, unless the database lets it read newer rows."""
    engine = sa.create_engine(rig.engine.url, isolation_level="REPEATABLE READ")
    if engine.dialect.name == "sqlite":
        engine = rig.engine
    with engine.connect() as db:
        assert db.execute(sa.text("select count(*) from taskguard_keys")).scalar() == 0
        with contextlib.suppress(TransactionRetryError):
            rig.enqueue(db)
        db.rollback()
        with db.begin():
            rig.enqueue(db, "2")
    engine.dispose()
    assert rig.ledger.view("ship order:2") is not None


@on_each_database
def test_a_transaction_on_the_ledgers_database_is_taken_by_whatever_engine(rig: SweepRig) -> None:
    """A transaction of any Engine of the ledger's database is accepted."""
    url = rig.engine.url
    with rig.ledger._database.engine.connect() as db, db.begin():
        rig.enqueue(db, "1")  # published by a sweep
    engine = sa.create_engine(url, isolation_level="SERIALIZABLE")
    with orm.Session(engine) as session, session.begin():
        rig.enqueue(session, "2")
    engine.dispose()
    if url.get_backend_name() == "mysql":
        by_other_name = sa.create_engine(url.set(drivername="mariadb+pymysql"))
        with contextlib.suppress(sa.exc.InvalidRequestError):  # it is MySQL
            with orm.Session(by_other_name) as session, session.begin():
                rig.enqueue(session, "3")
        by_other_name.dispose()
    assert rig.ledger.view("ship order:1") is not None
    assert ("2", 0, 0) in rig.sent


@on_each_database
def test_the_ledgers_mark_survives_a_purge_and_tables_that_are_made_anew(rig: SweepRig) -> None:
    """The ledger's mark, which processes remember, survives a purge and a second creation of the
    tables."""
    for number, change in enumerate(("nothing", "purged", "made anew")):
        if change == "purged":
            rig.ledger.purge(older_than_s=3600.0)
        elif change == "made anew":
            with rig.engine.begin() as db:
                db.execute(sa.text("delete from taskguard_keys"))
        with orm.Session(rig.engine) as session, session.begin():
            rig.enqueue(session, str(number))
    assert len(rig.sent) == 3


def test_a_holder_that_vanished_is_found(rig: SweepRig) -> None:
    """A sweep finds work whose lease has expired."""

    class Gone(BaseException):
        pass

    def body(guard: Guard) -> None:
        rig.pass_time()
        assert rig.sweep() == Swept(sent=1)
        raise Gone

    with pytest.raises(Gone):
        rig.runtime.runner.deliver(rig.delivery(), body)
    assert rig.sent == [("1", 0, 0)]
    rig.runtime.runner.deliver(rig.delivery(), lambda guard: None)
    rig.pass_time()
    assert rig.sweep() == Swept()


def test_one_call_that_cannot_be_sent_holds_up_no_other(
    rig: SweepRig, caplog: pytest.LogCaptureFixture
) -> None:
    """A message that cannot be sent is logged and counted, and is tried again later. The others are
    sent."""
    put_orders(rig, "1", "2", "3")
    with rig.engine.begin() as db:
        db.execute(sa.update(WORK).where(WORK.c.id == "ship order:2").values(call="{"))
    rig.refused = {"3"}
    assert rig.sweep() == Swept(sent=1, refused=1, failed=1)
    assert "ship order:2 is FAILED: its stored call cannot be read" in caplog.text
    rig.refused = set()
    assert rig.sweep() == Swept()
    rig.pass_time()
    assert rig.sweep() == Swept(sent=2)


def test_a_broker_that_is_away_is_not_asked_for_every_work(rig: SweepRig) -> None:
    """After ten refusals in a row a sweep ends, and no message is lost."""
    orders = [str(order) for order in range(100, 130)]
    put_orders(rig, *orders)
    rig.refused = set(orders[2:])
    assert rig.sweep(batch=5) == Swept(sent=2, refused=10)
    rig.refused = set()
    assert rig.sweep() == Swept(sent=18)
    rig.pass_time()
    assert rig.sweep().sent >= 10


def test_calls_that_cannot_be_sent_hold_up_no_other(rig: SweepRig) -> None:
    """Only errors of the connection mean that the broker is down. Other errors belong to one
    message."""
    bad, good = [str(order) for order in range(100, 130)], [str(order) for order in range(200, 205)]
    put_orders(rig, *bad, *good)
    send = rig.send

    def picky(call: dict[str, Any], message: MessageRef) -> None:
        if call["order"] in bad:
            raise ValueError("this one's queue says no")
        send(call, message)

    rig.send = picky  # type: ignore[method-assign]
    assert rig.sweep(batch=7) == Swept(sent=5, refused=30)
    assert sorted(order for order, _, _ in rig.sent) == good


def test_a_call_that_cannot_be_read_is_failed_with_its_reason(rig: SweepRig) -> None:
    """An unreadable message is FAILED with the reason: ten of them would block each sweep. After a
    requeue it is tried again."""
    put_orders(rig, "1", "2")
    send = rig.send

    def read(call: dict[str, Any], message: MessageRef) -> None:
        if call["order"] == "1":
            raise StoredCallError("its stored call cannot be read: pickle")
        send(call, message)

    rig.send = read  # type: ignore[method-assign]
    assert rig.sweep() == Swept(sent=1, failed=1)
    view = rig.ledger.view("ship order:1")
    assert view is not None
    assert (view.state, view.final) == (State.FAILED, False)
    assert "pickle" in str(view.error)
    rig.pass_time()
    assert rig.sweep() == Swept(sent=1), "the other, as before"
    rig.send = send  # type: ignore[method-assign]
    assert rig.ledger.requeue("ship order:1", reason="readable now")
    assert rig.sweep() == Swept(sent=1)


@on_each_database
def test_a_call_that_is_never_claimed_is_failed_in_the_end(rig: SweepRig) -> None:
    """If the task is gone or refuses its arguments, the message fails in the end. A claim or an
    operator resets the count."""
    put_orders(rig, "1", "2")
    for _ in range(2):
        assert rig.sweep(max_sends=3) == Swept(sent=2)
        rig.pass_time()

    class Gone(BaseException):
        pass

    def vanish(guard: Guard) -> None:
        raise Gone

    with pytest.raises(Gone):
        rig.runtime.runner.deliver(rig.delivery("2"), vanish)
    rig.pass_time()
    assert rig.sweep(max_sends=3) == Swept(sent=2)
    rig.pass_time()
    assert rig.sweep(max_sends=3) == Swept(sent=1, failed=1)
    view = rig.ledger.view("ship order:1")
    assert view is not None
    assert view.state is State.FAILED
    assert "sent 3 times" in str(view.error)
    assert view.finished_s is not None
    assert rig.ledger.requeue("ship order:1", reason="deployed again")
    assert rig.sweep(max_sends=3).sent == 1
    rig.pass_time()
    assert rig.sweep(max_sends=3).failed == 0
    call = json.loads(str(rig.ledger.view("ship order:1").call))  # type: ignore[union-attr]
    assert (call["queue"], call["order"]) == ("test", "1")


def test_a_message_that_comes_after_all_is_run(rig: SweepRig) -> None:
    """Work that a sweep has failed still runs if its message arrives."""
    put_orders(rig, "1")
    assert rig.sweep(max_sends=1) == Swept(sent=1)
    rig.pass_time()
    assert rig.sweep(max_sends=1) == Swept(failed=1)
    ran: list[int] = []
    rig.runtime.runner.deliver(rig.delivery("1"), lambda guard: ran.append(guard.attempt))
    assert ran == [1]
    assert rig.ledger.view("ship order:1").state is State.DONE  # type: ignore[union-attr]


@on_each_database
def test_what_was_claimed_meanwhile_is_not_failed(rig: SweepRig) -> None:
    """A sweep does not fail work that was claimed after the sweep read it."""
    put_orders(rig, "1")
    (found,) = rig.ledger.overdue(limit=1)

    def body(guard: Guard) -> None:
        assert rig.ledger.abandon(found, error="too late") is False

    rig.runtime.runner.deliver(rig.delivery("1"), body)
    assert rig.ledger.abandon(found, error="too late") is False
    assert rig.ledger.view("ship order:1").state is State.DONE  # type: ignore[union-attr]


class Batches:
    """A way to send whose batches are taken, or refused, where they end."""

    def __init__(self, rig: SweepRig, *, refused: bool) -> None:
        self._yard = rig
        self._refused = refused
        self.ended: list[int] = []

    def __call__(self, call: dict[str, Any], message: MessageRef) -> None:
        self._yard.send(call, message)

    @contextmanager
    def batch(self) -> Iterator[Any]:
        carried: list[tuple[dict[str, Any], MessageRef]] = []
        yield lambda call, message: carried.append((call, message))
        self.ended.append(len(carried))
        for number, (call, message) in enumerate(carried):
            if self._refused and number == 1:
                raise ConnectionError("the broker went away")
            self(call, message)


def test_what_a_batch_carried_is_noted_when_it_was_taken(rig: SweepRig) -> None:
    """Messages of a batch count as sent after the broker has accepted the batch."""
    put_orders(rig, "1", "2", "3")
    batches = Batches(rig, refused=False)
    overdue: list[int] = []
    send = rig.send

    def peek(call: dict[str, Any], message: MessageRef) -> None:
        overdue.append(len(rig.ledger.overdue(limit=9)))
        send(call, message)

    rig.send = peek  # type: ignore[method-assign]
    assert Sweeper(rig.runtime, {"test": batches}, batch=2).sweep() == Swept(sent=3)
    assert batches.ended == [2, 1]
    assert overdue == [3, 3, 1]
    assert len(rig.sent) == 3


def test_a_batch_that_is_not_taken_is_sent_one_by_one(
    rig: SweepRig, caplog: pytest.LogCaptureFixture
) -> None:
    """If a batch is refused, its messages are sent one by one, because the sweep cannot know which
    arrived."""
    put_orders(rig, "1", "2", "3")
    rig.refused = {"2"}
    swept = Sweeper(rig.runtime, {"test": Batches(rig, refused=False)}).sweep()
    assert swept == Swept(sent=2, refused=1)
    assert "one by one" in caplog.text
    assert {order for order, _, _ in rig.sent} == {"1", "3"}
    assert rig.sweep() == Swept()  # two wait for a worker, one for its next turn
    rig.refused = set()
    rig.pass_time()
    assert Sweeper(rig.runtime, {"test": Batches(rig, refused=True)}).sweep() == Swept(sent=3)


def test_a_batch_that_fails_sends_no_other_queues_messages_twice(rig: SweepRig) -> None:
    """Each queue has a batch of its own."""
    put_orders(rig, "1", "2", "3", "4")
    with rig.engine.begin() as db:
        for order in "12":
            call = json.dumps({"queue": "other", "order": order})
            db.execute(sa.update(WORK).where(WORK.c.id == f"ship order:{order}").values(call=call))
    senders = {"other": Batches(rig, refused=True), "test": Batches(rig, refused=False)}
    assert Sweeper(rig.runtime, senders).sweep() == Swept(sent=4)
    assert sorted(order for order, _, _ in rig.sent if order in "34") == ["3", "4"]


def test_a_broker_that_takes_no_batch_is_not_asked_for_every_work(rig: SweepRig) -> None:
    """If a broker accepts no batch, the sweep gives up, and nothing counts as sent."""
    orders = [str(order) for order in range(100, 130)]
    put_orders(rig, *orders)
    rig.refused = set(orders)
    swept = Sweeper(rig.runtime, {"test": Batches(rig, refused=True)}, batch=20).sweep()
    assert swept == Swept(refused=10)
    rig.refused = set()
    rig.pass_time()
    assert rig.sweep() == Swept(sent=30)


def test_calls_of_another_queue_are_left_for_its_own_sweep(rig: SweepRig) -> None:
    """Messages of another queue are counted as strange, so that an operator notices."""
    put_orders(rig, "1")
    assert Sweeper(rig.runtime, {"other": rig.send}).sweep() == Swept(strange=1)
    assert rig.sweep() == Swept(sent=1)


def test_one_sweeps_at_a_time(rig: SweepRig) -> None:
    """One sweep runs at a time, by a lease in the ledger."""
    put_orders(rig, "1")
    holds, release_lock = threading.Event(), threading.Event()

    def hold() -> None:
        with rig.runtime.lock("taskguard:sweep"):
            holds.set()
            release_lock.wait(patience_s())

    thread = threading.Thread(target=hold)
    thread.start()
    assert holds.wait(patience_s())
    with pytest.raises(KeyBusyError):
        rig.sweep()
    release_lock.set()
    thread.join()
    assert rig.sweep() == Swept(sent=1)


def test_without_a_ledger_there_is_nothing_to_sweep() -> None:
    """Without a ledger a sweep raises an error that says what is missing."""
    runtime = taskguard.connect(locks="memory://", ledger=None)
    with pytest.raises(ConfigurationError, match="TASKGUARD_LEDGER_URL"):
        Sweeper(runtime, {}).sweep()


# -- in the user's transaction ----------------------------------------------------------------


def test_a_session_that_commits_sends(rig: SweepRig) -> None:
    """Work is sent right after the session's commit."""
    with orm.Session(rig.engine) as session:
        rig.enqueue(session)
        assert rig.sent == []
        session.commit()
        assert rig.sent == [("1", 0, 0)]
        session.execute(sa.text("select 1"))
        session.commit()
    assert rig.sent == [("1", 0, 0)]
    assert rig.ledger.overdue() == []


@pytest.mark.parametrize("how", ["rollback", "close", "error"])
def test_a_session_that_does_not_commit_sends_nothing(rig: SweepRig, how: str) -> None:
    """A session that did not commit sends nothing, even when it commits something else later."""
    with orm.Session(rig.engine) as session:
        if how == "error":
            with pytest.raises(ZeroDivisionError), session.begin():
                rig.enqueue(session)
                raise ZeroDivisionError
        else:
            rig.enqueue(session)
            getattr(session, how)()
        session.execute(sa.text("select 1"))
        session.commit()
    assert rig.sent == []
    assert rig.ledger.view("ship order:1") is None


@on_each_database
def test_what_a_savepoint_took_back_is_not_sent(rig: SweepRig) -> None:
    """Work of a savepoint that was rolled back is not sent. Other work is sent after the outer
    commit."""
    with orm.Session(rig.engine) as session:
        with session.begin_nested() as inner:
            rig.enqueue(session, "1")
            inner.rollback()
        with session.begin_nested():
            rig.enqueue(session, "2")
        assert rig.sent == []
        session.commit()
    assert rig.sent == [("2", 0, 0)]


def test_on_a_connection_it_is_sent_by_hand_or_by_a_sweep(rig: SweepRig) -> None:
    """Taskguard does not learn of a connection's COMMIT: the caller or a sweep sends. After a
    rollback nothing is sent."""
    with rig.engine.connect() as db:
        first = rig.enqueue(db, "1")
        rig.enqueue(db, "2")
        db.commit()
        gone = rig.enqueue(db, "3")
        db.rollback()
        first()
        gone()
    assert rig.sent == [("1", 0, 0)]
    rig.pass_time()
    rig.sweep()
    assert [order for order, _, _ in rig.sent].count("2") == 1


def test_a_broker_that_is_away_after_the_commit_loses_nothing(rig: SweepRig) -> None:
    """If the broker is down after the commit, the caller gets no error, and a sweep sends the
    work."""
    rig.refused = {"1"}
    with orm.Session(rig.engine) as session, session.begin():
        rig.enqueue(session)
    assert rig.sent == []
    rig.refused = set()
    rig.pass_time()
    assert rig.sweep() == Swept(sent=1)


def test_without_a_session_the_work_is_committed_first(rig: SweepRig) -> None:
    """Without a session the work is committed first, and then sent. If the broker is down, a sweep
    sends it."""
    rig.enqueue(None, "1")
    assert rig.sent == [("1", 0, 0)]
    rig.refused = {"2"}
    rig.enqueue(None, "2")
    assert rig.ledger.view("ship order:2") is not None
    rig.refused = set()
    rig.pass_time()
    rig.sweep()
    assert ("2", 0, 0) in rig.sent


def test_a_message_of_work_that_is_known_is_sent_for_its_answer(rig: SweepRig) -> None:
    """A second message of known work is sent, because its caller waits for it. It gets the
    answer."""
    with orm.Session(rig.engine) as session:
        rig.enqueue(session, "1", "first")
        session.commit()
        rig.enqueue(session, "1", "second")
        session.commit()
        assert len(rig.sent) == 2
        rig.runtime.runner.deliver(rig.delivery("1", "first"), lambda guard: None)
        rig.enqueue(session, "1", "third")
        session.commit()
    assert len(rig.sent) == 3


def test_in_a_guarded_body_it_commits_with_done(rig: SweepRig) -> None:
    """Work that a body enqueues commits with DONE, on `guard.db` and on a Session bound to it."""

    def body(guard: Guard) -> None:
        with guard.transaction() as db:
            rig.enqueue(db, "2")
            with orm.Session(bind=db) as session:
                rig.enqueue(session, "3")
            assert rig.sent == []

    rig.runtime.runner.deliver(rig.delivery("1"), body)
    assert sorted(order for order, _, _ in rig.sent) == ["2", "3"]

    def refused(guard: Guard) -> None:
        with guard.transaction() as db:
            rig.enqueue(db, "5")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        rig.runtime.runner.deliver(rig.delivery("4"), refused)
    assert rig.ledger.view("ship order:5") is None
    assert len(rig.sent) == 2


def test_a_scoped_session_is_its_session(rig: SweepRig) -> None:
    """A scoped session is accepted."""
    session = orm.scoped_session(orm.sessionmaker(rig.engine))
    rig.enqueue(session)
    session.commit()
    session.remove()
    assert rig.sent == [("1", 0, 0)]


def test_what_is_no_session_is_refused(rig: SweepRig) -> None:
    """An Engine is refused, because it has no transaction."""
    with pytest.raises(ConfigurationError, match="Session or Connection"):
        rig.enqueue(rig.engine)


def test_after_commit_is_called_for_what_committed(rig: SweepRig) -> None:
    """`guard.after_commit()` is called after each commit of a checkpoint or a transaction, and not
    after a rollback."""
    called: list[str] = []

    def body(guard: Guard) -> None:
        with guard.checkpoint(1):
            guard.after_commit(lambda: called.append("checkpoint"))
        assert called == ["checkpoint"]
        with pytest.raises(ZeroDivisionError), guard.transaction():
            guard.after_commit(lambda: called.append("never"))
            raise ZeroDivisionError
        with guard.transaction():
            guard.after_commit(lambda: called.append("done"))

    rig.runtime.runner.deliver(rig.delivery(), body)
    assert called == ["checkpoint", "done"]


def test_calls_that_can_never_be_sent_hold_up_no_other(rig: SweepRig) -> None:
    """Messages that can never be sent go behind the others, and are tried again later."""
    poison = [str(order) for order in range(100, 125)]
    put_orders(rig, *poison)
    put_orders(rig, "200")
    rig.refused = set(poison)
    for _ in range(3):
        rig.sweep()
    assert rig.sent == [("200", 0, 0)]
    rig.refused = set()
    rig.pass_time()
    assert rig.sweep() == Swept(sent=26)


def test_a_sweep_ends(rig: SweepRig) -> None:
    """A sweep does not send a message twice, however soon it is overdue again."""
    put_orders(rig, "1", "2", "3")
    with pytest.raises(ConfigurationError, match="again_after_s"):
        rig.sweep(again_after_s=0)


@on_each_database
def test_a_savepoint_takes_back_the_message_of_work_that_is_known(rig: SweepRig) -> None:
    """If a savepoint is rolled back, the earlier record of its work is unchanged."""

    def fail(guard: Guard) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        rig.runtime.runner.deliver(rig.delivery("1", "first"), fail)
    with orm.Session(rig.engine) as session:
        with session.begin_nested() as outer:
            with session.begin_nested():
                rig.enqueue(session, "1")
            outer.rollback()
        with session.begin_nested():
            rig.enqueue(session, "2")
        session.commit()
    assert rig.sent == [("2", 0, 0)]
    assert rig.ledger.view("ship order:1").state.value == "FAILED"


@on_each_database
@pytest.mark.parametrize("on", ["session", "connection"])
def test_in_a_guarded_transaction_on_ones_own_it_commits_with_done(rig: SweepRig, on: str) -> None:
    """On a lent session or connection, work is sent once after DONE. After an error it is not
    sent."""
    own: Any = orm.Session(rig.engine) if on == "session" else rig.engine.connect()

    def body(guard: Guard) -> None:
        with guard.transaction(own):
            rig.enqueue(own, "2")
            assert rig.sent == []
        assert guard.completed

    def refused(guard: Guard) -> None:
        with guard.transaction(own):
            rig.enqueue(own, "4")
            raise ZeroDivisionError

    with own:
        rig.runtime.runner.deliver(rig.delivery("1"), body)
        assert rig.sent == [("2", 0, 0)]
        with pytest.raises(ZeroDivisionError):
            rig.runtime.runner.deliver(rig.delivery("3"), refused)
        own.execute(sa.text("select 1"))
        own.commit()
    assert rig.sent == [("2", 0, 0)]
    assert rig.ledger.view("ship order:4") is None


def test_an_error_after_the_commit_takes_nothing_back(rig: SweepRig) -> None:
    """An error after the commit is the body's. DONE stays, and a sweep sends what was not sent."""

    def body(guard: Guard) -> None:
        with guard.transaction() as db:
            guard.after_commit(lambda: 1 / 0)
            rig.enqueue(db, "2")

    with pytest.raises(ZeroDivisionError):
        rig.runtime.runner.deliver(rig.delivery("1"), body)
    assert rig.ledger.view("ship order:1").state.value == "DONE"
    rig.pass_time()
    rig.sweep()
    assert rig.sent == [("2", 0, 0)]
