"""taskguard for Celery: `@guarded_task` under `@app.task`.

Read next: `decorator.py` (a delivery), `runtime.py` (settings), `startup.py` (a worker's checks).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from taskguard import errors

try:
    import celery as _celery  # noqa: F401
except ModuleNotFoundError as error:
    raise errors.MissingDriverError(
        "taskguard_celery needs the package celery, which is not installed: pip install "
        "'celery-taskguard[celery]'."
    ) from error

from taskguard_celery.decorator import guarded_task
from taskguard_celery.outbox import Enqueued, enqueue, schedule_sweep, sweep
from taskguard_celery.recognition import guarded_function_of
from taskguard_celery.runtime import configure, runtime_of
from taskguard_celery.startup import check_worker, safe_defaults

if TYPE_CHECKING:
    from taskguard_celery.beat import LeaderScheduler

__all__ = [
    "Enqueued",
    "LeaderScheduler",
    "check_worker",
    "configure",
    "enqueue",
    "guarded_function_of",
    "guarded_task",
    "runtime_of",
    "safe_defaults",
    "schedule_sweep",
    "sweep",
]


def __getattr__(name: str) -> Any:
    # Only beat needs this module.
    if name == "LeaderScheduler":
        from taskguard_celery.beat import LeaderScheduler

        return LeaderScheduler
    raise AttributeError(f"module 'taskguard_celery' has no attribute {name!r}")
