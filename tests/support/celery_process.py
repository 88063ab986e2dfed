"""Deliver Celery messages within the test's own process: no broker, no worker, no results."""

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
    """Return an app whose broker is this process's memory, and that has a ledger but no lock
    server."""
    memory.Channel.queues.clear()  # All such brokers of a process are one.
    # Only its own tasks, whatever was imported before.
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
    """Run a message as a worker's child does. `request` has further fields of the message."""
    carried = {"id": task_id, "delivery_info": {}, "is_eager": False, **request}
    return build_tracer(task.name, task, app=task.app)(task_id, args, {}, carried)


def next_message(app: Celery) -> Any:
    """Return the next published message. Raise queue.Empty if there is none."""
    with app.connection_for_read() as connection, connection.SimpleQueue("celery") as queue:
        message = queue.get(block=False)
        message.ack()
        return message


def messages_of(app: Celery) -> list[Any]:
    """Return the messages that were published to the app's queues, and take them out."""
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
    """Run a message that `messages_of()` has returned, as a worker does."""
    task = message.app.tasks[message.headers["task"]]
    args, kwargs, embed = message.payload
    request = Request(message, app=message.app, task=task).request_dict
    tracer = build_tracer(task.name, task, app=message.app)
    return tracer(request["id"], args, kwargs, {**request, **embed, "is_eager": False})
