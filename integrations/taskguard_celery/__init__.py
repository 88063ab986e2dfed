"""taskguard for Celery: `@guarded_task` under `@app.task`.

Read next: `decorator.py` (a delivery), `house.py` (settings), `startup.py` (what a worker checks).
"""

from __future__ import annotations

from taskguard_celery.decorator import guarded_function_of, guarded_task
from taskguard_celery.house import configure, house_of
from taskguard_celery.startup import check_worker, safe_defaults, warnings_for

__all__ = [
    "check_worker",
    "configure",
    "guarded_function_of",
    "guarded_task",
    "house_of",
    "safe_defaults",
    "warnings_for",
]
