"""Whether Celery retries a task after an error, and when its message comes again at the latest.

Celery decides that after the guard has ended: `autoretry_for` is around it. So this reads the same
settings. A body may also retry by itself, which raises `Retry`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from celery import Task
from celery.exceptions import Ignore, Reject, Retry

from taskguard_celery.broker import visibility_timeout_s

__all__ = ["longest_delay_s", "retries_in_s", "seconds_until", "would_retry"]

# Twice the default heartbeat of RabbitMQ, which then delivers the messages of a lost worker again.
_REDELIVERED_S = 120.0


def retries_in_s(task: Task, error: BaseException) -> float | None:
    """Return in at most how many seconds the message comes again after this error, or None.

    After an Ignore the task may have replaced itself by its own work.
    """
    if isinstance(error, Retry):
        delay_s = seconds_until(error.when)
    elif isinstance(error, Ignore) or (isinstance(error, Reject) and error.requeue):
        delay_s = 0.0
    elif would_retry(task, error):
        delay_s = longest_delay_s(task)
    else:
        return None
    return delay_s + (visibility_timeout_s(task.app) or _REDELIVERED_S)


def would_retry(task: Task, error: BaseException) -> bool:
    """Return whether `autoretry_for` retries the task after this error of its function."""
    never = (Ignore, Retry, *getattr(task, "dont_autoretry_for", ()))
    kinds = tuple(getattr(task, "autoretry_for", ()))
    if isinstance(error, never) or not isinstance(error, kinds):
        return False
    most = getattr(task, "override_max_retries", task.max_retries)
    return most is None or (task.request.retries or 0) < most


def longest_delay_s(task: Task) -> float:
    """Return the longest delay of autoretry_for. The delays of `self.retry()` are not known."""
    if task.max_retries == 0 or not getattr(task, "autoretry_for", ()):
        return 0.0
    backoff = getattr(task, "retry_backoff", False)
    longest = getattr(task, "retry_backoff_max", 600) if backoff else task.default_retry_delay
    return float(longest or 0)


def seconds_until(when: Any) -> float:
    """Return the seconds until a retry, which is given as a number, a time or None (at once)."""
    if isinstance(when, datetime):
        now = datetime.now(when.tzinfo or UTC).replace(tzinfo=when.tzinfo)
        when = (when - now).total_seconds()
    return max(0.0, float(when or 0.0))
