"""RQ's suite with `GuardedWorker` instead of `Worker`, and its jobs guarded with a key for each
job.

As a plugin of RQ's pytest this guards the workers that the tests start. The jobs are those of
`tests/fixtures.py`, which worker processes import as well: `running.py` adds a line to it.
"""

from __future__ import annotations

import inspect
import uuid
from typing import Any

import rq
import rq.worker

from taskguard import current_guard
from taskguard.errors import TransactionUsageError
from taskguard_rq import GuardedSimpleWorker, GuardedSpawnWorker, GuardedWorker, guarded_job

# Not jobs: helpers that tests call in processes that have to be quick, or that workers call back.
_HELPERS = (
    "start_worker", "burst_two_workers", "run_dummy_heroku_worker", "kill_", "resume_",
    "create_file_after_timeout_and_setpgrp",
)  # fmt: skip
_OF_CALLBACKS = "job"

for _module in (rq, rq.worker):
    for _guarded in (GuardedWorker, GuardedSimpleWorker, GuardedSpawnWorker):
        _name = _guarded.__name__.removeprefix("Guarded")
        if hasattr(_module, _name):
            setattr(_module, _name, _guarded)


def _key(*args: Any, **kwargs: Any) -> str:
    """Return the job's key, or a new key if there is no job or its body calls another job."""
    del args, kwargs
    job = rq.get_current_job()
    try:
        current_guard()
    except TransactionUsageError:
        return str(uuid.uuid4()) if job is None else job.id
    return str(uuid.uuid4())


_guard = guarded_job(key=_key, once_per="message")


def guard_jobs(names: dict[str, Any]) -> None:
    """Guard the jobs among a module's functions, and the methods of its classes that are jobs."""
    # By default 0.25 s after the worker's start: too early for one that checks its ledger first.
    # The job takes 4 s.
    names["_send_kill_horse_command"].__defaults__ = (2.0,)
    for name, value in list(names.items()):
        if getattr(value, "__module__", None) != names["__name__"]:
            continue
        if inspect.isfunction(value) and _is_job(name, value):
            names[name] = _guard(value)
        elif inspect.isclass(value) and value.__bases__ == (object,):
            _guard_methods(value)


def _is_job(name: str, function: Any) -> bool:
    first = next(iter(inspect.signature(function).parameters), "")
    return not name.startswith(("_", *_HELPERS)) and first != _OF_CALLBACKS


def _guard_methods(kind: type) -> None:
    for name, value in list(vars(kind).items()):
        if isinstance(value, classmethod | staticmethod):
            setattr(kind, name, type(value)(_guard(value.__func__)))
        elif inspect.isfunction(value) and (name == "__call__" or not name.startswith("_")):
            setattr(kind, name, _guard(value))
