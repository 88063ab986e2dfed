"""Read a Celery message's identity, numbers and age, and defer its delivery.

`Task.replace` keeps the task id, so the nesting is part of the identity. Retries keep the id and
increase the number of retries. Deferrals keep both, and a mark counts them. If an id is used for
two messages, the time of the first publication tells them apart. Retries and deferrals keep that
time (`marks.py`).

To defer a delivery, taskguard publishes the same message again, with one more deferral.
Guarantees: the message is unchanged (`forwarding.py`), and none of the task's retries is spent.

A message that is sent again expires only by its header `expires`, which a worker reads and reports.
It has no `expiration` of the broker, because RabbitMQ drops such a message without notice.

`publish_again` returns only after the broker took the message. On RabbitMQ that needs
`confirm_publish`, which `safe_defaults` sets. If publishing fails, the delivery goes back into the
queue, so that one of the two is always alive. A quorum queue discards a message after a number of
deliveries. There the delivery waits in the worker and tries again.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn, TypeVar

from billiard.process import current_process
from celery import Task
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from celery.utils.time import maybe_make_aware

from taskguard import errors
from taskguard.integration import MessageRef
from taskguard_celery.broker import broker_kind, visibility_timeout_s
from taskguard_celery.forwarding import forward, signature_in_hand
from taskguard_celery.marks import marks_of
from taskguard_celery.retries import retries_in_s

try:
    from celery.utils.quorum_queues import detect_quorum_queues
except ImportError:  # Celery before 5.5 cannot consume from them

    def detect_quorum_queues(app: Any, driver_type: str) -> tuple[bool, str]:  # noqa: ARG001  # Celery's
        """Return that there are no quorum queues."""
        return False, ""


__all__ = [
    "EXPIRES_HEADER",
    "CeleryQueue",
    "ComesAgain",
    "HasFailed",
    "NeverRuns",
    "NotPublishedError",
    "PutBack",
    "detect_quorum_queues",
    "expires_at_s",
    "is_redelivered",
    "is_timed_out",
    "longest_wait_s",
    "message_of",
    "note_time_limit",
    "published_at_s",
    "put_off_unread",
    "rank_of",
    "sending_of",
    "stores_errors",
]

EXPIRES_HEADER = "expires"
"""Celery's header for when the message expires, in ISO 8601.

The option `expires` of `apply_async()` also tells the broker to drop the message at that time.
"""

logger = logging.getLogger("taskguard")

_T = TypeVar("_T")

# A message that is delayed beyond the visibility timeout multiplies: with a countdown of four times
# the timeout, 10,471 deliveries were measured in 72 s.
_SHARE_OF_VISIBILITY_TIMEOUT = 0.25
_MAX_DELAY_S = 30.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 10.0
# Half of RabbitMQ's consumer_timeout, after which it closes the worker's channel.
_MAX_WAIT_S = 900.0
_SHARE_OF_TIME_LIMIT = 0.5
# A hard time limit may end the child this much earlier: seconds, and share of the limit.
_LIMIT_COMES_EARLY_S, _LIMIT_COMES_EARLY_SHARE = 0.5, 0.1


def message_of(request: Any) -> MessageRef:
    """Return the identity and numbers of the request's message."""
    marks = marks_of(request)
    return MessageRef(
        id=marks.message,
        retries=request.retries or 0,
        deferrals=marks.deferrals,
        sending=sending_of(marks.sent_s),
        tick=marks.tick,
    )


def sending_of(published_s: float | None) -> str:
    """Return the text that tells two messages with one id apart, or "" if there is no time."""
    return "" if published_s is None else f"{published_s:.6f}"


def published_at_s(request: Any) -> float | None:
    """Return when the message was first published, in seconds since 1970, or None if unknown."""
    return marks_of(request).sent_s


def rank_of(app: Any, request: Any) -> int:
    """Return the message's rank in its line. The message that the broker would prefer is lower.

    RabbitMQ prefers the highest priority, Redis the lowest. A message without a priority has 0.
    """
    priority = int((request.delivery_info or {}).get("priority") or 0)
    # kombu reads priority 0 first from Redis. Other brokers prefer the highest, or have no order.
    return priority if broker_kind(app) == "redis" else -priority


def expires_at_s(app: Any, request: Any) -> float | None:
    """Return when the message expires, in seconds since 1970, or None if it does not."""
    expires = request.expires
    if expires is None:
        return None
    moment = datetime.fromisoformat(expires) if isinstance(expires, str) else expires
    return float(maybe_make_aware(moment, app.timezone).timestamp())


def stores_errors(task: Task | None, said: bool | None) -> bool:
    """Return whether the caller of a message can read an error.

    `said` is the message's own `ignore_result`. With None, the task's setting applies.
    """
    ignores = said if said is not None else task is not None and task.ignore_result
    return not ignores or (task is not None and bool(task.store_errors_even_if_ignored))


def is_redelivered(request: Any) -> bool:
    """Return True if the broker reports that it has delivered the message before.

    This does not detect every duplicate: a deferred or retried message is new to the broker.
    """
    return bool((request.delivery_info or {}).get("redelivered"))


class PutBack(Reject, Ignore):  # type: ignore[misc]  # Celery has no types
    """Put the message back into the queue.

    It is an Ignore as well, because `autoretry_for` treats a plain Reject as a failure of the body.
    """


class ComesAgain(Ignore):  # type: ignore[misc]  # Celery has no types
    """The message is parked or deferred, so it is delivered again."""


class NeverRuns(Ignore):  # type: ignore[misc]  # Celery has no types
    """The message was dropped, and its caller can read why."""


class HasFailed(Ignore):  # type: ignore[misc]  # Celery has no types
    """FAILURE was stored for the message, and its body did not run."""


class NotPublishedError(Exception):
    """The broker may not have taken the new copy, so the delivered message has to stay alive.

    `delivery_goes_on`: the delivery has not ended, so the runner does not count it.
    """

    delivery_goes_on = True


def longest_wait_s(task: Task) -> float:
    """Return how long the delivered message may wait in the worker, in seconds.

    In that time, the broker does not redeliver it, and no time limit ends it.
    """
    visible_s = visibility_timeout_s(task.app)
    conf = task.app.conf
    hard_s, soft_s = task.request.timelimit or (None, None)
    limits_s = (
        hard_s or task.time_limit or conf.task_time_limit,
        soft_s or task.soft_time_limit or conf.task_soft_time_limit,
    )
    bounds_s = [_MAX_WAIT_S, *(float(s) * _SHARE_OF_TIME_LIMIT for s in limits_s if s)]
    if visible_s is not None:
        bounds_s.append(visible_s * _SHARE_OF_VISIBILITY_TIMEOUT)
    return min(bounds_s)


_worker_time_limit_s: list[float] = []


def note_time_limit(worker: Any) -> None:
    """Note the hard time limit of a worker (`--time-limit`), which its children inherit."""
    limit_s = getattr(worker, "time_limit", None)
    _worker_time_limit_s[:] = [float(limit_s)] if limit_s else []


def is_timed_out(task: Task, *, started_s: float) -> bool:
    """Return True if the message's hard time limit is over, so that the pool ends this child.

    `started_s` is when the task or its delivery began, by `time.monotonic()`. The pool counts from
    slightly before that. Only a pool that forks has such a limit. A limit that was set with
    `celery control time_limit` is known to the pool alone.
    """
    if getattr(current_process(), "index", None) is None:
        return False
    hard_s, _ = task.request.timelimit or (None, None)
    limits_s = [hard_s, task.time_limit, *_worker_time_limit_s, task.app.conf.task_time_limit]
    limit_s = float(next(filter(None, limits_s), 0.0))
    early_s = min(_LIMIT_COMES_EARLY_S, limit_s * _LIMIT_COMES_EARLY_SHARE)
    return limit_s > 0.0 and time.monotonic() - started_s >= limit_s - early_s


class CeleryQueue:
    """Defers the message that `task` is handling."""

    new_message_per_deferral = True

    def __init__(self, task: Task) -> None:
        self._task = task
        self._waits_until_s: float | None = None
        self._pause_s = _FIRST_PAUSE_S

    # Computed only when a message is deferred: reading a setting of Celery takes 10 µs.
    @property
    def max_delay_s(self) -> float:
        """The longest delay of a message that is published again, in seconds."""
        visible_s = visibility_timeout_s(self._task.app)
        if visible_s is None:
            return _MAX_DELAY_S
        return min(_MAX_DELAY_S, visible_s * _SHARE_OF_VISIBILITY_TIMEOUT)

    @property
    def longest_wait_s(self) -> float:
        """How long the delivered message may wait in the worker, in seconds."""
        return longest_wait_s(self._task)

    @property
    def deferrals(self) -> int:
        """How often the delivered message has been deferred."""
        return marks_of(self._task.request).deferrals

    def retries_in_s(self, error: BaseException) -> float | None:
        """Return in at most how many seconds Celery delivers the message again, or None."""
        return retries_in_s(self._task, error)

    def publish_again(self, deferrals: int, delay_s: float) -> None:
        """Publish the message again. Raises NotPublishedError unless the broker took it."""
        task, request = self._task, self._task.request
        try:
            forward(
                task.app,
                signature_in_hand(task),
                dataclasses.replace(marks_of(request), deferrals=deferrals),
                retries=request.retries,
                countdown=self._countdown_s(delay_s),
            )
        except Exception as error:
            # After any error the new copy may not exist, so keep the delivered message.
            raise NotPublishedError(f"{type(error).__name__}: {error}") from error

    def until_published(self, attempt: Callable[[], _T], put_back: Callable[[], None]) -> _T:
        """Return what `attempt` returns, and keep the message alive while it cannot be published.

        `put_back` is called before the message goes back to the queue.

        Raises PutBack if the message goes back to the queue. That happens at once, unless the queue
        counts its deliveries: RabbitMQ discards a quorum queue's message after 20.
        """
        while True:
            try:
                return attempt()
            except NotPublishedError as error:
                try:
                    self._pause(error)
                except PutBack:
                    put_back()
                    raise

    def _pause(self, error: NotPublishedError) -> None:
        """Wait before the next attempt. Raises PutBack if the message has waited long enough."""
        now_s = time.monotonic()
        if self._waits_until_s is None:
            wait_s = self.longest_wait_s if self._counts_deliveries() else 0.0
            self._waits_until_s = now_s + wait_s
        stays = now_s < self._waits_until_s
        logger.warning(
            "%s[%s] could not be deferred (%s); %s",
            self._task.name,
            self._task.request.id,
            error,
            "waiting, because its queue may limit deliveries" if stays else "back to the queue",
        )
        try:
            time.sleep(self._pause_s)
        except SoftTimeLimitExceeded:
            stays = False
        if not stays:
            raise PutBack(str(error), requeue=True) from None
        self._pause_s = min(self._pause_s * 1.5, _LONGEST_PAUSE_S)

    def _countdown_s(self, delay_s: float) -> float:
        """Round the delay up for RabbitMQ if it delays messages itself: to at least one second."""
        return float(max(1, math.ceil(delay_s))) if self._has_quorum_queues() else delay_s

    def _has_quorum_queues(self) -> bool:
        """Return True if there are quorum queues, as Celery detects them when it publishes."""
        app = self._task.app
        transport = app.producer_pool.connections.connection.transport
        return bool(detect_quorum_queues(app, transport.driver_type)[0])

    def _counts_deliveries(self) -> bool:
        """Return True if the queue may discard the message. The broker's policies are not known."""
        try:
            return self._has_quorum_queues()
        except Exception as error:  # noqa: BLE001  # the broker is down, and the message stays
            logger.debug("the kinds of queues are not known: %s", error)
            return True


def put_off_unread(queue: CeleryQueue, error: errors.TaskguardError) -> NoReturn:
    """Defer a delivery because the settings are wrong: nothing runs until they are corrected."""
    logger.error("nothing guarded can run: %s", error)
    queue.publish_again(queue.deferrals + 1, queue.max_delay_s)
    raise ComesAgain(str(error))
