"""Which task a guard belongs to: classes, inheritance, decorators around it. Without a worker."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery import Celery, Task

import taskguard_celery
from support.celery_process import deliver, local_app, next_message
from taskguard.errors import ConfigurationError
from taskguard.model.states import State
from taskguard_celery import guarded_task


@pytest.fixture
def app(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    with local_app(sqlite_url, monkeypatch) as app:
        yield app


class Billing(Task):  # type: ignore[misc]  # Celery has no types
    """A task in the style of classes."""

    abstract = True
    bodies: list[str]

    @guarded_task(key="account:<account>", once_per="message")
    def run(self, account: int) -> str:
        """Its body, which subclasses inherit."""
        self.bodies.append(f"{self.name} {account}")
        return self.name  # type: ignore[no-any-return]


class Charge(Billing):
    """Inherits the guarded body."""

    name = "charge"


class Refund(Billing):
    """So does this one, and Celery wraps it in a function of its own."""

    name = "refund"
    autoretry_for = (Exception,)


@pytest.mark.parametrize("kind", [Charge, Refund])
def test_a_class_runs_once_for_each_message(app: Celery, kind: Any) -> None:
    """A redelivered message of a class-based task is answered. Another message is other work."""
    task = app.register_task(kind())
    task.bodies = []
    for task_id in ("a", "a", "b"):
        assert deliver(task, 1, task_id=task_id).retval == task.name
    assert task.bodies == [f"{task.name} 1"] * 2
    assert taskguard_celery.guarded_function_of(task) is not None


def test_a_class_that_finds_its_key_taken_is_put_off(app: Celery) -> None:
    """A class-based task whose key is taken is deferred."""
    task = app.register_task(Charge())
    task.bodies = []
    with taskguard_celery.runtime_of(app).lock("account:1"):
        outcome = deliver_elsewhere(task, 1, task_id="a")
    assert outcome.info.state == "IGNORED"
    assert task.bodies == []
    assert next_message(app).headers["id"] == "a"


def deliver_elsewhere(task: Task, *args: Any, task_id: str) -> Any:
    """`deliver()`, by another thread, whose keys are its own."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(deliver, task, *args, task_id=task_id).result()


def test_a_direct_call_of_a_class_is_its_own(app: Celery) -> None:
    """If two classes share a body, the class that is called names the work."""
    app.register_task(Charge()).bodies = []
    refund = app.register_task(Refund())
    refund.bodies = []
    assert refund.run(3) == "refund"
    ledger = taskguard_celery.runtime_of(app).ledger
    assert ledger is not None
    (work,) = [each.id for each in ledger.list_work(State.DONE)]  # type: ignore[attr-defined]
    assert work.startswith("refund ")


def bare(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that forgets functools.wraps."""

    def around(*args: Any) -> Any:
        return function(*args)

    return around


class Around:
    """A decorator that is an object."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def partial_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that gives functools.partial to a bare one."""
    return bare(functools.partial(function))


_HIDDEN: list[Callable[..., Any]] = []


def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator from which nothing leads to the function that it wraps."""
    _HIDDEN.append(function)

    def around(*args: Any) -> Any:
        return _HIDDEN[-1](*args)

    return around


@pytest.mark.parametrize(
    "around", [bare, lambda f: bare(bare(f)), lambda f: bare(Around(f)), partial_of]
)
def test_a_guard_that_cannot_be_seen_stops_the_worker(
    app: Celery, around: Callable[[Any], Any]
) -> None:
    """If a decorator hides a guard, the worker does not start, and the message says what to add."""

    @guarded_task(key="order:<order>")
    def ship(order: int) -> None: ...

    app.task(name="ship", shared=False)(around(ship))
    with pytest.raises(ConfigurationError, match=r"ship: .*functools\.wraps"):
        taskguard_celery.check_worker(app)


def test_a_run_that_overrides_a_guarded_one_stops_the_worker(app: Celery) -> None:
    """If a class overrides a guarded `run()`, the worker does not start."""

    class Express(Charge):
        name = "express"

        def run(self, account: int) -> str:
            return str(super().run(account))

    app.register_task(Express())
    with pytest.raises(ConfigurationError, match=r"express: .*run\(\)"):
        taskguard_celery.check_worker(app)


def test_a_guard_without_a_caller_is_not_begun(app: Celery) -> None:
    """A delivery whose guard was not seen at the start is deferred."""
    began = []

    @guarded_task(key="order:<order>", once_per="message")
    def ship(order: int) -> None:
        began.append(order)

    task = app.task(name="ship", shared=False)(remembered(ship))
    taskguard_celery.check_worker(app)
    assert deliver(task, 7, task_id="a").info.state == "IGNORED"
    assert next_message(app).headers["id"] == "a"
    assert began == []


def test_decorators_that_say_what_they_stand_around_are_welcome(app: Celery) -> None:
    """A decorator with functools.wraps may be over the guard. Any decorator may be under it."""
    began = []

    def tidy(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def around(*args: Any) -> Any:
            return function(*args)

        return around

    @tidy
    @guarded_task(key=lambda *args: f"order:{args[0]}", once_per="message")
    @bare
    def ship(order: int) -> None:
        began.append(order)

    task = app.task(name="ship", shared=False)(ship)
    taskguard_celery.check_worker(app)
    for _ in range(2):
        deliver(task, 7, task_id="a")
    assert began == [7]


def test_a_guard_on_what_is_no_function_says_where_to_put_it() -> None:
    """A guard on a class or a static method raises, and says where to put it."""
    with pytest.raises(ConfigurationError, match="run"):
        guarded_task(key="account:<account>")(Charge)  # type: ignore[type-var]
    with pytest.raises(ConfigurationError, match="above @staticmethod"):
        guarded_task(key="account:<account>")(staticmethod(lambda account: account))
