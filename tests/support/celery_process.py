"""Celery's way of a message within the test's own process: no broker, no worker, no results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery, Task
from celery.app.trace import build_tracer

import taskguard_celery
from taskguard.ledger.sql import SqlLedger

__all__ = ["deliver", "local_app", "next_message"]


@contextmanager
def local_app(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    """An app whose broker is this process's memory, and whose ledger decides alone."""
    # Its own tasks only, whatever was imported before.
    monkeypatch.setattr("celery._state._on_app_finalizers", set())
    ledger = SqlLedger(url)
    ledger.create_schema()
    with Celery("local", broker="memory://", set_as_current=False) as app:
        app.conf.update(
            taskguard_locks=None,
            taskguard_ledger=ledger,
            task_acks_late=True,
        )
        yield app
        taskguard_celery.runtime_of(app).close()
    ledger.close()


def deliver(task: Task, *args: Any, task_id: str, **request: Any) -> Any:
    """What a worker's child does with a message; `request` is what it carries besides."""
    carried = {"id": task_id, "delivery_info": {}, "is_eager": False, **request}
    return build_tracer(task.name, task, app=task.app)(task_id, args, {}, carried)


def next_message(app: Celery) -> Any:
    """What was published and not read yet; raises queue.Empty if there is nothing."""
    with app.connection_for_read() as connection, connection.SimpleQueue("celery") as queue:
        message = queue.get(block=False)
        message.ack()
        return message
