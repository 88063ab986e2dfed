"""What Celery makes of a message that is acknowledged without a result: as little as it can.

A delivery that is parked, put off or dropped ends by Celery's Ignore. For each of them the child of
a prefork pool formats its traceback twice and sends that to its parent, with every position of the
code in Celery's own tracer: as much work as the rest of such a delivery. Nobody ever sees it.

Guarantees: guarded tasks are traced by Celery's own tracer; an Ignore has a traceback of one line
there. Every other exception keeps its own. When such a task was begun is known: its time limit is
counted from then on, whatever handlers of `task_prerun` and decorators do before its guard.
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

# When the task of this child was begun, of which there is one at a time; empty: none is.
_begun_s: list[float] = []


def _brief() -> Any:
    try:
        raise Ignore
    except Ignore as error:
        return error.__traceback__


_BRIEF = _brief()


class _BriefInfo(trace.TraceInfo):  # type: ignore[misc]  # celery has no types
    """What Celery's tracer makes first of how a task ended; then it reads the traceback."""

    __slots__ = ()

    def __init__(self, state: str, retval: Any = None) -> None:
        super().__init__(state, retval)
        if isinstance(retval, Ignore):
            retval.__traceback__ = _BRIEF


def trace_briefly(app: Any, hostname: str | None) -> None:
    """Build the tracers of all guarded tasks anew, as a child of a prefork pool has built them."""
    options: dict[str, Any] = {}
    if "Info" in inspect.signature(trace.build_tracer).parameters:  # not in every Celery
        options["Info"] = _BriefInfo
    for task, _ in guarded_tasks(app):
        tracer = trace.build_tracer(task.name, task, app.loader, hostname, app=app, **options)
        task.__trace__ = _timed(tracer)


def begun_s() -> float | None:
    """When this child began the guarded task in hand, by `time.monotonic()`; None: not known."""
    return _begun_s[0] if _begun_s else None


def _timed(tracer: Callable[..., Any]) -> Callable[..., Any]:
    def traced(*args: Any, **kwargs: Any) -> Any:
        _begun_s[:] = [time.monotonic()]
        try:
            return tracer(*args, **kwargs)
        finally:
            _begun_s.clear()

    return traced
