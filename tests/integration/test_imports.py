"""What a process loads: no driver that it has no use for. What is missing is named by its extra."""

from __future__ import annotations

import pytest

from support.drivers import ALL, run_without

LEADS = """
import taskguard
tg = taskguard.connect(locks="memory://", ledger=None)
tg.leader("beat").run(lambda leadership: leadership.step_down())
"""
CELERY = """
from celery import Celery
from taskguard_celery import guarded_task
app = Celery("shop", broker="memory://")
app.conf.update(taskguard_locks_url="memory://", taskguard_ledger_url=None)

@app.task
@guarded_task(key="order:<order_id>")
def ship(order_id):
    return order_id

assert ship.apply((42,)).get() == 42
"""
COMMAND = """
from taskguard.cli import main
try:
    main({words!r})
except SystemExit as end:
    assert end.code == 0
"""
# kombu looks whether there is a Django.
NEEDS_NO_MORE = {
    "a leader": (LEADS, set[str]()),
    "tasks of Celery": (CELERY, {"celery", "kombu", "django"}),
    "taskguard_rq": ("import taskguard_rq", {"rq", "redis"}),
    "the pytest plugin": ("import pytest_taskguard.plugin", set[str]()),
    "taskguard --help": (COMMAND.format(words=["--help"]), set[str]()),
    "taskguard doctor": (COMMAND.format(words=["doctor", "--locks", "memory://"]), set[str]()),
}


@pytest.mark.parametrize("what", NEEDS_NO_MORE)
def test_what_runs_without_a_database_loads_no_driver_of_one(what: str) -> None:
    """With locks only, SQLAlchemy is not installed; where it is, loading it takes 0.5 s."""
    code, needs = NEEDS_NO_MORE[what]
    run_without(ALL - needs, code)
