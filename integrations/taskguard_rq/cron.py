"""`python -m taskguard_rq cron CONFIG`: run several `rq cron`, of which only the leader enqueues.

The command takes the options of `rq cron`. A thread campaigns for leadership. TASKGUARD_CRON_TTL_S
is the length of the leader's lease in seconds, 15 by default.

Guarantees: a scheduler enqueues only while it holds the leader's lease. If the leader dies, another
scheduler takes over within the length of the lease and a second. If the leader is stopped, another
takes over at once. The ledger records when each cron job was last enqueued. So a new leader
enqueues each job that became due without a leader once, and enqueues no job a second time. A lost
lease, or a server that is down, does not end the process.

Not guaranteed: a tick can be enqueued twice (see `taskguard_celery.LeaderScheduler`). Jobs with
`once_per="tick"` still run once. Without a ledger, nothing is recorded.

Read next: `ticks.py`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from datetime import UTC, datetime
from typing import Any

from redis import RedisError
from rq.cron import CronJob, CronScheduler
from rq.exceptions import SchedulerNotFound, StopRequested

from taskguard import Leader, Leadership, errors
from taskguard_rq.health import judge_cron_job
from taskguard_rq.recognition import guarded_function_of
from taskguard_rq.runtime import runtime
from taskguard_rq.ticks import entry_name, name_ticks

__all__ = ["LeaderCronScheduler"]

logger = logging.getLogger("taskguard")

TTL_VARIABLE = "TASKGUARD_CRON_TTL_S"
_NAME = "rq cron"
_TTL_S = 15.0
# Interval at which a scheduler checks whether it leads, in seconds.
_LOOK_S = 1.0
_LONGEST_END_S = 3.0


class LeaderCronScheduler(CronScheduler):
    """RQ's scheduler of cron jobs. It enqueues only while this process leads.

    Args:
        args: positional arguments of `CronScheduler`.
        ttl_s: length of the leader's lease in seconds. Default: TASKGUARD_CRON_TTL_S, or 15.
        options: keyword arguments of `CronScheduler`.
    """

    def __init__(self, *args: Any, ttl_s: float | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ttl_s = float(os.environ.get(TTL_VARIABLE, _TTL_S)) if ttl_s is None else ttl_s
        self._leader: Leader | None = None
        self._leadership: Leadership | None = None
        self._leading = threading.Event()
        self._of: Leadership | None = None
        self._stopped = False
        self._redis_is_away = False

    def start(self) -> None:
        """Run until a signal stops this process, as RQ's scheduler does.

        Raises:
            ConfigurationError: a setting of taskguard is wrong or missing.
        """
        name_ticks()
        leader = self._leader = runtime().leader(_NAME, ttl_s=self._ttl_s, on_lost="fence")
        self._say_findings()
        thread = threading.Thread(target=self._campaign, args=(leader,), name="leader", daemon=True)
        thread.start()
        try:
            super().start()  # type: ignore[no-untyped-call]  # RQ's
        except StopRequested:  # during the registration, which RQ does before its own `try`
            self.register_death()
        finally:
            self._stopped = True
            if self._of is not None and self._of.remaining_s:
                self._record(self._of)  # the signal may have come before the last record
            leader.step_down()
            thread.join(_LONGEST_END_S)

    def _say_findings(self) -> None:
        if runtime().ledger is None:
            return  # no work is on record
        for cron_job in self._cron_jobs:
            compiled = guarded_function_of(cron_job.func) if cron_job.func else None
            for finding in judge_cron_job(cron_job, compiled) if compiled else ():
                logger.warning("%s (finding %s)", finding, finding.name)

    def _request_stop(self, signum: Any, frame: Any) -> None:
        self._stopped = True
        super()._request_stop(signum, frame)  # type: ignore[no-untyped-call]  # RQ's

    # -- RQ's loop, in the main thread

    def enqueue_jobs(self) -> list[CronJob]:
        """Enqueue the due jobs if this scheduler leads. Return those that were enqueued."""
        if self._stopped:
            raise StopRequested  # the code that the signal interrupted may have suppressed it
        leadership = self._leadership
        if leadership is None or not leadership.remaining_s:
            self._leading.wait(_LOOK_S)
            return []
        try:
            if self._of is not leadership:
                self._begin(leadership)
            enqueued = super().enqueue_jobs()
        except RedisError as error:
            logger.warning("rq cron: this process cannot enqueue, so it steps down: %s", error)
            self._redis_is_away = True
            leadership.step_down()
            return []
        if enqueued:
            self._record(leadership)
        return enqueued

    def calculate_sleep_interval(self) -> float:
        """Return the number of seconds until the next round."""
        if self._leadership is None:
            return 0.0
        return min(super().calculate_sleep_interval(), _LOOK_S)

    def heartbeat(self) -> None:
        """Send RQ's heartbeat. If Redis gives no answer, go on."""
        try:
            super().heartbeat()
        except RedisError as error:
            logger.debug("rq cron: no heartbeat: %s", error)

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save RQ's own record of this scheduler. If Redis gives no answer, go on."""
        try:
            super().save(*args, **kwargs)
        except RedisError as error:
            logger.debug("rq cron: the scheduler's record was not saved: %s", error)

    def register_death(self, *args: Any, **kwargs: Any) -> None:
        """Remove RQ's record of this scheduler. Go on if Redis is down or was emptied."""
        try:
            super().register_death(*args, **kwargs)
        except (RedisError, SchedulerNotFound) as error:
            logger.debug("rq cron: the scheduler's record was not removed: %s", error)

    def _begin(self, leadership: Leadership) -> None:
        """Continue from the times at which earlier leaders enqueued."""
        recorded: dict[str, str] = leadership.memory or {}
        for job in self._cron_jobs:
            at = recorded.get(_record_name(job))
            if at is not None:
                job.set_enqueue_time(datetime.fromisoformat(at))
        self._of = leadership
        self._record(leadership)

    def _record(self, leadership: Leadership) -> None:
        """Record when each job was enqueued. If this fails, the next record contains it."""
        times = {
            _record_name(job): (job.latest_enqueue_time or datetime.now(UTC)).isoformat()
            for job in self._cron_jobs
            # An interval without a record starts at once under any leader.
            if job.latest_enqueue_time or job.cron
        }
        try:
            leadership.remember(times)
        except errors.TaskguardError as error:
            logger.warning("rq cron: the ledger did not record which jobs were enqueued: %s", error)

    # -- leadership, in its own thread

    def _campaign(self, leader: Leader) -> None:
        """Campaign for leadership, and lead when elected, until the process stops."""
        while not self._stopped:
            try:
                if not self._redis_is_away or self._redis_answers():
                    self._redis_is_away = False
                    leader.run(self._lead)
            except Exception:
                logger.exception("rq cron: the campaign for leadership failed, and goes on")
                time.sleep(_LOOK_S)

    def _redis_answers(self) -> bool:
        try:
            self.connection.ping()
        except RedisError as error:
            logger.debug("rq cron: Redis gave no answer: %s", error)
            time.sleep(_LOOK_S)
            return False
        return True

    def _lead(self, leadership: Leadership) -> None:
        self._leadership = leadership
        self._leading.set()
        try:
            leadership.lost.wait()
        finally:
            self._leading.clear()
            self._leadership = None


def _record_name(job: CronJob) -> str:
    return f"{entry_name(job)} {job.cron or job.interval}"
