"""Find entries of beat's schedule, and tasks, that run only once: their messages share one work.

Guarantees: this module checks the entries in the settings. If the models of django-celery-beat are
loaded, it checks the rows of their table, too. It closes the connection for that, unless the
connection was open before. It skips a table that it cannot read.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from celery import Task

from taskguard.integration import Finding, GuardedFunction
from taskguard_celery import findings
from taskguard_celery.recognition import guarded_function_of, takes_itself

__all__ = ["findings_of_rows", "findings_of_schedule", "runs_once"]

logger = logging.getLogger("taskguard")

_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of a schedule.

    Attributes:
        name: its own name.
        task: the task's name.
        args: the positional arguments of each message.
        kwargs: the keyword arguments.
    """

    name: str
    task: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


def runs_once(app: Any, guarded: Sequence[tuple[Task, GuardedFunction]]) -> Iterator[Finding]:
    """Judge the entries of beat, and each guarded task that no finding about an entry names."""
    entries = [*findings_of_schedule(app), *findings_of_rows(app)]
    named = {task for task, _ in entries}
    for _, finding in entries:
        yield finding
    for task, compiled in guarded:
        if compiled.is_one_work and task.name not in named:
            yield findings.CONSTANT_KEY.at(f"the task {task.name}", days=_days(compiled))


def findings_of_schedule(app: Any) -> Iterator[tuple[str, Finding]]:
    """Judge the entries of `beat_schedule`, without a connection. Yield task and finding."""
    schedule = app.conf.beat_schedule
    for name, given in schedule.items() if isinstance(schedule, Mapping) else ():
        with contextlib.suppress(KeyError, TypeError, ValueError):  # beat reports the error
            values = dict(given)
            args, kwargs = values.get("args") or (), values.get("kwargs") or {}
            yield from _judge(app, _Entry(str(name), values["task"], args, kwargs))


def findings_of_rows(app: Any) -> Iterator[tuple[str, Finding]]:
    """Judge the rows in the table of django-celery-beat. Yield task and finding."""
    models = sys.modules.get("django_celery_beat.models")
    if models is None:
        return
    from django.db import connections

    rows = models.PeriodicTask.objects.filter(enabled=True, one_off=False)
    connection = connections[rows.db]
    opens = connection.connection is None
    try:
        found = list(rows.values_list("name", "task", "args", "kwargs"))
    except Exception as error:  # noqa: BLE001  # the database is down, or has no such table
        logger.debug("the entries of django-celery-beat were not checked: %s", error)
        return
    finally:
        if opens:
            connection.close()
    for name, task, args, kwargs in found:
        with contextlib.suppress(TypeError, ValueError):  # beat reports the error
            entry = _Entry(name, task, json.loads(args or "[]"), json.loads(kwargs or "{}"))
            yield from _judge(app, entry)


def _judge(app: Any, entry: _Entry) -> Iterator[tuple[str, Finding]]:
    task = app.tasks.get(entry.task)
    compiled = None if task is None else guarded_function_of(task)
    if compiled is None or not _is_constant(task, compiled, entry):
        return
    where, days = f"beat's entry {entry.name}", _days(compiled)
    yield entry.task, findings.PERIODIC_ONCE.at(where, task=entry.task, days=days)


def _days(compiled: GuardedFunction) -> float:
    return compiled.policy.retention_s / _DAY_S


def _is_constant(task: Task, compiled: GuardedFunction, entry: _Entry) -> bool:
    args = (task, *entry.args) if takes_itself(task) else tuple(entry.args)
    deciding = compiled.deciding(args, dict(entry.kwargs))
    # Beat calls such a value for each message.
    lazy = getattr(sys.modules.get("celery.beat"), "BeatLazyFunc", ())
    return deciding is not None and not any(isinstance(each, lazy) for each in deciding.values())
