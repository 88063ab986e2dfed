"""taskguard for RQ: `@guarded_job` on the function that is enqueued.

Read next: `decorator.py` (a delivery), `queue.py` (how a job is put off), `worker.py`.
"""

from __future__ import annotations

from taskguard_rq.decorator import guarded_function_of, guarded_job
from taskguard_rq.outbox import enqueue, sweep
from taskguard_rq.runtime import configure, runtime
from taskguard_rq.worker import (
    GuardedSimpleWorker,
    GuardedSpawnWorker,
    GuardedWorker,
    GuardedWorkerMixin,
)

__all__ = [
    "GuardedSimpleWorker",
    "GuardedSpawnWorker",
    "GuardedWorker",
    "GuardedWorkerMixin",
    "configure",
    "enqueue",
    "guarded_function_of",
    "guarded_job",
    "runtime",
    "sweep",
]
