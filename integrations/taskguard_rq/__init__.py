"""taskguard for RQ: `@guarded_job` on the function that is enqueued.

Read next: `decorator.py` (a delivery), `queue.py` (how a job is deferred), `worker.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from taskguard import errors

try:
    import rq as _rq  # noqa: F401
except ModuleNotFoundError as error:
    raise errors.MissingDriverError(
        "taskguard_rq needs the package rq, which is not installed: pip install "
        "'celery-taskguard[rq]'."
    ) from error

from taskguard_rq.decorator import guarded_job
from taskguard_rq.outbox import Enqueued, enqueue, sweep
from taskguard_rq.recognition import guarded_function_of
from taskguard_rq.runtime import configure, runtime
from taskguard_rq.worker import (
    GuardedSimpleWorker,
    GuardedSpawnWorker,
    GuardedWorker,
    GuardedWorkerMixin,
)

if TYPE_CHECKING:
    from taskguard_rq.cron import LeaderCronScheduler

__all__ = [
    "Enqueued",
    "GuardedSimpleWorker",
    "GuardedSpawnWorker",
    "GuardedWorker",
    "GuardedWorkerMixin",
    "LeaderCronScheduler",
    "configure",
    "enqueue",
    "guarded_function_of",
    "guarded_job",
    "runtime",
    "sweep",
]


def __getattr__(name: str) -> Any:
    # Workers and producers need no cron.
    if name == "LeaderCronScheduler":
        from taskguard_rq.cron import LeaderCronScheduler

        return LeaderCronScheduler
    raise AttributeError(f"module 'taskguard_rq' has no attribute {name!r}")
