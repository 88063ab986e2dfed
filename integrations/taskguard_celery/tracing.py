"""What Celery makes of a message that is acknowledged without a result: as little as it can.

A delivery that is parked, put off or dropped ends by Celery's Ignore. For each of them the child of
a prefork pool formats its traceback twice and sends that to its parent, with every position of the
code in Celery's own tracer: as much work as the rest of such a delivery. Nobody ever sees it.

Guarantees: guarded tasks are traced by Celery's own tracer; an Ignore has a traceback of one line
there. Every other exception keeps its own.
"""

from __future__ import annotations

import inspect
from typing import Any

from celery.app import trace
from celery.exceptions import Ignore

from taskguard_celery.recognition import guarded_tasks

__all__ = ["trace_briefly"]


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
    if "Info" not in inspect.signature(trace.build_tracer).parameters:
        return  # of a Celery that has no place for it
    for task, _ in guarded_tasks(app):
        task.__trace__ = trace.build_tracer(
            task.name, task, app.loader, hostname, app=app, Info=_BriefInfo
        )
