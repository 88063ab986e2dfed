"""Bodies that end by `raise Ignore`, as `self.replace()` does. Without a worker."""

from __future__ import annotations

from collections.abc import Iterator
from queue import Empty
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery, Task, chain
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded

import taskguard_celery
from support.celery_process import deliver, local_app, next_message
from taskguard import Guard
from taskguard.errors import TransactionRetryError
from taskguard_celery import guarded_task
from taskguard_celery.marks import HEADER


@pytest.fixture
def app(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    with local_app(sqlite_url, monkeypatch) as app:
        yield app


ENDS = {
    "reject": Reject,
    "time limit": SoftTimeLimitExceeded,
    "ignore": Ignore,
    "own word": LookupError,
}


def state(app: Celery, work: str) -> str:
    """Return the work's state in the ledger."""
    ledger: Any = taskguard_celery.runtime_of(app).ledger
    return str(ledger.view(work).state.value)


def test_work_that_has_been_replaced_is_done(app: Celery) -> None:
    """Work that was replaced is DONE: a second message of the key replaces nothing."""

    @app.task(name="other", shared=False)
    def other(order: int) -> None: ...

    @app.task(name="ship", bind=True, shared=False)
    @guarded_task(key="order:<order>")
    def ship(self: Task, order: int) -> None:
        raise self.replace(other.s(order))

    app.finalize()
    assert deliver(app.tasks["ship"], 1, task_id="a").info.state == "IGNORED"
    assert next_message(app).headers["task"] == "other"
    assert state(app, "ship order:1") == "DONE"
    # The same message again: the result of its id, and its chain, are what took its place's.
    assert deliver(app.tasks["ship"], 1, task_id="a").info.state == "IGNORED"
    another = deliver(app.tasks["ship"], 1, task_id="b")
    assert (another.info, another.retval) == (None, None)
    assert app.tasks["ship"](1) is None
    with pytest.raises(Empty):
        next_message(app)


@pytest.mark.parametrize("atomic", [False, True])
def test_a_body_that_says_ignore_is_done_with_its_writes(
    app: Celery, sqlite_url: str, atomic: bool
) -> None:
    """The writes of a body that raises Ignore are committed, and Celery stores no result."""
    began = []

    @app.task(name="ship", shared=False)
    @guarded_task(key="order:<order>", atomic=atomic)
    def ship(order: int, guard: Guard) -> None:
        began.append(order)
        if atomic:
            guard.db.execute(sa.text("create table shipped (id int)"))
        raise Ignore

    app.finalize()
    for task_id in ("a", "b"):
        deliver(app.tasks["ship"], 1, task_id=task_id)
    assert began == [1]
    assert state(app, "ship order:1") == "DONE"
    engine = sa.create_engine(sqlite_url)
    assert sa.inspect(engine).has_table("shipped") is atomic
    engine.dispose()


def test_a_transaction_that_is_left_by_ignore_is_not_done(app: Celery) -> None:
    """If Ignore leaves a transaction, nothing is written, and the work is not DONE."""

    @app.task(name="ship", shared=False)
    @guarded_task(key="order:<order>")
    def ship(order: int, guard: Guard) -> None:
        with guard.transaction():
            raise Ignore

    app.finalize()
    assert deliver(app.tasks["ship"], 1, task_id="a").info.state == "IGNORED"
    assert state(app, "ship order:1") == "FAILED"


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("namespace", ["", "shop"])
def test_work_that_goes_on_in_its_own_place_is_not_done(
    app: Celery, deep: bool, namespace: str
) -> None:
    """If the replacement is the same work, it claims that work, and is DONE at its end."""
    app.conf.taskguard_namespace = namespace
    work = "fetch shop:feed:1" if namespace else "fetch feed:1"
    turns = []

    @app.task(name="fetch", bind=True, shared=False)
    @guarded_task(key="feed:<feed>")
    def fetch(self: Task, feed: int) -> str:
        turns.append(self.request.replaced_task_nesting or 0)
        if len(turns) < 3:
            again = self.si(feed)
            raise self.replace(chain(other.si(), again) if deep else again)
        return "fetched"

    @app.task(name="other", shared=False)
    def other() -> None: ...

    app.finalize()
    deliver(app.tasks["fetch"], 1, task_id="a")
    assert state(app, work) == "FAILED"
    for nesting in (1, 2):
        next_message(app)
        deliver(app.tasks["fetch"], 1, task_id="a", replaced_task_nesting=nesting)
    assert turns == [0, 1, 2]
    assert state(app, work) == "DONE"


@pytest.mark.parametrize("says", ["retry", "reject", "time limit", "ignore", "own word"])
def test_a_body_that_was_ended_by_the_database_may_order_a_retry(app: Celery, says: str) -> None:
    """A body whose transaction the database ended may order a retry or a reject. A time limit makes
    its work FAILED. Any other end defers the delivery, so that the body runs again."""

    @app.task(name="ship", bind=True, shared=False)
    @guarded_task(key="order:<order>")
    def ship(self: Task, order: int, guard: Guard) -> None:
        try:
            with guard.transaction():
                raise TransactionRetryError("a deadlock", key=guard.key)
        except TransactionRetryError as error:
            if says == "retry":
                raise self.retry(countdown=60) from error
            raise ENDS[says] from error

    app.finalize()
    deliver(app.tasks["ship"], 1, task_id="a")
    obeyed = says in ("retry", "reject", "time limit")
    assert state(app, "ship order:1") == ("FAILED" if obeyed else "NEW")
    if says not in ("reject", "time limit"):
        headers = next_message(app).headers
        assert (headers["retries"], headers[HEADER].get("deferrals")) == (
            (1, None) if obeyed else (0, 1)
        )
    with pytest.raises(Empty):
        next_message(app)
