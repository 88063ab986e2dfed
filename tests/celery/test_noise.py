"""Log lines about failures that are already known. Without a worker."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest

import taskguard_celery
from support.celery_process import deliver, local_app
from taskguard.errors import WorkDeadError
from taskguard.integration import MessageRef
from taskguard.model.lease import new_owner
from taskguard_celery import guarded_task


def test_dead_work_is_an_error_once_and_then_a_warning(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first delivery of DEAD work logs an error, and later ones a warning without a traceback.
    Each caller gets the failure."""
    with local_app(sqlite_url, monkeypatch) as app:

        @app.task(name="die", shared=False)
        @guarded_task(key="order:<order>", max_crashes=1)
        def die(order: int) -> None: ...

        app.finalize()
        task = app.tasks["die"]
        vanish(task, 1)
        said = []
        for task_id in ("a", "b", "c"):
            caplog.clear()
            with caplog.at_level(logging.INFO):
                info = deliver(task, 1, task_id=task_id).info
            assert (info.state, isinstance(info.retval, WorkDeadError)) == ("FAILURE", True)
            said.append([line for line in caplog.records if line.levelno >= logging.WARNING])
            if task_id != "a":
                assert not any(line.exc_info for line in caplog.records)
    assert logging.ERROR in [line.levelno for line in said[0]]
    assert [[line.levelno for line in lines] for lines in said[1:]] == [[logging.WARNING]] * 2
    assert "is DEAD" in said[1][0].getMessage()


def vanish(task: Any, *args: Any) -> None:
    """Let a holder claim the task's work, and vanish at once."""
    compiled = taskguard_celery.guarded_function_of(task)
    runner = taskguard_celery.runtime_of(task.app).runner
    assert compiled is not None
    assert runner.ledger is not None
    delivery = compiled.delivery(args, {}, task=task.name, namespace="", message=MessageRef("gone"))
    request = dataclasses.replace(runner.request(delivery), owner=new_owner("gone"), ttl_s=0.0)
    runner.ledger.claim(request)
