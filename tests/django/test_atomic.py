"""`taskguard_django.atomic()`: Django's own transaction with DONE in it, or nothing of either."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import sqlalchemy as sa

import taskguard
from support.claims import overtake
from support.django_shop import django_on
from support.guarded_shop import NotingQueue
from support.proxy import Mode, Proxy
from support.threads import at_once
from support.waiting import patience_s
from taskguard import Guard
from taskguard.errors import (
    ConfigurationError,
    StaleTokenError,
    TransactionRetryError,
    TransactionUsageError,
)
from taskguard.integration import Delivery, MessageRef, Policy

PARTS = "packed", "shipped"


@dataclass
class DjangoRig:
    """`taskguard.connect()` by Django's settings, and what an onlooker sees."""

    url: str
    tg: Any = None
    queue: NotingQueue = field(default_factory=NotingQueue)

    def __post_init__(self) -> None:
        self.tg = taskguard.connect()
        self.engine = sa.create_engine(self.url)

    @property
    def ledger(self) -> Any:
        return self.tg.ledger

    def deliver(self, body: Any, deferrals: int = 0) -> Any:
        delivery = Delivery(
            keys=("order:1",),
            work="ship order:1",
            task="ship",
            message=MessageRef("m", deferrals=deferrals),
            policy=Policy(),
            queue=self.queue,
        )
        return self.tg.runner.deliver(delivery, body)

    def seen(self, select: str) -> list[Any]:
        with self.engine.connect() as db:
            return list(db.execute(sa.text(select)).scalars())

    @property
    def effects(self) -> list[str]:
        return self.seen("select item from django_orders_effect order by id")

    @property
    def states(self) -> list[str]:
        return self.seen("select state from taskguard_work")


@pytest.fixture(params=["pg_url", "sqlite_url"])
def rig(request: pytest.FixtureRequest) -> Iterator[DjangoRig]:
    yield from _runtime(request.getfixturevalue(request.param))


@pytest.fixture
def pg(pg_url: str) -> Iterator[DjangoRig]:
    yield from _runtime(pg_url)


def _runtime(url: str, **others: str) -> Iterator[DjangoRig]:
    with django_on(default=url, **others):
        made = DjangoRig(url)
        yield made
        made.engine.dispose()


def write(item: str = "x") -> None:
    from support.django_orders.models import Effect

    Effect.objects.create(item=item)


def test_effects_and_done_commit_together(rig: DjangoRig) -> None:
    """Writes of Django's ORM commit with DONE, and a duplicate gets the stored result."""
    from taskguard_django import atomic

    def body(guard: Guard) -> None:
        with atomic() as given:
            assert given is guard
            write()
            guard.result = "shipped"
            assert (rig.effects, rig.states) == ([], ["PROCESSING"])
            assert guard.db.execute(sa.text("select count(*) from django_orders_effect")).scalar()
        assert guard.completed

    for _ in range(2):
        outcome: Any = rig.deliver(body)
        assert outcome.value == "shipped"
    assert (rig.effects, rig.states) == (["x"], ["DONE"])
    write("later")  # the connection is good for more, and commits each statement again
    assert rig.effects == ["x", "later"]


def test_a_body_that_fails_writes_nothing(rig: DjangoRig) -> None:
    """If the body fails, there is neither effect nor DONE, and the next delivery does the work."""
    from taskguard_django import atomic

    def fails(guard: Guard) -> None:
        with atomic():
            write()
            raise ZeroDivisionError

    def works(guard: Guard) -> None:
        with atomic():
            write("second")

    with pytest.raises(ZeroDivisionError):
        rig.deliver(fails)
    assert (rig.effects, rig.states) == ([], ["FAILED"])
    rig.deliver(works)
    assert (rig.effects, rig.states) == (["second"], ["DONE"])


def test_a_holder_that_was_overtaken_writes_nothing(rig: DjangoRig) -> None:
    """The effects of an overtaken holder are rolled back."""
    from taskguard_django import atomic

    heard: list[BaseException] = []

    def body(guard: Guard) -> None:
        one_writer = rig.engine.dialect.name == "sqlite"
        if one_writer:
            overtake(rig)
        try:
            with atomic():
                write()
                if not one_writer:
                    overtake(rig)
        except StaleTokenError as error:
            heard.append(error)
            raise

    rig.deliver(body)
    assert (rig.effects, rig.states, len(heard)) == ([], ["PROCESSING"], 1)


def test_a_savepoint_may_fail_and_another_one_stay(rig: DjangoRig) -> None:
    """Within the block, `transaction.atomic()` is a savepoint of Django's."""
    from django.db import IntegrityError, transaction

    from support.django_orders.models import Effect
    from taskguard_django import atomic

    def body(guard: Guard) -> None:
        with atomic():
            with transaction.atomic():
                write("kept")
            with pytest.raises(IntegrityError), transaction.atomic():
                write("dropped")
                Effect.objects.create(item=None)
            write("kept, too")

    rig.deliver(body)
    assert (rig.effects, rig.states) == (["kept", "kept, too"], ["DONE"])


def test_what_django_would_roll_back_is_not_done(rig: DjangoRig) -> None:
    """After `set_rollback(True)`, or a caught error in a block without a savepoint, the work is not
    DONE."""
    from django.db import transaction

    from taskguard_django import atomic

    def asks(guard: Guard) -> None:
        with atomic():
            write()
            transaction.set_rollback(True)

    def catches(guard: Guard) -> None:
        with atomic():
            write()
            try:
                with transaction.atomic(savepoint=False):
                    raise ZeroDivisionError
            except ZeroDivisionError:
                pass

    def closes(guard: Guard) -> None:
        with atomic():
            write()
            transaction.get_connection().close()

    for body in (asks, catches, closes):
        with pytest.raises(TransactionUsageError):
            rig.deliver(body)
        assert (rig.effects, rig.states) == ([], ["FAILED"])
    write("later")
    assert rig.effects == ["later"]


def test_a_commit_in_sql_is_noticed(rig: DjangoRig) -> None:
    """Writes before a COMMIT in SQL stay, and the work is not DONE. The error says so."""
    from django.db import connection

    from taskguard_django import atomic

    def body(guard: Guard) -> None:
        with atomic():
            write("before")
            with connection.cursor() as cursor:
                cursor.execute("commit")
            write("after")

    with pytest.raises(TransactionUsageError):
        rig.deliver(body)
    assert rig.states == ["FAILED"]
    assert "before" in rig.effects


def test_the_block_refuses_a_commit(rig: DjangoRig) -> None:
    """A commit in the block raises Django's own error."""
    from django.db import transaction

    from taskguard_django import atomic

    def body(guard: Guard) -> None:
        with atomic():
            write()
            transaction.commit()

    with pytest.raises(transaction.TransactionManagementError):
        rig.deliver(body)
    assert (rig.effects, rig.states) == ([], ["FAILED"])


def test_a_block_within_atomic_is_refused(rig: DjangoRig) -> None:
    """A block within `transaction.atomic()` is refused, because the outer block would decide.
    Earlier writes are left alone."""
    from django.db import transaction

    from taskguard_django import atomic

    def body(guard: Guard) -> None:
        with transaction.atomic(), atomic():
            write()

    with pytest.raises(TransactionUsageError, match="ATOMIC_REQUESTS"):
        rig.deliver(body)
    assert (rig.effects, rig.states) == ([], ["FAILED"])


def test_hooks_run_once_done_is_committed(rig: DjangoRig) -> None:
    """Hooks of `on_commit()` and of `guard.after_commit()` run after DONE. An error of a hook
    leaves DONE."""
    from django.db import transaction

    from taskguard_django import atomic

    seen: list[Any] = []

    def body(guard: Guard) -> None:
        try:
            with atomic():
                write()
                transaction.on_commit(lambda: seen.append(rig.states))
                guard.after_commit(lambda: seen.append("after"))
                transaction.on_commit(lambda: 1 // 0)
        except ZeroDivisionError:
            seen.append(guard.completed)

    rig.deliver(body)
    assert seen == [["DONE"], "after", True]
    assert (rig.effects, rig.states) == (["x"], ["DONE"])


def test_a_constraint_that_fails_at_commit_is_the_bodys_error(rig: DjangoRig) -> None:
    """A constraint that fails at COMMIT is the body's error, and the connection can go on."""
    from django.db import IntegrityError, connection

    from taskguard_django import atomic

    with connection.cursor() as cursor:
        cursor.execute("create table parents (id integer primary key)")
        cursor.execute(
            "create table children (parent integer references parents (id) "
            "deferrable initially deferred)"
        )

    def body(guard: Guard) -> None:
        with atomic(), connection.cursor() as cursor:
            write()
            cursor.execute("insert into children values (5)")

    with pytest.raises(IntegrityError):
        rig.deliver(body)
    assert (rig.effects, rig.states) == ([], ["FAILED"])
    write("later")
    assert rig.effects == ["later"]


def test_a_connection_of_another_driver_is_refused(pg: DjangoRig) -> None:
    """A connection of another driver is refused, because the ledger's statements could not use
    it."""
    from taskguard.ledger.transactions.external import on_external
    from taskguard_django import connection

    engine = sa.create_engine("sqlite://")
    with pytest.raises(ConfigurationError, match="same driver"):
        on_external(engine, connection())
    engine.dispose()


def test_a_hook_may_run_a_guarded_body_on_the_same_connection(rig: DjangoRig) -> None:
    """A hook may run a guarded body on the same connection, because the outer transaction has
    ended."""
    from django.db import transaction

    from taskguard_django import atomic

    @rig.tg.guarded(key="bill:<n>")
    def bill(n: int) -> None:
        with atomic():
            write(f"billed {n}")

    @rig.tg.guarded(key="order:<n>")
    def ship(n: int) -> None:
        with atomic():
            write(f"shipped {n}")
            transaction.on_commit(lambda: bill(n))

    ship(1)
    assert (rig.effects, rig.states) == (["shipped 1", "billed 1"], ["DONE", "DONE"])


def test_threads_share_a_ledger_and_each_has_its_connection(pg: DjangoRig) -> None:
    """Six threads do the same work items, and each has one effect."""
    from django.db import connections

    from taskguard_django import atomic, checkpoint

    @pg.tg.guarded(key="order:<n>", busy="wait", wait_s=60)
    def ship(n: int) -> None:
        with checkpoint("packed"):
            write(f"packed {n}")
        with atomic():
            write(f"shipped {n}")

    def run(_: int) -> None:
        try:
            for n in range(8):
                ship(n)
        finally:
            connections.close_all()

    at_once(6, run)
    assert sorted(pg.effects) == sorted(f"{done} {n}" for n in range(8) for done in PARTS)


def test_parts_commit_with_their_progress(rig: DjangoRig) -> None:
    """A checkpoint commits a part with its progress, from which a later attempt goes on."""
    from taskguard_django import atomic, checkpoint

    def body(guard: Guard) -> None:
        for part in range(guard.progress or 0, 3):
            with checkpoint(part + 1):
                write(f"part {part}")
            if part == 1 and guard.attempt == 1:
                raise ZeroDivisionError
        with atomic():
            write("end")

    with pytest.raises(ZeroDivisionError):
        rig.deliver(body)
    rig.deliver(body)
    assert rig.effects == ["part 0", "part 1", "part 2", "end"]
    assert rig.states == ["DONE"]


def test_several_keys_complete_on_it_too(rig: DjangoRig) -> None:
    """Work with several keys completes in the block, too."""
    from taskguard_django import atomic

    @rig.tg.guarded(key=["order:<n>", "account:<n>"])
    def ship(n: int) -> None:
        with atomic():
            write(f"{n}")

    ship(1)
    assert (rig.effects, rig.states) == (["1"], ["DONE"])


@pytest.mark.parametrize("kind", ["same", "another"])
def test_another_database_is_refused_with_the_reason(
    postgres: Any, pg_url: str, sqlite_url: str, kind: str
) -> None:
    """A block on another database is refused, because two databases do not commit together."""
    from taskguard_django import atomic

    other = postgres.create_database("django_other") if kind == "same" else sqlite_url
    with django_on(default=pg_url, other=other):
        rig = DjangoRig(pg_url)

        def body(guard: Guard) -> None:
            with atomic(using="other"):
                raise AssertionError("unreachable")

        with pytest.raises(ConfigurationError, match=r"not of the ledger's.*guard\.fenced"):
            rig.deliver(body)
        assert rig.states == ["FAILED"]
        rig.engine.dispose()
    if kind == "same":
        postgres.drop_database("django_other")


def test_outside_a_guarded_body_it_is_refused(rig: DjangoRig) -> None:
    """Outside a guarded body the block is refused."""
    from taskguard_django import atomic

    with pytest.raises(TransactionUsageError, match=r"taskguard_django\.atomic"), atomic():
        write()
    assert rig.effects == []


def test_a_commit_that_got_no_answer_is_resolved(postgres: Any, pg_url: str) -> None:
    """If a COMMIT that happened gets no answer, the ledger reads the record, and the body does not
    run again."""
    from django.db import connections

    from taskguard_django import atomic

    runs: list[int] = []
    with Proxy(postgres.port) as proxy, django_on(default=pg_url):
        rig = DjangoRig(pg_url)
        connections["default"].close()
        connections["default"].settings_dict["PORT"] = proxy.port
        connections["default"].settings_dict["HOST"] = "127.0.0.1"

        def body(guard: Guard) -> str:
            runs.append(1)
            with atomic():
                write()
                proxy.lose_reply_to(b"COMMIT", then=Mode.CUT)
            return "shipped"

        outcome: Any = rig.deliver(body)
        assert proxy.lost > 0
        assert (outcome.value, len(runs)) == ("shipped", 1)
        assert (rig.effects, rig.states) == (["x"], ["DONE"])
        rig.engine.dispose()


def test_a_deadlock_runs_the_body_again(pg: DjangoRig) -> None:
    """After a deadlock the body runs again."""
    from django.db import connection

    from taskguard_django import atomic

    with pg.engine.begin() as db:
        db.execute(sa.text("create table rivals (id int primary key, n int)"))
        db.execute(sa.text("insert into rivals values (1, 0), (2, 0)"))
    heard: list[BaseException] = []
    update = "update rivals set n = n + 1 where id = "

    def rival(locked: threading.Event, go: threading.Event) -> None:
        with pg.engine.begin() as db:
            db.execute(sa.text("set local deadlock_timeout = '60s'"))
            db.execute(sa.text(update + "2"))
            locked.set()
            go.wait(patience_s())
            db.execute(sa.text(update + "1"))

    def body(guard: Guard) -> None:
        locked, go = threading.Event(), threading.Event()
        thread = threading.Thread(target=rival, args=(locked, go))
        if not heard:
            thread.start()
            assert locked.wait(patience_s())
        try:
            with atomic(), connection.cursor() as cursor:
                cursor.execute("set local deadlock_timeout = '100ms'")
                cursor.execute(update + "1")
                go.set()
                cursor.execute(update + "2")
                write()
        except TransactionRetryError as error:
            heard.append(error)
            raise
        finally:
            if thread.is_alive():
                thread.join(patience_s())

    pg.deliver(body)
    assert (len(heard), pg.effects, pg.states) == (1, ["x"], ["DONE"])


def test_a_server_that_was_restarted_costs_one_delivery(pg: DjangoRig) -> None:
    """If a restart broke Django's connection, one delivery is deferred, and the next one does the
    work."""
    from django.db import connection

    from taskguard_django import atomic

    def body(guard: Guard) -> None:
        with atomic():
            write()

    with connection.cursor() as cursor:
        cursor.execute("select pg_backend_pid()")
        pid = cursor.fetchone()[0]
    pg.seen(f"select pg_terminate_backend({pid})")
    pg.deliver(body)
    assert (pg.effects, pg.states, pg.queue.deferrals) == ([], ["NEW"], [1])
    pg.deliver(body, deferrals=1)
    assert (pg.effects, pg.states) == (["x"], ["DONE"])


@pytest.mark.parametrize("level", ["REPEATABLE_READ", "SERIALIZABLE"])
def test_no_plain_call_is_lost_at_a_higher_level(pg: DjangoRig, level: str) -> None:
    """At a higher isolation level, serialization failures run the body again under the same
    lease."""
    from django.db import connections
    from psycopg import IsolationLevel

    from support.django_orders.models import Effect
    from taskguard_django import atomic

    write("0")
    options = connections.settings["default"].setdefault("OPTIONS", {})
    options["isolation_level"] = IsolationLevel[level]

    @pg.tg.guarded(key="order:<n>")
    def ship(n: int, guard: Guard) -> None:
        with atomic():
            [counter] = Effect.objects.all()
            counter.item = str(int(counter.item) + 1)
            time.sleep(0.02)
            counter.save()

    def call(caller: int) -> None:
        try:
            for number in range(4):
                ship(100 * caller + number)
        finally:
            connections["default"].close()

    at_once(6, call)
    assert (pg.effects, pg.states) == (["24"], ["DONE"] * 24)


@pytest.mark.parametrize("called", ["atomic", "checkpoint"])
def test_outside_a_body_the_error_names_what_was_called(called: str) -> None:
    """The error names the called function, and not `current_guard()`, which the user did
    not call."""
    import taskguard_django

    arguments = ({"page": 1},) if called == "checkpoint" else ()
    with pytest.raises(TransactionUsageError, match=rf"taskguard_django\.{called}\(\)") as caught:
        with getattr(taskguard_django, called)(*arguments):
            pass
    assert "current_guard" not in str(caught.value)
