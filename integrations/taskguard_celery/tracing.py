"""Make Celery's tracer cheaper for messages that are acknowledged without a result.

A delivery that is parked, deferred or dropped ends by Celery's Ignore. For each of them, the child
of a prefork pool formats the traceback twice and sends it to its parent. That costs as much as the
rest of such a delivery, and the traceback is never shown.

Guarantees: Celery's own tracer runs guarded tasks. An Ignore gets a traceback of one line, and any
other exception keeps its own. The tracer also notes when a task began, so its time limit is counted
from there, including `task_prerun` handlers and decorators outside the guard.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

from celery.app import trace
from celery.exceptions import Ignore

from taskguard_celery.recognition import guarded_tasks

__all__ = ["begun_s", "trace_briefly"]

# When this child's task began. A child runs one task at a time. Empty if none is running.
_begun_s: list[float] = []


def _brief() -> Any:
    try:
        raise Ignore
    except Ignore as error:
        return error.__traceback__


_BRIEF = _brief()


class _BriefInfo(trace.TraceInfo):  # type: ignore[misc]  # celery has no types
    """Shortens the traceback of an Ignore. Celery's tracer creates this before it formats it."""

    __slots__ = ()

    def __init__(self, state: str, retval: Any = None) -> None:
        super().__init__(state, retval)
        if isinstance(retval, Ignore):
            retval.__traceback__ = _BRIEF


def trace_briefly(app: Any, hostname: str | None) -> None:
    """Rebuild the tracers of all guarded tasks in a child of a prefork pool."""
    options: dict[str, Any] = {}
    parameters = inspect.signature(trace.build_tracer).parameters.values()
    # Not in every Celery. Sentry's wrapper of it has any options.
    if any(each.name == "Info" or each.kind is each.VAR_KEYWORD for each in parameters):
        options["Info"] = _BriefInfo
    for task, _ in guarded_tasks(app):
        tracer = trace.build_tracer(task.name, task, app.loader, hostname, app=app, **options)
        task.__trace__ = _timed(tracer)


def begun_s() -> float | None:
    """Return when this child began its guarded task, by `time.monotonic()`, or None if unknown."""
    return _begun_s[0] if _begun_s else None


def _timed(tracer: Callable[..., Any]) -> Callable[..., Any]:
    def traced(*args: Any, **kwargs: Any) -> Any:
        _begun_s[:] = [time.monotonic()]
        try:
            return tracer(*args, **kwargs)
        finally:
            _begun_s.clear()

    return traced
