"""Run errbacks that take `(request, exc, traceback)`: Celery calls them in the failed delivery.

Guarantees: if the key is held or the ledger is down, the errback waits in that delivery, as long as
the delivery's limits allow. If it still cannot run, taskguard logs an error. If the worker dies,
the errback is lost, because it has no message. An errback of one argument is a normal message.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import time
import uuid
from collections.abc import Callable
from typing import Any

from celery import Task
from celery.app.task import Context

from taskguard import Guard, TaskGuard, errors
from taskguard.integration import (
    Answered,
    Completed,
    Deferred,
    Delivery,
    Ended,
    GuardedFunction,
    MessageRef,
)
from taskguard_celery.message import longest_wait_s

__all__ = ["InPlace", "call_errback", "call_in_place", "failed_request"]

logger = logging.getLogger("taskguard")


class InPlace:
    """Lets a call wait in the worker, because it has no message that could be published again.

    `waits_here`: a deferral is not the end of the delivery, so the runner does not count it.
    """

    waits_here = True
    max_delay_s = 2.0
    new_message_per_deferral = False

    def __init__(self, at_work: Task) -> None:
        self._at_work = at_work

    @property
    def longest_wait_s(self) -> float:
        """The longest time that the calling delivery may wait, in seconds."""
        return longest_wait_s(self._at_work)

    def retries_in_s(self, error: BaseException) -> float | None:
        """Return None: an errback is called once."""
        del error
        return None

    def publish_again(self, deferrals: int, delay_s: float) -> None:
        """Do nothing: the caller waits and tries again."""


def failed_request(args: tuple[Any, ...]) -> Context | None:
    """Return the failed request if these are the arguments of an errback, else None."""
    for first, second in itertools.pairwise(args):
        if isinstance(first, Context) and isinstance(second, BaseException):
            return first
    return None


def call_errback(
    runtime: TaskGuard,
    compiled: GuardedFunction,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    task: Task,
    failed: Context,
) -> Any:
    """Call the errback `task` once its key is free. Raises its body's errors, or KeyBusyError."""

    at_work = task.app.current_worker_task
    queue = InPlace(at_work)

    delivery_of = functools.partial(
        compiled.delivery,
        args,
        kwargs,
        namespace=runtime.namespace,
        task=task.name,
        queue=queue,
    )
    try:
        if at_work is None:
            # In the worker's own process, for a killed child, waiting would stop the whole worker.
            return runtime.run(compiled, args, kwargs, task=task.name)
        return call_in_place(
            runtime,
            delivery_of,
            lambda guard: compiled.call(args, kwargs, guard),
            message=MessageRef(f"errback:{uuid.uuid4()}"),
            wait_s=queue.longest_wait_s,
            because="Celery calls this errback without a message that could be deferred. An "
            "errback that takes only the task's id has a message",
        )
    except (errors.KeyBusyError, errors.LedgerUnavailableError, errors.LedgerSchemaError) as error:
        logger.error("the errback %s of %s was not run: %s", task.name, failed.id, error)  # noqa: TRY400  # Celery logs the traceback
        raise


def call_in_place(
    runtime: TaskGuard,
    delivery_of: Callable[..., Delivery],
    body: Callable[[Guard], Any],
    *,
    message: MessageRef,
    wait_s: float,
    because: str,
) -> Any:
    """Run a call that cannot be deferred once its key is free. Return None if it is dropped.

    Raises the errors of its body, or KeyBusyError after `wait_s` seconds with the text `because`.
    """
    until_s = time.monotonic() + wait_s
    while True:
        delivery = delivery_of(message=message)
        outcome = runtime.runner.deliver(delivery, body)
        if isinstance(outcome, Completed | Answered):
            return outcome.value
        if not isinstance(outcome, Deferred):
            return None  # dropped
        if time.monotonic() + outcome.delay_s > until_s:
            runtime.runner.counting.unrun(delivery, Ended.REFUSED)
            raise errors.KeyBusyError(
                f"{delivery.key} was not free within {wait_s:.0f} s, and {because}.",
                key=delivery.key,
            )
        time.sleep(outcome.delay_s)
        message = dataclasses.replace(message, deferrals=outcome.deferrals)
