"""How a job is put off: its id goes into the schedule before this execution ends.

All executions of a job share one record in Redis, and the schedule is a set of ids: however
often a job is put off, one entry waits. So the ledger need not record its deferrals, and must not:
RQ's scheduler and a worker that lost its horse write the whole record back as they once read it,
older numbers included. Guarantees: the entry stands before the execution ends, so that a work
horse that dies in between leaves the job in the schedule.

Does not guarantee anything without a scheduler: entries need one (`rq worker --with-scheduler`;
`GuardedWorker` has it on). Where none runs the job goes straight back into its queue, after a
pause, with an error in the log.
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

__all__ = ["Deferral", "RQQueue"]

logger = logging.getLogger("taskguard")

_MAX_DELAY_S = 30.0
_SHARE_OF_TIMEOUT = 0.5
_PAUSE_WITHOUT_SCHEDULER_S = 1.0


class Deferral(Retry):
    """What a job that was put off returns: the stock worker takes it for a retry without end.

    Attributes:
        delay_s: in how many seconds the job comes again; 0: it is in its queue.
        retries: how many retries RQ had counted before.
    """

    def __init__(self, delay_s: int, *, retries: int | None) -> None:
        super().__init__(max=sys.maxsize, interval=delay_s)
        self.delay_s = delay_s
        self.retries = retries


class RQQueue:
    """Puts off the job in hand."""

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
        """Half of its time-out, in seconds: a job that RQ ends is FAILED, begun or not."""
        limit_s = float(self._job.timeout or 0)
        return limit_s * _SHARE_OF_TIMEOUT if limit_s > 0 else math.inf  # -1: it has none

    def publish_again(self, deferrals: int, delay_s: float) -> None:
        """Put the job into the schedule; `deferrals` is a mark, for the next delay."""
        set_mark(self._job, DEFERRALS, deferrals)
        self.defer(delay_s)

    def defer(self, delay_s: float) -> None:
        """Schedule the job; whole seconds, at least one."""
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
        """What the job that was put off returns now."""
        assert self._delay_s is not None  # noqa: S101
        retries = self._job.number_of_retries
        # The stock worker adds one, which a `Retry(max=…)` of the body's own would count as its
        # own.
        self._job.number_of_retries = (retries or 0) - 1
        return Deferral(self._delay_s, retries=retries)

    def _scheduler_runs(self) -> bool:
        key: Any = RQScheduler.get_locking_key(self._queue.name)
        return bool(self._job.connection.exists(key))
