"""What `rq cron` enqueues says which tick it is: the cron job's name, and when it was due.

`rq cron` is left as it is: where a function with `once_per="tick"` was decorated in its process,
as importing the configuration does, `CronJob.enqueue` writes the tick's name into the job's record
(`marks.py`), in the transaction that enqueues it.

Guarantees: for a cron string the due time is RQ's own; for an interval it is the last multiple of
the interval since 1970, and two jobs of one `rq cron` never get the same one.

Does not guarantee a name for jobs of other schedulers: rq-scheduler enqueues one job again and
again, and says nowhere for which time.
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

# The tick whose job is being enqueued.
_tick: ContextVar[str | None] = ContextVar("taskguard_tick", default=None)


@functools.cache
def name_ticks() -> None:
    """From here on cron jobs of this process carry the names of their ticks."""
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
    """What the cron job is called: its name, or its function's before RQ 3, and its queue."""
    return f"{getattr(cron_job, 'name', cron_job.func_name)}@{cron_job.queue_name}"


def _name_of(cron_job: Any) -> str | None:
    try:
        return tick_name(entry_name(cron_job), _due_at(cron_job))
    except Exception:
        # Whatever is wrong with one of them: it is enqueued, as it would be without us.
        logger.exception("%s: its tick has no name, so it counts as a message", cron_job.func_name)
        return None


def _due_at(cron_job: Any) -> datetime:
    now = datetime.now(UTC)
    if cron_job.cron:
        due: datetime = cron_job.next_enqueue_time or now
        return due
    every = timedelta(seconds=cron_job.interval)
    due = interval_due_at(now, every)
    # RQ looks at its clock more than once a round, so one round may look early.
    latest: datetime | None = getattr(cron_job, _LATEST, None)
    due = due if latest is None else max(due, latest + every)
    setattr(cron_job, _LATEST, due)
    return due
