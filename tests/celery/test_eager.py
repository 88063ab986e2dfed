"""Without a worker: eager mode, `.apply()`, and calling the task like a function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery, Task, chain

import taskguard_celery
from taskguard import Guard
from taskguard.errors import KeyAlreadyHeldError, KeyBusyError, LedgerUnavailableError
from taskguard.ledger.tables import WORK
from taskguard_celery import enqueue, guarded_task, runtime_of


@pytest.fixture
def eager_shop(make_shop: Any) -> Any:
    """A shop whose tasks run where they are sent."""
    return make_shop(SHOP_SETTINGS='{"task_always_eager": true, "task_eager_propagates": true}')


def test_eager_calls_are_guarded(eager_shop: Any) -> None:
    """The second order of the same number is answered with the stored result."""
    ship = eager_shop.tasks.ship
    assert ship.delay(1).get() == {"order": 1}
    assert ship.delay(1).get() == {"order": 1}
    assert eager_shop.effects() == Counter({"1": 1})


def test_apply_and_plain_calls_are_guarded(shop: Any) -> None:
    """Both go the same way as a message."""
    assert shop.tasks.ship.apply((2,)).get() == {"order": 2}
    assert shop.tasks.ship(2) == {"order": 2}
    assert shop.tasks.ship.run(2) == {"order": 2}
    assert shop.effects() == Counter({"2": 1})


def test_eager_retries_go_on(shop: Any) -> None:
    """bind=True and autoretry_for, as on a worker."""
    assert shop.tasks.flaky.apply((3,)).get() == 2
    assert shop.tasks.auto.apply((4,)).get() == 2
    assert shop.effects() == Counter({"3": 1, "4": 1})


def test_a_taken_key_is_an_error_where_nothing_can_be_put_off(eager_shop: Any) -> None:
    """Nothing was run, and the caller is told."""
    with (
        runtime_of(eager_shop.tasks.app).lock("order:5"),
        ThreadPoolExecutor(1) as another,
        pytest.raises(KeyBusyError, match="order:5"),
    ):
        another.submit(eager_shop.tasks.ship.delay, 5).result()
    assert not eager_shop.effects()


def test_a_body_that_calls_its_own_task_calls_a_function(shop: Any) -> None:
    """It is work of its own, not the message in hand once more."""
    assert shop.tasks.nest.apply((3,)).get() == 6
    assert shop.effects() == Counter({"3": 1, "2": 1, "1": 1})


def test_an_absent_database_is_an_error_where_nothing_can_be_put_off(make_shop: Any) -> None:
    """Instead of running without it."""
    shop = make_shop(SHOP_LEDGER="postgresql+psycopg://shop@127.0.0.1:1/shop")
    with pytest.raises(LedgerUnavailableError):
        shop.tasks.ship.apply((6,), throw=True)
    assert not shop.effects()


def test_arguments_are_checked_before_anything_is_sent(shop: Any) -> None:
    """Arguments are checked by the function's signature without `guard`."""
    with pytest.raises(TypeError):
        shop.tasks.ship.delay()
    with pytest.raises(TypeError):
        shop.tasks.ship.delay(1, guard=None)


class TestOwnKey:
    """A body sends a message for the key that it holds itself."""

    @pytest.fixture
    def app(self, tmp_path: Path) -> Iterator[Celery]:
        app = Celery("app", broker="memory://", backend="cache+memory://", set_as_current=False)
        app.conf.task_always_eager = True
        ledger = f"sqlite:///{tmp_path / 'ledger'}"
        taskguard_celery.configure(app, locks="memory://", ledger=ledger)
        runtime_of(app).ledger.create_schema()  # type: ignore[union-attr]
        yield app
        runtime_of(app).close()
        app.close()

    @staticmethod
    def counting(app: Celery, send: Callable[[Task, int], object], **options: Any) -> Any:
        """A task that sends its next message, down to 0; what it saw is in its attribute `saw`."""
        saw: list[str] = []

        @app.task(name="count", shared=False)
        @guarded_task(key="count", once_per="message", **options)
        def count(number: int, guard: Guard) -> int:
            saw.append(f"begins {number}")
            if number == 0:
                raise ValueError("the last one fails")
            send(count, number - 1)
            saw.append(f"ends {number}")
            return number

        count.saw = saw
        return count

    @pytest.mark.parametrize("how", ["delay", "enqueue", "call"])
    def test_it_runs_after_that_body(self, app: Celery, how: str) -> None:
        """One after the other, as on a worker; an error of the last one is its own."""
        count = self.counting(app, send_by(how))
        assert (count(2) if how == "call" else count.delay(2).get()) == 2
        assert count.saw == ["begins 2", "ends 2", "begins 1", "ends 1", "begins 0"]
        states = [row.state for row in records(app)]
        assert sorted(states) == ["DONE", "DONE", "FAILED"]

    def test_its_error_is_propagated(self, app: Celery) -> None:
        """With task_eager_propagates, once all of them have ended."""
        app.conf.task_eager_propagates = True
        count = self.counting(app, send_by("delay"))
        with pytest.raises(ValueError, match="the last one fails"):
            count.delay(1)
        assert count.saw == ["begins 1", "ends 1", "begins 0"]

    def test_where_there_is_room_it_runs_at_once(self, app: Celery) -> None:
        """As any other eager call."""
        count = self.counting(app, send_by("delay"), limit=4)
        assert count.delay(2).get() == 2
        assert count.saw == ["begins 2", "begins 1", "begins 0", "ends 1", "ends 2"]

    @pytest.mark.parametrize("limit", [1, 3])
    def test_the_same_work_is_answered_after_that_body(self, app: Celery, limit: int) -> None:
        """As on a worker, also where `limit=` has room."""
        ran: list[int] = []

        @app.task(name="t", shared=False)
        @guarded_task(key="t", once_per="<number>", limit=limit)
        def task(number: int) -> int:
            ran.append(number)
            task.delay(number)
            return number

        assert task.delay(1).get() == 1
        assert ran == [1]
        assert [row.state for row in records(app)] == ["DONE"]

    @pytest.mark.parametrize("how", ["apply", "chain"])
    def test_what_needs_its_result_at_once_is_refused(self, app: Celery, how: str) -> None:
        """With an error that says what to do; the record of the outer work has it."""
        count = self.counting(app, send_by(how))
        with pytest.raises(KeyAlreadyHeldError, match=r"use delay\(\)"):
            count.delay(2).get()
        assert count.saw == ["begins 2"]
        assert [row.state for row in records(app)] == ["FAILED"]

    def test_a_failed_eager_call_of_enqueue_is_not_sent(self, app: Celery) -> None:
        """Its work stays NEW and due, so that a test sees it, and a sweep sends it."""

        @app.task(name="t", shared=False)
        @guarded_task(key="t:<number>")
        def task(number: int) -> None: ...

        def hold() -> None:
            with runtime_of(app).lock("t:1"):
                enqueue(task, (1,))

        with ThreadPoolExecutor(1) as another:
            another.submit(hold).result()
        [row] = records(app)
        assert (row.state, row.sends) == ("NEW", None)
        assert row.due - row.created <= 60_000_000


def send_by(how: str) -> Callable[[Task, int], object]:
    return {
        "delay": lambda task, number: task.delay(number),
        "call": lambda task, number: task.apply_async((number,)),
        "enqueue": lambda task, number: enqueue(task, (number,)),
        "apply": lambda task, number: task.apply((number,)).get(disable_sync_subtasks=False),
        "chain": lambda task, number: chain(task.si(number), task.si(number)).delay().get(),
    }[how]


def records(app: Celery) -> list[Any]:
    """The records of all work."""
    engine = sa.create_engine(app.conf.taskguard_ledger, poolclass=sa.NullPool)
    with engine.connect() as db:
        return list(db.execute(sa.select(WORK)))
