"""How a delivery is put off: the same message again, with the next copy number.

Guarantees: id, retries, links, chord, group, time limits, priority and route stay; none of the
task's own retries is spent. `publish_copy` returns only after the broker took the copy (on
RabbitMQ that needs `confirm_publish`, which `safe_defaults` sets); otherwise the delivery is
rejected back into the queue, so that one of the two is always alive.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any, NoReturn

from celery import Task
from celery.exceptions import Ignore, Reject

from taskguard import errors
from taskguard_celery.message import COPY_HEADER, message_of

__all__ = ["CeleryQueue", "put_off_unread", "visibility_timeout_s"]

logger = logging.getLogger("taskguard")

_VISIBILITY_TIMEOUTS_S = {"redis": 3_600.0, "rediss": 3_600.0, "sentinel": 3_600.0, "sqs": 1_800.0}
# A copy beyond the visibility timeout is delivered again and copies itself: 10,471 deliveries in
# 72 s were measured with a countdown of four times the timeout.
_SHARE_OF_VISIBILITY_TIMEOUT = 0.25
_MAX_DELAY_S = 30.0
_PAUSE_BEFORE_REJECT_S = 1.0


def visibility_timeout_s(app: Any) -> float | None:
    """After how long the broker delivers an unacknowledged message again; None: it does not."""
    scheme = str(app.conf.broker_read_url or app.conf.broker_url or "").partition(":")[0]
    default_s = _VISIBILITY_TIMEOUTS_S.get(scheme.partition("+")[0])
    if default_s is None:
        return None
    return float((app.conf.broker_transport_options or {}).get("visibility_timeout", default_s))


class CeleryQueue:
    """Puts off the message that `task` is handling."""

    numbers_copies = True

    def __init__(self, task: Task) -> None:
        self._task = task
        visible_s = visibility_timeout_s(task.app)
        self.max_delay_s = (
            _MAX_DELAY_S
            if visible_s is None
            else min(_MAX_DELAY_S, visible_s * _SHARE_OF_VISIBILITY_TIMEOUT)
        )

    @property
    def copy(self) -> int:
        """The copy number of the message in hand."""
        return message_of(self._task.request).copy

    def publish_copy(self, copy: int, delay_s: float) -> None:
        """Publish the message again. Rejects the one in hand if the broker does not take it."""
        request = self._task.request
        headers = {**(request.headers or {}), COPY_HEADER: copy}
        signature = self._task.signature_from_request(
            request, countdown=self._countdown_s(delay_s), retries=request.retries, headers=headers
        )
        try:
            signature.apply_async()
        except Exception as error:
            # Any error here means that no live copy is known: keep the message that there is.
            logger.exception(
                "%s[%s] could not be put off; back to the queue", self._task.name, request.id
            )
            time.sleep(_PAUSE_BEFORE_REJECT_S)
            raise Reject(str(error), requeue=True) from error

    def _countdown_s(self, delay_s: float) -> float:
        """Quorum queues delay by whole seconds, at least one."""
        if self._task.app.conf.get("task_default_queue_type") == "quorum":
            return float(max(1, math.ceil(delay_s)))
        return delay_s


def put_off_unread(queue: CeleryQueue, error: errors.TaskguardError) -> NoReturn:
    """The settings are wrong: nothing can run, and nothing must be lost until they are mended."""
    logger.error("nothing guarded can run: %s", error)
    queue.publish_copy(queue.copy + 1, queue.max_delay_s)
    raise Ignore(str(error))
