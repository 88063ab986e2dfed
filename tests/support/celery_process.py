"""Celery's way of a message within the test's own process: no broker, no worker, no results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery, Task
from celery.app.trace import build_tracer
from celery.worker.request import Request
from kombu.transport import memory

import taskguard_celery
from taskguard.ledger.sql import SqlLedger

__all__ = ["come", "deliver", "local_app", "messages_of", "next_message"]


@contextmanager
def local_app(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    """An app whose broker is this process's memory, and whose ledger decides alone."""
    memory.Channel.queues.clear()  # In a process all such brokers are one.
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


def messages_of(app: Celery) -> list[Any]:
    """What was published to the app's queues and not read yet."""
    found = []
    with app.connection_for_read() as connection:
        for declared in app.amqp.queues.values():
            queue = declared(connection.default_channel)
            queue.declare()
            while (message := queue.get(no_ack=True, accept=["json", "pickle"])) is not None:
                message.app = app
                found.append(message)
    return found


def come(message: Any) -> Any:
    """What a worker does with a message that `messages_of()` has read."""
    task = message.app.tasks[message.headers["task"]]
    args, kwargs, embed = message.payload
    request = Request(message, app=message.app, task=task).request_dict
    tracer = build_tracer(task.name, task, app=message.app)
    return tracer(request["id"], args, kwargs, {**request, **embed, "is_eager": False})
