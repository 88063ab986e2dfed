"""Defer a job: its id goes into RQ's schedule before this execution ends.

All executions of a job share one record in Redis, and the schedule is a set of ids. So a job has
one entry, however often it is deferred. The ledger must not record its deferrals: RQ's scheduler,
and a worker that lost its work horse, write back the whole record that they have read, with older
numbers.

Guarantees: the entry exists before the execution ends. If the work horse dies in between, the job
stays in the schedule.

A deferral needs a scheduler (`rq worker --with-scheduler`; `GuardedWorker` starts one). If none
runs, the job goes straight back into its queue after a pause, and taskguard logs an error.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from rq import Queue, Retry
from rq.job import Job
from rq.scheduler import RQScheduler

from taskguard_rq.marks import DEFERRALS, set_mark
from taskguard_rq.retries import RetryReturnedError

__all__ = ["Deferral", "RQQueue"]

logger = logging.getLogger("taskguard")

_MAX_DELAY_S = 30.0
_SHARE_OF_TIMEOUT = 0.5
_PAUSE_WITHOUT_SCHEDULER_S = 1.0
# RQ's workers look for jobs of lost workers every ten minutes (DEFAULT_MAINTENANCE_TASK_INTERVAL).
_REDELIVERED_S = 600.0


class Deferral(Retry):
    """Return value of a deferred job. A stock worker treats it as a retry without a maximum.

    Attributes:
        delay_s: the delay in seconds. 0: the job is in its queue already.
        retries: how many retries RQ had counted before.
    """

    def __init__(self, delay_s: int, *, retries: int | None) -> None:
        super().__init__(max=sys.maxsize, interval=delay_s)
        self.delay_s = delay_s
        self.retries = retries


class RQQueue:
    """Defers the delivered job."""

    max_delay_s = _MAX_DELAY_S
    new_message_per_deferral = False

    def __init__(self, job: Job) -> None:
        self._job = job
        self._queue = Queue(
            job.origin, connection=job.connection, serializer=job.serializer, is_async=True
        )
        self._delay_s: int | None = None

    @property
    def longest_wait_s(self) -> float:
        """Half of the job's timeout, in seconds, because RQ fails a job that waits for longer."""
        limit_s = float(self._job.timeout or 0)
        return limit_s * _SHARE_OF_TIMEOUT if limit_s > 0 else math.inf  # -1: no timeout

    def retries_in_s(self, error: BaseException) -> float | None:
        """Return in at most how many seconds RQ delivers the job again after this error, or None.

        RQ finds the jobs of lost workers by its maintenance.
        """
        job = self._job
        if isinstance(error, RetryReturnedError):
            retry, done = error.retry, job.number_of_retries or 0
            if done >= retry.max:
                return None
            delay_s = max(retry.intervals or [0])
        elif job.should_retry:
            delay_s = job.get_retry_interval()
        else:
            return None
        return delay_s + _REDELIVERED_S

    def publish_again(self, deferrals: int, delay_s: float) -> None:
        """Schedule the job, and store `deferrals` in its marks for the next delay."""
        set_mark(self._job, DEFERRALS, deferrals)
        self.defer(delay_s)

    def defer(self, delay_s: float) -> None:
        """Schedule the job in `delay_s` seconds, rounded up to at least one."""
        seconds = max(1, math.ceil(delay_s))
        if not self._scheduler_runs():
            logger.error(
                "No scheduler runs for the queue %r: job %s goes straight back into it. Start "
                "workers with --with-scheduler, or use taskguard_rq.GuardedWorker.",
                self._queue.name,
                self._job.id,
            )
            time.sleep(min(delay_s, _PAUSE_WITHOUT_SCHEDULER_S))
            self._delay_s = 0
            return
        when = datetime.now(UTC) + timedelta(seconds=seconds)
        self._queue.schedule_job(self._job, when)
        self._delay_s = seconds

    def deferred(self) -> Deferral:
        """Return the value that tells RQ about the deferral."""
        assert self._delay_s is not None  # noqa: S101
        retries = self._job.number_of_retries
        # The stock worker adds one. Otherwise a `Retry(max=…)` that the body returns later would
        # count this deferral.
        self._job.number_of_retries = (retries or 0) - 1
        return Deferral(self._delay_s, retries=retries)

    def _scheduler_runs(self) -> bool:
        key: Any = RQScheduler.get_locking_key(self._queue.name)
        return bool(self._job.connection.exists(key))
