"""A worker that puts jobs off without a trace, and keeps a scheduler for them.

Guarantees: a job that is put off gets no result record, no retry count and no FAILED or FINISHED
entry. The stock workers do the same by a retry, whose result record stays; it is not counted.

Work horses find the drivers of the lock server and the ledger loaded: each of them is a fork that
would load them anew, for a quarter of a second of every job.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from rq import Queue, Worker
from rq.job import Job, JobStatus

from taskguard.errors import ConfigurationError, LedgerUnavailableError
from taskguard_rq.house import house
from taskguard_rq.queue import Deferral

try:  # RQ 3 has rate limits
    from rq.rate_limit import release_slot
except ImportError:  # pragma: no cover
    release_slot: Callable[[Job], object] | None = None  # type: ignore[no-redef]

__all__ = ["GuardedWorker"]

logger = logging.getLogger("taskguard")

# Until RQ 3 a worker had one execution at a time, and cleaned up that one.
_NAMES_EXECUTION = "execution" in inspect.signature(Worker.cleanup_execution).parameters


def _check_ledger() -> None:
    """By connections that are closed before the first fork."""
    try:
        ledger = house().runner.ledger
    except ConfigurationError:
        return
    if ledger is None:
        return
    try:
        ledger.check_schema()
    except LedgerUnavailableError as error:
        logger.warning("the ledger is away; jobs will be put off: %s", error)
    except ConfigurationError as error:
        logger.critical("the worker does not start: %s", error)
        raise SystemExit(f"taskguard: {error}") from error
    finally:
        ledger.close()


class GuardedWorker(Worker):
    """`rq worker --worker-class taskguard_rq.GuardedWorker`."""

    def work(self, *args: Any, **kwargs: Any) -> bool:
        """As RQ's, with the scheduler on, and with what every work horse needs loaded before.

        A worker whose ledger's tables are missing, or may not be written, does not start.
        """
        # What is wrong here may be set right by the job's module, and is the job's error otherwise.
        with contextlib.suppress(ConfigurationError):
            house()
        _check_ledger()
        if len(args) <= 6:  # not given by position
            kwargs["with_scheduler"] = True
        return super().work(*args, **kwargs)

    def handle_job_retry(
        self, job: Job, queue: Queue, retry: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Schedule a job that was put off, and forget this execution."""
        if not isinstance(retry, Deferral):
            super().handle_job_retry(job, queue, retry, *args, **kwargs)
            return
        job.number_of_retries = retry.retries
        with self.connection.pipeline() as pipeline:
            if retry.delay_s:
                when = datetime.now(UTC) + timedelta(seconds=retry.delay_s)
                job.set_status(JobStatus.SCHEDULED, pipeline=pipeline)
                queue.schedule_job(job, when, pipeline=pipeline)
            else:
                queue._enqueue_job(job, pipeline=pipeline)  # noqa: SLF001  # as RQ's own retry
            which = {"execution": kwargs["execution"]} if _NAMES_EXECUTION else {}
            self.cleanup_execution(job, pipeline=pipeline, **which)
            pipeline.execute()
        if release_slot is not None:
            release_slot(job)
