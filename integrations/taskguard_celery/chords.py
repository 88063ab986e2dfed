"""Count a chord's member once if it is delivered twice, even if the result backend only counts.

django-celery-results (`django-db`) and Celery's backends on a cache count results of a chord's
members. They do not check which member a result is from. They would count a duplicate's result as
that of another member: the chord would end early, and its body would fail or never be called.

Guarantees: with `django-db` a worker counts the members that have no result yet. So the number of
results of one member does not matter. With a cache, a member's second result is not counted.

With a cache, this is not guaranteed in two cases. If a member fails in both deliveries, Celery
counts both, because it counts failures outside of the task. If both deliveries end at the same
time, both are counted.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from celery import Celery, Task
from celery.backends.base import KeyValueStoreBackend
from celery.result import AsyncResult
from celery.states import READY_STATES

__all__ = ["count_by_results", "count_once"]

logger = logging.getLogger("taskguard")

# Longest time from the end of a body to its result, and from there to its count, in a worker that
# was not killed.
_COUNTED_WITHIN_S = 2.0
_POLL_S = 0.05


def count_once(task: Task, *, answered: bool = False) -> None:
    """Remove the message from its chord if its result has been counted there.

    Called when the outcome is known, because a retry needs the chord. `answered` means that another
    delivery of the message did its work, so its result is stored or about to be stored.
    """
    request = task.request
    if not request.chord or not request.group:
        return
    if not _counts_in_cache(task.backend):
        return
    try:
        has_result = _becomes(lambda: task.backend.get_state(request.id) in READY_STATES, answered)
        if has_result and _becomes(lambda: _has_counted(task, request)):
            request.chord = None
    except Exception as error:  # noqa: BLE001  # the backend raises again for the result
        logger.debug("%s: unknown whether its chord has its result: %s", request.id, error)


def _becomes(condition: Callable[[], bool], waits: bool = True) -> bool:
    until_s = time.monotonic() + _COUNTED_WITHIN_S
    while not condition():
        if not waits or time.monotonic() > until_s:
            return False
        time.sleep(_POLL_S)
    return True


def _counts_in_cache(backend: Any) -> bool:
    counts = KeyValueStoreBackend.on_chord_part_return
    own = getattr(type(backend), "on_chord_part_return", None)
    return own is counts and bool(backend.implements_incr)


def _has_counted(task: Task, request: Any) -> bool:
    """Return True if the chord's missing results are those of members without a result."""
    backend = task.backend
    counted = int(backend.get(backend.get_key_for_chord(request.group)) or 0)  # before the results
    members = task.app.GroupResult.restore(request.group, backend=backend)
    if members is None:  # the chord has ended
        return True
    missing = (request.chord.get("chord_size") or len(members)) - counted
    return missing <= sum(not member.ready() for member in members.results)


def count_by_results(app: Celery) -> None:
    """Let this worker count a chord's members without a result, if its backend is `django-db`."""
    kind = type(app.backend)
    module = sys.modules.get("django_celery_results.backends.database")
    if module is None or not issubclass(kind, module.DatabaseBackend):
        return
    answered = kind.on_chord_part_return
    if hasattr(answered, "__wrapped__"):
        return

    @functools.wraps(answered)
    def on_chord_part_return(
        self: Any, request: Any, state: str, result: Any, **kwargs: Any
    ) -> None:
        if not (request.group and _awaits_more(module, self, request.group)):
            answered(self, request, state, result, **kwargs)

    kind.on_chord_part_return = on_chord_part_return


def _awaits_more(django: Any, backend: Any, group: str) -> bool:
    """Set a chord's count to its number of members without a result. Return False if it is zero.

    A chord without such a member keeps the count 1, for the result that ends it.
    """
    from django.db import router, transaction

    counters = django.ChordCounter.objects
    with transaction.atomic(using=router.db_for_write(django.ChordCounter)):
        counter = counters.select_for_update().filter(group_id=group).first()
        if counter is None:  # the chord has ended
            return True
        members = counter.group_result(app=backend.app).results
        results = backend.TaskModel._default_manager.filter(  # noqa: SLF001  # Django's
            task_id__in=[member.id for member in members], status__in=READY_STATES
        )
        ready = set(results.values_list("task_id", flat=True))
        awaited = sum(not _is_ready(member, ready) for member in members)
        counter.count = max(awaited, 1)
        counter.save(update_fields=["count"])
        return awaited > 0


def _is_ready(member: Any, ready: set[str]) -> bool:
    """Return True if a member is done. A member that is a group has no result of its own."""
    return member.id in ready if isinstance(member, AsyncResult) else bool(member.ready())
