"""A message that is acknowledged and never runs reads REVOKED, with the reason."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, Task, chain, chord, group
from celery.app.trace import build_tracer
from celery.exceptions import ChordError, TaskRevokedError

import taskguard_celery
from support.waiting import patience_s, wait_until
from taskguard.integration import Delivery, Dropped
from taskguard.model.delivery import DROPPED
from taskguard_celery import enqueue, guarded_task, runtime_of


def revoked(result: Any, reason: str) -> None:
    with pytest.raises(TaskRevokedError, match=reason):
        result.get(timeout=patience_s())
    # get() of a chain raises for its first task before the rest of the chain has its state.
    wait_until(lambda: result.state == "REVOKED", message="its state is stored")


def test_each_later_message_of_revoked_work_reads_revoked(shop: Any) -> None:
    """All later messages of revoked work are REVOKED. So are a chord with such a member, and the
    rest of a chain."""
    tasks = shop.tasks
    first = enqueue(tasks.ship, (5,)).result
    record = shop.work("shop.ship", 5)
    assert shop.ledger.revoke(record.id, message=record.message)
    later = tasks.ship.delay(5)
    enqueued = enqueue(tasks.ship, (5,)).result
    ignored = tasks.ship.apply_async((5,), ignore_result=True)
    chained = chain(tasks.ship.si(5), tasks.add.si(1, 2)).delay()
    total = chord(group([tasks.ship.s(5), tasks.ship.s(6)]))(tasks.total.s())
    with shop.worker(concurrency=2):
        for result in (first, later, enqueued, chained.parent, chained):
            revoked(result, "the work of order:5 was revoked")
        with pytest.raises((ChordError, TaskRevokedError)):
            total.get(timeout=patience_s())
        shop.wait_for_quiet()
    assert ignored.state == "PENDING"
    assert dict(shop.effects()) == {"6": 1}


def test_a_message_that_is_skipped_reads_revoked(shop: Any) -> None:
    """A skipped message is REVOKED, also for a chord, and for a caller that asks for an ignored
    result."""
    task = shop.tasks.unless_busy
    with shop.worker(concurrency=2), runtime_of(shop.tasks.app).lock("order:7"):
        revoked(
            task.apply_async((7,), ignore_result=False), r"order:7 was not free \(busy=\"skip\"\)"
        )
        revoked(chain(task.si(7), shop.tasks.add.si(1, 2)).delay(), "was not free")
        total = chord(group([task.s(7), task.s(8)]))(shop.tasks.total.s())
        with pytest.raises((ChordError, TaskRevokedError)):
            total.get(timeout=patience_s())
    assert dict(shop.effects()) == {"8": 1}


def test_a_message_that_is_revoked_after_its_work_was_done_still_reads_done(shop: Any) -> None:
    """If done work is revoked, its redelivery and later messages get the result."""
    task, task_id = shop.tasks.ship, str(uuid.uuid4())
    with shop.worker():
        result = task.apply_async((9,), task_id=task_id)
        assert result.get(timeout=patience_s()) == {"order": 9}
        shop.revoke(result)
        shop.publish_raw(task, [9], times=1, task_id=task_id)
        shop.wait_for_quiet()
        assert (result.state, result.get()) == ("SUCCESS", {"order": 9})
        assert task.delay(9).get(timeout=patience_s()) == {"order": 9}
    assert dict(shop.effects()) == {"9": 1}


class TestEachReason:
    """Celery's own tracer delivers the message, without a worker."""

    @pytest.fixture
    def app(self) -> Iterator[Celery]:
        app = Celery("app", broker="memory://", backend="cache+memory://", set_as_current=False)
        taskguard_celery.configure(app, locks="memory://", ledger="sqlite://")
        yield app
        runtime_of(app).close()
        app.close()

    @pytest.mark.parametrize("reason", DROPPED)
    @pytest.mark.parametrize(
        ("options", "said", "reads"),
        [
            ({}, None, True),
            ({"ignore_result": True}, None, False),
            ({"ignore_result": True}, False, True),
            ({"ignore_result": True, "store_errors_even_if_ignored": True}, None, True),
            ({}, True, False),
        ],
    )
    def test_each_reason_reaches_the_caller(
        self, app: Celery, reason: str, options: dict[str, bool], said: bool | None, reads: bool
    ) -> None:
        """Each reason makes the message REVOKED, unless a live copy of it answers, or its result is
        ignored."""

        @app.task(name="t", shared=False, **options)
        @guarded_task(key="k:<number>")
        def task(number: int) -> None: ...

        state = trace(app, task, Dropped(reason), said)
        answered = reads and reason != "superseded"
        assert state == ("REVOKED" if answered else "PENDING")

    def test_an_eager_call_raises(self, app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
        """An eager call raises the error that `get()` raises with a worker."""

        @app.task(name="t", shared=False)
        @guarded_task(key="k:<number>", busy="skip")
        def task(number: int) -> None: ...

        answer_with(app, Dropped("skipped"), monkeypatch)
        with pytest.raises(TaskRevokedError, match="k:1 was not free"):
            task.apply((1,)).get()


def answer_with(app: Celery, outcome: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def deliver(delivery: Delivery, body: Any) -> Any:
        del delivery, body
        return outcome

    monkeypatch.setattr(runtime_of(app).runner, "deliver", deliver)


def trace(app: Celery, task: Task, outcome: Any, ignore_result: bool | None) -> str:
    """The state after one delivery of `task` which comes to `outcome`."""
    task_id = str(uuid.uuid4())
    request = {"id": task_id, "delivery_info": {}, "headers": {}}
    if ignore_result is not None:
        request["ignore_result"] = ignore_result
    with pytest.MonkeyPatch.context() as patch:
        answer_with(app, outcome, patch)
        build_tracer(task.name, task, app=app)(task_id, (1,), {}, request)
    return str(app.AsyncResult(task_id).state)
