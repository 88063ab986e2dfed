"""Items of `task.map()`, `starmap()` and `chunks()`: Celery calls the task for each in one message.

Guarantees: an item's work is named by the map's message and the item's number. So if a map is
delivered twice, each item is done once, and the second delivery uses the stored results. If the key
of an item is taken, the map's message is deferred, and its next delivery continues with that item.
Without a ledger no record tells which items were done, so the map waits for the key in the worker.

Not guaranteed: if an item fails, or its key is held with `busy="raise"`, Celery ends the map. In a
chain or a chord, `chunks()` can send its maps twice: Celery sends them by a task of its own, which
is not guarded.

Read next: `message.py` for how a message is deferred.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from celery import Task
from celery._state import _task_stack
from celery.exceptions import Ignore

from taskguard import Guard, TaskGuard
from taskguard.integration import (
    Answered,
    Completed,
    Dropped,
    Ended,
    GuardedFunction,
    MessageRef,
    Outcome,
)
from taskguard_celery.errbacks import InPlace, call_in_place
from taskguard_celery.message import (
    CeleryQueue,
    is_redelivered,
    message_of,
    published_at_s,
)
from taskguard_celery.recognition import let_go, take_in_hand

__all__ = ["call_item", "map_at_work"]

_MAPS = frozenset({"celery.map", "celery.starmap"})
# Attribute of a map's request: the number of items that have begun.
_ITEMS = "taskguard_items"
# Attribute of an item's request: its number.
_NUMBER = "taskguard_item"


def map_at_work(task: Task) -> Task | None:
    """Return the map that is running, if this call of `task` is one of its items, else None."""
    stack = _task_stack.stack
    if len(stack) < 2 or stack[-1] is not task or stack[-2].name not in _MAPS:
        return None
    found: Task = stack[-2]
    if found.request.called_directly:
        return None
    item = (found.request.kwargs or {}).get("task") or {}
    return found if item.get("task") == task.name else None


def call_item(
    runtime: TaskGuard,
    compiled: GuardedFunction,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    task: Task,
    map_task: Task,
) -> Any:
    """Run the next item of `map_task`. Return None if it is dropped (revoked, `busy="skip"`).

    Raises the errors of its body, or Ignore if the map's message was published again.
    """
    item, request = task.request, map_task.request
    number = vars(item).get(_NUMBER)
    if number is None:
        number = vars(request).get(_ITEMS, 0)
        setattr(request, _ITEMS, number + 1)
        setattr(item, _NUMBER, number)  # a decorator may call the function once more
    message = message_of(request)
    message = dataclasses.replace(message, id=f"{message.id}#{number}")
    take_in_hand(item)
    try:
        outcome = _run(runtime, compiled, args, kwargs, message, task=task, map_task=map_task)
    finally:
        let_go(item)
    if isinstance(outcome, Completed | Answered):
        return outcome.value
    if isinstance(outcome, Dropped) and outcome.reason != "superseded":
        return None
    # The map's message was published again, or a copy of it goes on with this item.
    raise Ignore(f"{map_task.name}[{request.id}] item {number}: {outcome}")


def _run(
    runtime: TaskGuard,
    compiled: GuardedFunction,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    message: MessageRef,
    *,
    task: Task,
    map_task: Task,
) -> Outcome:
    request = map_task.request

    delivery_of = functools.partial(
        compiled.delivery,
        args,
        kwargs,
        namespace=runtime.namespace,
        task=task.name,
        published_at_s=published_at_s(request),
        redelivered=is_redelivered(request),
    )

    def body(guard: Guard) -> Any:
        return compiled.call(args, kwargs, guard)

    if request.is_eager:
        return runtime.runner.deliver(delivery_of(message=message), body)
    if runtime.ledger is None:
        wait = InPlace(map_task)
        value = call_in_place(
            runtime,
            functools.partial(delivery_of, queue=wait),
            body,
            message=message,
            wait_s=wait.longest_wait_s,
            because=f"without a ledger {map_task.name} cannot be deferred: it would do its first "
            "items again. Configure a ledger (taskguard_ledger_url), or send a group",
        )
        return Completed(value)
    queue = CeleryQueue(map_task)
    delivery = delivery_of(message=message, queue=queue)
    runner = runtime.runner
    put_back = functools.partial(runner.counting.unrun, delivery, Ended.UNAVAILABLE)
    return queue.until_published(lambda: runner.deliver(delivery, body), put_back)
