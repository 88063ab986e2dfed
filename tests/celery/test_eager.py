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
    """A second eager call of the same order gets the stored result."""
    ship = eager_shop.tasks.ship
    assert ship.delay(1).get() == {"order": 1}
    assert ship.delay(1).get() == {"order": 1}
    assert eager_shop.effects() == Counter({"1": 1})


def test_apply_and_plain_calls_are_guarded(shop: Any) -> None:
    """`.apply()`, `.run()` and a plain call are guarded as a message is."""
    assert shop.tasks.ship.apply((2,)).get() == {"order": 2}
    assert shop.tasks.ship(2) == {"order": 2}
    assert shop.tasks.ship.run(2) == {"order": 2}
    assert shop.effects() == Counter({"2": 1})


def test_eager_retries_go_on(shop: Any) -> None:
    """Retries by `bind=True` and by `autoretry_for` work in an eager call."""
    assert shop.tasks.flaky.apply((3,)).get() == 2
    assert shop.tasks.auto.apply((4,)).get() == 2
    assert shop.effects() == Counter({"3": 1, "4": 1})


def test_a_taken_key_is_an_error_where_nothing_can_be_put_off(eager_shop: Any) -> None:
    """An eager call of a taken key raises, and runs nothing."""
    with (
        runtime_of(eager_shop.tasks.app).lock("order:5"),
        ThreadPoolExecutor(1) as another,
        pytest.raises(KeyBusyError, match="order:5"),
    ):
        another.submit(eager_shop.tasks.ship.delay, 5).result()
    assert not eager_shop.effects()


def test_a_body_that_calls_its_own_task_calls_a_function(shop: Any) -> None:
    """A body that calls its own task does other work, and not its own message again."""
    assert shop.tasks.nest.apply((3,)).get() == 6
    assert shop.effects() == Counter({"3": 1, "2": 1, "1": 1})


def test_an_absent_database_is_an_error_where_nothing_can_be_put_off(make_shop: Any) -> None:
    """If the database is down, an eager call raises, and runs nothing."""
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
        """The message runs after the body, as on a worker. Its error is not an error of the
        body."""
        count = self.counting(app, send_by(how))
        assert (count(2) if how == "call" else count.delay(2).get()) == 2
        assert count.saw == ["begins 2", "ends 2", "begins 1", "ends 1", "begins 0"]
        states = [row.state for row in records(app)]
        assert sorted(states) == ["DONE", "DONE", "FAILED"]

    def test_its_error_is_propagated(self, app: Celery) -> None:
        """With `task_eager_propagates`, the error is raised after all bodies have ended."""
        app.conf.task_eager_propagates = True
        count = self.counting(app, send_by("delay"))
        with pytest.raises(ValueError, match="the last one fails"):
            count.delay(1)
        assert count.saw == ["begins 1", "ends 1", "begins 0"]

    def test_where_there_is_room_it_runs_at_once(self, app: Celery) -> None:
        """If `limit=` allows it, the message runs at once."""
        count = self.counting(app, send_by("delay"), limit=4)
        assert count.delay(2).get() == 2
        assert count.saw == ["begins 2", "begins 1", "begins 0", "ends 1", "ends 2"]

    @pytest.mark.parametrize("limit", [1, 3])
    def test_the_same_work_is_answered_after_that_body(self, app: Celery, limit: int) -> None:
        """The same work is answered after the body, even if `limit=` has room."""
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
        """A call that needs the result at once raises an error that says what to do."""
        count = self.counting(app, send_by(how))
        with pytest.raises(KeyAlreadyHeldError, match=r"use delay\(\)"):
            count.delay(2).get()
        assert count.saw == ["begins 2"]
        assert [row.state for row in records(app)] == ["FAILED"]

    def test_a_failed_eager_call_of_enqueue_is_not_sent(self, app: Celery) -> None:
        """The work stays NEW and overdue, so that a sweep sends it."""

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
