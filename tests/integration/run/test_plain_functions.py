"""Locks and guarded plain functions on real servers, through `taskguard.connect()` alone."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import sqlalchemy as sa

import taskguard
from support.claims import end_leases
from support.threads import at_once
from support.waiting import wait_until
from taskguard import Guard, TaskGuard
from taskguard.errors import (
    ConfigurationError,
    KeyAlreadyHeldError,
    KeyBusyError,
    LedgerUnavailableError,
    ResultError,
    StaleTokenError,
    TransactionUsageError,
)
from taskguard.events import Event
from taskguard.integration import UNSET
from taskguard.ledger.sql import SqlLedger
from taskguard_sandbox.servers import Postgres


class Application:
    """A TaskGuard with its database, effects table and events."""

    def __init__(self, locks: str, ledger_url: str) -> None:
        self.locks_url = locks
        self.ledger = SqlLedger(ledger_url)
        self.ledger.create_schema()
        self.events: list[Event] = []
        self.tg: TaskGuard = taskguard.connect(
            locks=locks, ledger=self.ledger, listeners=(self.events.append,)
        )
        self.engine = sa.create_engine(ledger_url)
        with self.engine.begin() as db:
            # No unique index: the test has to see a double effect.
            db.execute(sa.text("create table effects (item text, fence bigint)"))

    def effects(self) -> Counter[str]:
        with self.engine.connect() as db:
            return Counter(db.execute(sa.text("select item from effects")).scalars())

    def names(self) -> Counter[str]:
        return Counter(event.name for event in self.events)

    def close(self) -> None:
        self.tg.close()
        self.engine.dispose()


def effect(db: Any, item: object, guard: Guard) -> None:
    db.execute(
        sa.text("insert into effects values (:item, :fence)"),
        {"item": str(item), "fence": guard.fence},
    )


@pytest.fixture(params=["pg_url", "sqlite_url"])
def app(request: pytest.FixtureRequest, redis_url: str) -> Iterator[Application]:
    made = Application(redis_url, request.getfixturevalue(request.param))
    yield made
    made.close()


def test_many_callers_one_effect_and_one_answer(app: Application) -> None:
    """Eight threads call each of ten work items: each has one effect, and every caller gets its
    result."""

    @app.tg.guarded(key="order:<order>", busy="wait", wait_s=30)
    def ship(order: int, guard: Guard) -> dict[str, int]:
        with guard.transaction() as db:
            effect(db, order, guard)
        return {"order": order}

    wrong: list[Any] = []

    def call_all(_: int) -> None:
        wrong.extend(got for order in range(10) if (got := ship(order)) != {"order": order})

    at_once(8, call_all)
    assert wrong == []
    assert app.effects() == Counter({str(order): 1 for order in range(10)})


def test_several_keys_name_the_work_in_the_order_of_their_templates(app: Application) -> None:
    """The same two keys in another order are other work, although both lock the same accounts."""

    @app.tg.guarded(key=["account:<src>", "account:<dst>"])
    def transfer(src: int, dst: int, guard: Guard) -> str:
        with guard.transaction() as db:
            effect(db, f"{src} to {dst}", guard)
            guard.result = f"{src} to {dst}"
        return ""

    assert [transfer(1, 2), transfer(2, 1), transfer(1, 2)] == ["1 to 2", "2 to 1", "1 to 2"]
    assert app.effects() == Counter({"1 to 2": 1, "2 to 1": 1})


def test_a_body_that_raises_writes_nothing_and_may_run_again(app: Application) -> None:
    """If a body raises, its writes are rolled back, the work is FAILED, and the next call does
    it."""
    attempts: list[int] = []

    @app.tg.guarded(key="order:<order>")
    def ship(order: int, guard: Guard) -> str:
        attempts.append(guard.attempt)
        with guard.transaction() as db:
            effect(db, order, guard)
            if guard.attempt == 1:
                raise ValueError("no stock")
        return "shipped"

    with pytest.raises(ValueError, match="no stock"):
        ship(1)
    assert app.effects() == Counter()
    assert ship(1) == "shipped"
    assert attempts == [1, 2]
    assert app.effects() == Counter({"1": 1})


def test_a_stale_holder_is_refused_and_gets_the_winners_result(app: Application) -> None:
    """If another call takes over, the late holder writes nothing, and returns the stored result."""

    @app.tg.guarded(key="order:<order>")
    def ship(order: int, guard: Guard) -> str:
        if guard.attempt == 1:
            _freeze(app)
            other: list[Any] = []
            thread = threading.Thread(target=lambda: other.append(ship(order)))
            thread.start()
            thread.join()
            assert other == ["by attempt 2"]
        with guard.transaction() as db:
            effect(db, f"{order} by {guard.attempt}", guard)
        return f"by attempt {guard.attempt}"

    assert ship(7) == "by attempt 2"
    assert app.effects() == Counter({"7 by 2": 1})
    assert app.names()["stale_refused"] == 1
    assert app.names()["takeover"] == 1


def _freeze(app: Application) -> None:
    """Expire all leases at the watchdog, the lock server and the ledger, as if this process had
    been paused."""
    watchdog = app.tg.runner.watchdog
    with watchdog._mutex:
        watchdog._tracked.clear()
    with redis.Redis.from_url(app.locks_url) as client:
        client.flushdb()
    end_leases(app.engine)


def test_swallowing_the_refusal_does_not_help(app: Application) -> None:
    """A body that catches StaleTokenError and returns is still answered from the record."""

    @app.tg.guarded(key="order:<order>")
    def ship(order: int, guard: Guard) -> str:
        if guard.attempt == 1:
            _freeze(app)
            thread = threading.Thread(target=lambda: ship(order))
            thread.start()
            thread.join()
        try:
            with guard.transaction() as db:
                effect(db, guard.attempt, guard)
        except StaleTokenError:
            return "swallowed"
        return "done"

    assert ship(7) == "done"
    assert app.effects() == Counter({"2": 1})


def test_checkpoints_commit_progress_without_completing(app: Application) -> None:
    """A checkpoint commits progress, from which the next attempt goes on."""

    @app.tg.guarded(key="import:<name>")
    def load(name: str, guard: Guard) -> int:
        start = guard.progress["page"] if guard.progress else 0
        for page in range(start, 4):
            with guard.checkpoint({"page": page + 1}) as db:
                effect(db, f"page {page}", guard)
            if page == 1 and guard.attempt == 1:
                raise RuntimeError("network")
        return start

    with pytest.raises(RuntimeError):
        load("a")
    assert load("a") == 2
    assert app.effects() == Counter({f"page {page}": 1 for page in range(4)})


def test_atomic_commits_the_return_value_with_the_effects(app: Application) -> None:
    """With `atomic=True`, the whole body runs in the transaction of `guard.db`."""

    @app.tg.guarded(key="account:<a>", atomic=True)
    def move(a: int, guard: Guard) -> dict[str, int]:
        effect(guard.db, a, guard)
        return {"moved": 3}

    assert move(1) == move(1) == {"moved": 3}
    view = app.ledger.view(f"{move.__module__}.{move.__qualname__} account:1")
    assert view is not None
    assert view.result_json == '{"moved":3}'


def test_a_result_that_is_not_json_is_an_error_before_anything_is_written(app: Application) -> None:
    """A result that is not JSON raises in the transaction, with what to do, and nothing is
    written."""

    @app.tg.guarded(key="order:<order>")
    def ship(order: int, guard: Guard) -> None:
        with guard.transaction() as db:
            effect(db, order, guard)
            guard.result = object()

    with pytest.raises(ResultError, match="not JSON"):
        ship(1)
    assert app.effects() == Counter()


def test_a_second_transaction_names_checkpoint(app: Application) -> None:
    """A second transaction raises an error that names `checkpoint()`."""

    @app.tg.guarded(key="order:<order>")
    def ship(order: int, guard: Guard) -> None:
        with guard.transaction() as db:
            effect(db, 1, guard)
        with guard.transaction() as db:
            effect(db, 2, guard)

    with pytest.raises(TransactionUsageError, match="checkpoint"):
        ship(1)
    assert app.effects() == Counter({"1": 1})


def test_asking_for_a_key_that_is_held_here_is_an_error_at_once(app: Application) -> None:
    """A call for a key that its caller holds raises at once, because it would wait for itself."""

    @app.tg.guarded(key="order:<order>")
    def outer(order: int) -> None:
        with app.tg.lock(f"order:{order}", wait_s=60):
            pass

    with pytest.raises(KeyAlreadyHeldError, match="order:5"):
        outer(5)


def test_the_plain_lock_excludes_and_its_fence_grows(app: Application) -> None:
    """A second taker of a plain lock is refused, or waits. Fences come from the ledger, and
    grow."""
    with app.tg.lock("inventory:42", ttl_s=5) as first:
        refused: list[Exception] = []

        def take() -> None:
            try:
                with app.tg.lock("inventory:42"):
                    pass
            except KeyBusyError as error:
                refused.append(error)

        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        assert len(refused) == 1
        first.check()
    with app.tg.lock("inventory:42", wait_s=5) as second:
        assert second.fence > first.fence


@pytest.mark.parametrize(
    ("locks", "ledger", "said"),
    [
        (None, None, "nothing would be guarded"),
        ("redis://localhost:1", UNSET, "TASKGUARD_LEDGER_URL"),
        ("http://:secret@localhost", None, "redis, rediss"),
        ("memory://", "postgres://u:secret@h/d", "postgresql"),
        ("memory://", "oracle+nosuch://u:secret@h/d", "ledger"),
        ("memory://", "::secret::", "URL"),
        (42, None, "locks=int"),
    ],
)
def test_wrong_settings_say_what_to_write_and_hold_no_password(
    locks: Any, ledger: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong settings raise a ConfigurationError that says what to write, and shows no password."""
    monkeypatch.delenv("TASKGUARD_LEDGER_URL", raising=False)
    with pytest.raises(ConfigurationError, match=said) as caught:
        taskguard.connect(locks=locks, ledger=ledger)
    assert "secret" not in str(caught.value)


def test_an_outage_of_the_database_is_no_crash_of_its_holders(redis_url: str) -> None:
    """If an outage kept a holder from reporting its end, its expired lease counts as no crash."""
    with Postgres(fsync="off") as server:
        app = Application(redis_url, server.create_database("app"))

        @app.tg.guarded(key="order:<order>", ttl_s=3.0, max_crashes=2)
        def ship(order: int, guard: Guard) -> int:
            if guard.attempt < 4:
                server.halt()
            with guard.transaction():
                return guard.attempt

        def expired() -> bool:
            with app.engine.connect() as db:
                return bool(db.execute(sa.text(EXPIRED)).scalar())

        for _ in range(3):
            with pytest.raises(LedgerUnavailableError):
                ship(1)
            server.start()
            app.engine.dispose()
            wait_until(expired)
        assert ship(1) == 4
        with app.engine.connect() as db:
            assert db.execute(sa.text("select crashes from taskguard_work")).scalar() == 0
        app.close()


EXPIRED = """
select bool_and(lease_until < extract(epoch from clock_timestamp()) * 1000000)
from taskguard_work
"""
