"""Name the tick of each job that `rq cron` enqueues: the cron job's name and its due time.

If a process imports a function with `once_per="tick"`, taskguard wraps `CronJob.enqueue` there. It
writes the name of the tick into the job's record (`marks.py`), in the transaction that enqueues the
job. `rq cron` needs no change.

Guarantees: for a cron string, the due time is the one that RQ computes. For an interval, it is the
last multiple of the interval since 1970. Two jobs of one `rq cron` never get the same due time.

Jobs of other schedulers get no name: rq-scheduler enqueues one job repeatedly without its due time.
"""

from __future__ import annotations

import functools
import logging
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from typing import Any

from rq.job import Job

from taskguard.integration import interval_due_at, tick_name
from taskguard_rq.marks import TICK, set_mark

__all__ = ["entry_name", "name_ticks"]

logger = logging.getLogger("taskguard")

_LATEST = "_taskguard_latest_due"

# Name of the tick whose job is being enqueued.
_tick: ContextVar[str | None] = ContextVar("taskguard_tick", default=None)


@functools.cache
def name_ticks() -> None:
    """Make the cron jobs of this process carry the names of their ticks."""
    from rq.cron import CronJob  # croniter is slow to import, and few jobs have ticks

    enqueue, save = CronJob.enqueue, Job.save

    @functools.wraps(enqueue)
    def named_enqueue(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _tick.set(_name_of(self))
        try:
            return enqueue(self, *args, **kwargs)
        finally:
            _tick.reset(token)

    @functools.wraps(save)
    def named_save(self: Job, pipeline: Any = None, *args: Any, **kwargs: Any) -> Any:
        saved = save(self, pipeline, *args, **kwargs)
        tick = _tick.get()
        if tick is not None:
            set_mark(self, TICK, tick, pipeline)
        return saved

    CronJob.enqueue, Job.save = named_enqueue, named_save  # type: ignore[method-assign]


def entry_name(cron_job: Any) -> str:
    """Return the cron job's name (before RQ 3, its function's name) and its queue."""
    return f"{getattr(cron_job, 'name', cron_job.func_name)}@{cron_job.queue_name}"


def _name_of(cron_job: Any) -> str | None:
    try:
        return tick_name(entry_name(cron_job), _due_at(cron_job))
    except Exception:
        # Enqueue the job despite any error, as RQ would without taskguard.
        logger.exception("%s: its tick has no name, so it counts as a message", cron_job.func_name)
        return None


def _due_at(cron_job: Any) -> datetime:
    now = datetime.now(UTC)
    if cron_job.cron:
        due: datetime = cron_job.next_enqueue_time or now
        return due
    every = timedelta(seconds=cron_job.interval)
    due = interval_due_at(now, every)
    # RQ reads its clock more than once per round, so one round may seem early.
    latest: datetime | None = getattr(cron_job, _LATEST, None)
    due = due if latest is None else max(due, latest + every)
    setattr(cron_job, _LATEST, due)
    return due
