"""Errbacks that take (request, exc, traceback): Celery calls them, and sends no message."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context

import taskguard_celery
from support.celery_process import deliver, local_app
from support.waiting import patience_s, wait_until
from taskguard.errors import KeyBusyError
from taskguard.events import Event as GuardEvent
from taskguard_celery import guarded_task


@pytest.fixture
def app(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    with local_app(sqlite_url, monkeypatch) as app:

        @app.task(name="broken", shared=False)
        def broken(order: int) -> None:
            raise ValueError(f"order {order} cannot be shipped")

        @app.task(name="complain", shared=False)
        @guarded_task(key="complaints", once_per="message", ttl_s=60)
        def complain(request: Any, error: Exception, traceback: Any) -> None:
            complaints.append(f"{request.id}: {error}")

        complaints: list[str] = []
        app.complaints = complaints
        app.finalize()
        yield app


@pytest.mark.parametrize("namespace", ["", "shop"])
def test_an_errback_that_finds_its_key_taken_waits(app: Any, namespace: str) -> None:
    """An errback waits for its key within the failed delivery."""
    app.conf.taskguard_namespace = namespace
    runtime = taskguard_celery.runtime_of(app)
    happened: list[GuardEvent] = []
    runtime.events.listen(happened.append)
    free = Event()

    def hold() -> None:
        with runtime.lock("complaints"):
            held.set()
            free.wait(patience_s())

    held = Event()
    with ThreadPoolExecutor(2) as threads:
        holder = threads.submit(hold)
        held.wait(patience_s())
        errback = app.tasks["complain"].s()
        failed = threads.submit(
            deliver, app.tasks["broken"], 5, task_id="a", errbacks=[dict(errback)]
        )
        wait_until(
            lambda: any(each.name == "contended" for each in happened) or failed.done(),
            message="the errback has found its key taken",
        )
        assert not failed.done()
        free.set()
        holder.result()
        failed.result()
    assert app.complaints == ["a: order 5 cannot be shipped"]


def test_an_errback_that_is_called_where_nothing_may_wait_says_what_it_lost(
    app: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """In a worker's own process an errback of a taken key raises at once, and logs what was not
    run."""
    failed = Context(id="a")
    with ThreadPoolExecutor(1) as another, taskguard_celery.runtime_of(app).lock("complaints"):
        call = another.submit(app.tasks["complain"], failed, ValueError("lost"), None)
        with pytest.raises(KeyBusyError), caplog.at_level(logging.ERROR):
            call.result()
    assert "errback complain of a was not run" in caplog.text
    assert app.complaints == []
