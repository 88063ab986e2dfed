"""A message that fails before its guard: in `before_start()`, or in a decorator over it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, Task

from support.celery_process import come, local_app, messages_of
from taskguard.model.states import State
from taskguard_celery import enqueue, guarded_task, runtime_of

REFUSED = "refused"


class Refusing(Task):  # type: ignore[misc]  # Celery has no types
    """A task class that checks its arguments."""

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        if REFUSED in args:
            raise PermissionError(task_id)


def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if REFUSED in args:
            raise PermissionError(args)
        return function(*args, **kwargs)

    return wrapper


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@pytest.fixture
def app(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    with local_app(sqlite_url, monkeypatch) as made:
        yield made


@pytest.mark.parametrize(
    ("base", "decorate"), [(Refusing, plain), (Task, refusing)], ids=["class", "decorator"]
)
@pytest.mark.parametrize("order", ["best_effort", "strict"])
def test_it_leaves_its_line(app: Celery, base: Any, decorate: Any, order: str) -> None:
    """The message leaves its line and is not sent again, and the next one is promoted."""
    ran: list[str] = []

    @app.task(name="line", base=base, shared=False)
    @decorate
    @guarded_task(key="line", once_per="message", busy="park", order=order)
    def line(who: str) -> None:
        ran.append(who)

    app.finalize()
    for who in ("first", REFUSED, "last"):
        enqueue(line, (who,))
    while messages := messages_of(app):
        for message in messages:
            come(message)
    assert ran == ["first", "last"]
    ledger = runtime_of(app).ledger
    assert ledger is not None
    [failed] = ledger.list_work(State.FAILED)
    assert failed.error is not None
    assert "failed before its guard: PermissionError" in failed.error
    assert not ledger.list_work(State.NEW)


def test_a_copy_does_not_end_work_that_is_done(app: Celery) -> None:
    """A failing copy of a message ends neither done work nor work that runs."""
    refuses = False

    def sometimes(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any) -> Any:
            if refuses:
                raise PermissionError
            return function(*args)

        return wrapper

    @app.task(name="some", shared=False)
    @sometimes
    @guarded_task(key="some")
    def some() -> None:
        nonlocal refuses
        refuses = True
        come(message)

    app.finalize()
    enqueue(some)
    [message] = messages_of(app)
    come(message)
    come(message)
    ledger = runtime_of(app).ledger
    assert ledger is not None
    assert len(ledger.list_work(State.DONE)) == 1
