"""The report of a prefork pool's child to its parent at the end of a message."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from celery import Celery
from celery.app import trace
from celery.exceptions import Ignore

from taskguard import Guard
from taskguard_celery import guarded_task
from taskguard_celery.tracing import trace_briefly


@pytest.fixture(scope="module")
def app() -> Any:
    app = Celery("tracing", broker="memory://", set_as_current=False)
    app.conf.update(task_ignore_result=True, taskguard_locks_url="memory://", taskguard_ledger=None)

    @app.task(name="ends")
    @guarded_task(key="item:<how>", busy="skip")
    def ends(how: str, guard: Guard) -> str:
        if how == "ignore":
            raise Ignore("put off")
        if how == "fail":
            raise ValueError("boom")
        return "done"

    return app


def traced(app: Any, how: str) -> Any:
    """Return the answer of a child's tracer, as its parent gets it."""
    request = {"id": how, "args": (how,), "kwargs": {}, "delivery_info": {"is_eager": False}}
    answer = app.tasks["ends"].__trace__(how, (how,), {}, request)
    return pickle.loads(pickle.dumps(answer.retval))


def test_an_ignore_is_short(app: Any) -> None:
    """An Ignore contains only the fact that the message is ignored, and no frames of Celery."""
    app.tasks["ends"].__trace__ = trace.build_tracer("ends", app.tasks["ends"], app=app)
    long = traced(app, "ignore")
    trace_briefly(app, "host")
    short = traced(app, "ignore")
    for each in (long, short):
        assert isinstance(each.exception, Ignore)
        assert each.internal
    assert long.tb.tb_next is not None
    assert short.tb.tb_next is None
    assert len(pickle.dumps(short)) < len(pickle.dumps(long)) / 10


def test_all_else_is_as_before(app: Any) -> None:
    """A failure has its whole traceback, down to the line that failed."""
    trace_briefly(app, "host")
    assert traced(app, "return") == "done"
    failed = traced(app, "fail")
    assert 'raise ValueError("boom")' in failed.traceback
    last = failed.tb
    while last.tb_next is not None:
        last = last.tb_next
    assert last.tb_frame.f_code.co_name == "ends"
