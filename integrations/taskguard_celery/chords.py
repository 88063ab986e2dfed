"""A chord's member that is delivered twice counts once, also where the result backend counts.

django-celery-results (`django-db`) and Celery's backends on a cache count the answers of a chord's
members and do not look whose they are. A duplicate's answer would be taken for that of another
member: the chord would end early, and its body would fail or never be called.

Guarantees: the answer of a member that had its result before is not counted. It is if a count is
missing: a worker was killed between storing a result and counting it.

Does not guarantee anything for a member that fails in both deliveries, because Celery counts a
failure outside of the task; nor for tasks that are not guarded.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from celery import Task
from celery.backends.base import KeyValueStoreBackend
from celery.states import READY_STATES

__all__ = ["count_once"]

logger = logging.getLogger("taskguard")

_DJANGO = "django_celery_results.backends.database"
# Longest time from the end of a body to its result, and from there to its count, in a worker that
# was not killed.
_COUNTED_WITHIN_S = 2.0
_POLL_S = 0.05


def count_once(task: Task, *, answered: bool = False) -> None:
    """Take the message in hand out of its chord if its answer has been counted there.

    Called when its outcome is known, because a retry needs the chord. `answered`: another delivery
    of the message did its work. So its result is there, or about to be stored.
    """
    request = task.request
    if not request.chord or not request.group:
        return
    look = _counter_of(task.backend)
    if look is None:
        return
    try:
        has_result = _becomes(lambda: task.backend.get_state(request.id) in READY_STATES, answered)
        if has_result and _becomes(lambda: look(task, request)):
            request.chord = None
    except Exception as error:  # noqa: BLE001  # the backend's; it fails or works for the answer
        logger.debug("%s: not known whether its chord has its answer: %s", request.id, error)


def _becomes(condition: Callable[[], bool], waits: bool = True) -> bool:
    until_s = time.monotonic() + _COUNTED_WITHIN_S
    while not condition():
        if not waits or time.monotonic() > until_s:
            return False
        time.sleep(_POLL_S)
    return True


def _counter_of(backend: Any) -> Callable[[Task, Any], bool] | None:
    """How to see whether a chord has counted all results that there are; None: it does not count.

    Others keep a member's answer by its id, or ask for the results.
    """
    module = sys.modules.get(_DJANGO)
    if module is not None and isinstance(backend, module.DatabaseBackend):
        return _has_counted_in_django
    counts = KeyValueStoreBackend.on_chord_part_return
    own = getattr(type(backend), "on_chord_part_return", None)
    if own is counts and backend.implements_incr:
        return _has_counted_in_cache
    return None


def _has_counted_in_django(task: Task, request: Any) -> bool:
    counter = sys.modules[_DJANGO].ChordCounter.objects.filter(group_id=request.group).first()
    if counter is None:  # the chord has ended
        return True
    return _has_counted(counter.count, counter.group_result(app=task.app))


def _has_counted_in_cache(task: Task, request: Any) -> bool:
    backend = task.backend
    counted = int(backend.get(backend.get_key_for_chord(request.group)) or 0)
    members = task.app.GroupResult.restore(request.group, backend=backend)
    if members is None:  # the chord has ended
        return True
    return _has_counted((request.chord.get("chord_size") or len(members)) - counted, members)


def _has_counted(missing: int, members: Any) -> bool:
    """Whether as many answers are missing as members have no result. The count was read first."""
    return missing <= sum(not member.ready() for member in members.results)
