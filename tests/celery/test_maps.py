"""Items of `task.map()`, `starmap()` and `chunks()`, which Celery calls within one message."""

from __future__ import annotations

import functools
import threading
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.app.trace import build_tracer

import taskguard_celery
from support.waiting import patience_s, wait_until
from taskguard.errors import KeyBusyError
from taskguard_celery import guarded_task, runtime_of


def test_a_map_that_is_delivered_twice_does_each_item_once(shop: Any) -> None:
    """The second delivery gets the stored results, also of two items with equal arguments."""
    task_id, items = str(uuid.uuid4()), [(1, 1), (2, 1), (2, 1)]
    with shop.worker(concurrency=2):
        for _ in range(2):
            result = shop.tasks.add.starmap(items).apply_async(task_id=task_id)
            assert result.get(timeout=patience_s()) == [2, 3, 3]
            result.forget()
        other = shop.tasks.add.starmap(items).apply_async()
        assert other.get(timeout=patience_s()) == [2, 3, 3]  # a map of its own
        shop.wait_for_quiet()
    assert Counter(step.item for step in shop.steps("added")) == {"1": 2, "2": 4}


def test_a_map_waits_for_a_busy_key(shop: Any) -> None:
    """A map is deferred, does the first items once, and loses no later item. So do chunks."""
    tasks = shop.tasks
    with shop.worker(concurrency=2) as worker:
        with runtime_of(tasks.app).lock("order:2"):
            mapped = tasks.ship.map([1, 2, 3]).apply_async()
            chunks = tasks.ship.chunks([(4,), (2,), (5,)], 2).apply_async()
            wait_until(lambda: worker.text().count("deferred") >= 2)
        answers = [{"order": number} for number in (1, 2, 3, 4, 5)]
        assert mapped.get(timeout=patience_s()) == answers[:3]
        assert chunks.get(timeout=patience_s()) == [[answers[3], answers[1]], [answers[4]]]
    assert shop.effects() == {str(number): 1 for number in (1, 2, 3, 4, 5)}


def test_a_map_whose_worker_is_killed_goes_on_behind_its_last_item(
    make_shop: Any, short_leases: None
) -> None:
    """The redelivery of a map answers done items, and takes over the item that was running."""
    shop = make_shop(SHOP_VISIBILITY_S="10")
    with shop.worker(concurrency=1) as worker:
        result = shop.tasks.ship.starmap([(1,), (2, 600.0), (3,)]).apply_async()
        wait_until(lambda: "2" in [step.item for step in shop.steps("began")])
        shop.kill_holder(shop.steps("began")[-1].pid, "shop.ship", 2)
        assert [each["order"] for each in result.get(timeout=patience_s())] == [1, 2, 3]
        assert worker.children()
    assert shop.effects() == {"1": 1, "2": 1, "3": 1}
    assert Counter(step.item for step in shop.steps("began")) == {"1": 1, "2": 2, "3": 1}


def test_an_item_that_a_decorator_tries_again_stays_that_item(tmp_path: Path) -> None:
    """If a decorator calls an item twice, both calls have its number, so that a redelivery finds
    what was done."""
    app = Celery("app", broker="memory://", backend="cache+memory://", set_as_current=False)
    taskguard_celery.configure(app, locks="memory://", ledger=f"sqlite:///{tmp_path / 'ledger'}")
    runtime_of(app).ledger.create_schema()  # type: ignore[union-attr]
    tried = list[int]()

    def twice(function: Any) -> Any:
        @functools.wraps(function)
        def call(number: int) -> Any:
            with suppress(ZeroDivisionError):
                return function(number)
            return function(number)

        return call

    @app.task(name="maps.tried_again", shared=False)
    @twice
    @guarded_task(key="t", once_per="message")
    def task(number: int) -> int:
        tried.append(number)
        if tried == [0]:
            raise ZeroDivisionError
        return len(tried)

    for _ in range(2):
        assert trace_map(app, task, [0, 0, 0]) == [2, 3, 4]
    assert tried == [0, 0, 0, 0]
    runtime_of(app).close()
    app.close()


def trace_map(app: Celery, task: Any, items: list[int]) -> Any:
    """Deliver a map with one id once more, without a worker."""
    arguments = {"task": dict(task.s()), "it": items}
    tracer = build_tracer("celery.map", app.tasks["celery.map"], app=app)
    app.backend.forget("m")
    tracer("m", (), arguments, {"id": "m", "delivery_info": {}, "headers": {}})
    return app.AsyncResult("m").get()


def test_a_map_with_locks_alone_waits_in_the_worker() -> None:
    """With locks only, a map waits in the worker for a taken key, because no record says which
    items are done."""
    deferred, ran = threading.Event(), list[int]()

    def hear(event: Any) -> None:
        if event.name == "deferred":
            deferred.set()

    app = Celery("app", broker="memory://", backend="cache+memory://", set_as_current=False)
    taskguard_celery.configure(app, locks="memory://", ledger=None, listeners=[hear])

    @app.task(name="maps.locks_alone", shared=False)
    @guarded_task(key="t:<number>", once_per="message")
    def task(number: int) -> int:
        ran.append(number)
        return number

    def hold(held: threading.Event) -> None:
        with runtime_of(app).lock("t:2"):
            held.set()
            assert deferred.wait(patience_s())

    with ThreadPoolExecutor(1) as another:
        held = threading.Event()
        holder = another.submit(hold, held)
        assert held.wait(patience_s())
        assert trace_map(app, task, [1, 2, 3]) == ran == [1, 2, 3]
        holder.result()
    runtime_of(app).close()
    app.close()


def test_a_body_that_calls_its_own_task_in_a_map_makes_plain_calls(shop: Any) -> None:
    """Calls of a body in a map are work of their own, and are no items of the map."""
    with shop.worker():
        assert shop.tasks.nest.map([3, 5]).apply_async().get(timeout=patience_s()) == [6, 15]


def test_an_eager_map_raises_if_a_key_is_taken(shop: Any) -> None:
    """An eager map of a taken key raises, because there is no message to defer."""
    assert shop.tasks.ship.map([1, 2]).apply().get() == [{"order": 1}, {"order": 2}]
    with (
        runtime_of(shop.tasks.app).lock("order:3"),
        ThreadPoolExecutor(1) as another,
        pytest.raises(KeyBusyError, match="order:3"),
    ):
        another.submit(lambda: shop.tasks.ship.map([3]).apply().get()).result()
