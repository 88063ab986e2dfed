"""Workers that defer, park and cancel jobs, and run a scheduler for deferred jobs.

Guarantees: a deferred job gets no result record, no counted retry and no FAILED or FINISHED entry.
With stock workers, a deferral is an uncounted retry, and its result record stays.
`GuardedWorkerMixin` works with any worker class, in either order of the base classes. The scheduler
runs unless Python code passes `with_scheduler=False`.

A job that waits for its key (`busy="park"`) is DEFERRED, and listed in that registry. A worker that
knows of such jobs runs a relay (`relay.py`). A job that never runs is CANCELED: it was revoked,
skipped, superseded by a newer job, or it expired in its line. In a line, jobs of a queue that the
worker reads first have priority.

The worker loads the drivers of the lock server and the ledger before it forks. Otherwise each work
horse would load them, which takes a quarter of a second per job. If only the jobs' module names
them (`taskguard_rq.configure()`), the first work horse loads them (`preloading.py`).

Not guaranteed before RQ 3 for a `SpawnWorker`: its children are stock workers.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from rq import Queue, SimpleWorker, Worker
from rq.job import Job, JobStatus
from rq.worker import BaseWorker, DequeueStrategy, SpawnWorker

from taskguard.errors import (
    ConfigurationError,
    LedgerUnavailableError,
    WorkFailedError,
    WorkStillDeadError,
)
from taskguard.integration import Configuration, examine, flush_all, log_findings
from taskguard_rq.horses import HorseCounts
from taskguard_rq.parking import (
    CanceledJob,
    ParkedJob,
    allow_parking,
    cancel,
    defer_in_registry,
    tell_line,
)
from taskguard_rq.preloading import describe, load, tell_version
from taskguard_rq.queue import Deferral
from taskguard_rq.redelivery import note_start
from taskguard_rq.relay import RQRelay, look_for_lines, note_parking
from taskguard_rq.runtime import runtime

try:  # RQ 3 has rate limits
    from rq.rate_limit import release_slot
except ImportError:  # pragma: no cover
    release_slot: Callable[[Job], object] | None = None  # type: ignore[no-redef]

__all__ = ["GuardedSimpleWorker", "GuardedSpawnWorker", "GuardedWorker", "GuardedWorkerMixin"]

logger = logging.getLogger("taskguard")

# Before RQ 3, a worker has one execution at a time, and `cleanup_execution()` does not name it.
_NAMES_EXECUTION = "execution" in inspect.signature(Worker.cleanup_execution).parameters
_RANK_VARIABLE = "TASKGUARD_RQ_RANK"
_SEND_COUNTS_S = 10
_SAID_BY_RQ = frozenset({"queue_server_away"})
_SCHEDULER = list(inspect.signature(BaseWorker.work).parameters).index("with_scheduler") - 1


def _load(connection: Any) -> None:
    """Load what work horses need, check the servers and log findings, then close the connections.

    Raises SystemExit if the ledger's tables are missing or wrong.
    """
    tell_version(connection)
    try:
        runtime()
    except ConfigurationError:
        return  # the job's module may configure it; otherwise the job raises this error
    reports = examine(Configuration(runtime, queue_server=connection, serves="rq", starts=True))
    found = [finding for report in reports for finding in report.findings]
    try:
        if "ledger_away" not in {finding.name for finding in found}:
            load(connection)
    except LedgerUnavailableError as error:
        logger.warning("the ledger is down; messages will be deferred: %s", error)
    except ConfigurationError as error:
        logger.critical("the worker does not start: %s", error)
        raise SystemExit(f"taskguard: {error}") from error
    log_findings(found, but=_SAID_BY_RQ)


class GuardedWorkerMixin(BaseWorker):
    """Mixin for a worker class of your own: `class OurWorker(HerokuWorker, GuardedWorkerMixin)`.

    The order does not matter: it is a BaseWorker itself, so its methods always precede RQ's.
    """

    _relay: RQRelay | None = None
    _counts: HorseCounts | None = None

    def work(self, *args: Any, **kwargs: Any) -> bool:
        """Run the worker as RQ does, with a scheduler, and with drivers loaded for its work horses.

        `with_scheduler=False` leaves the scheduler to another worker. Jobs can be deferred only
        while a scheduler runs. The command `rq worker` always gets one, because it has no option
        to turn it off.

        Returns:
            True if the worker ran a job.

        Raises:
            SystemExit: the ledger's tables are missing, or the worker may not write to them.
        """
        describe(self)
        _load(self.connection)
        self._relay = RQRelay(self.connection)
        if isinstance(self, Worker):
            self._counts = HorseCounts.of_worker()
        self._look_for_lines()
        by_position = len(args) > _SCHEDULER
        if not by_position and ("with_scheduler" not in kwargs or _is_default_of_command()):
            kwargs["with_scheduler"] = True
        try:
            return super().work(*args, **kwargs)
        finally:
            if self._counts is not None:
                self._counts.close()
                self._counts = None

    def prepare_job_execution(self, job: Job, *args: Any, **kwargs: Any) -> None:
        """Note whether the job was begun before, and then prepare it, which overwrites that."""
        note_start(job)
        allow_parking(job, rank=self._rank_of(job))
        super().prepare_job_execution(job, *args, **kwargs)

    def handle_job_retry(
        self, job: Job, queue: Queue, retry: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Defer, park or cancel a job and forget this execution, or let RQ retry it."""
        if not isinstance(retry, Deferral | ParkedJob | CanceledJob):
            in_s = retry.get_interval(job.number_of_retries or 0, retry.intervals)
            super().handle_job_retry(job, queue, retry, *args, **kwargs)
            tell_line(job, in_s=in_s)
            return
        with self.connection.pipeline() as pipeline:
            if isinstance(retry, CanceledJob):
                ttl_s = job.get_result_ttl(self.default_result_ttl)
                cancel(job, retry.why, self.name, pipeline, ttl_s=ttl_s)
            elif isinstance(retry, ParkedJob):
                defer_in_registry(job, self.name, pipeline)
            else:
                _put_off(job, queue, retry, pipeline)
            which = {"execution": kwargs["execution"]} if _NAMES_EXECUTION else {}
            self.cleanup_execution(job, pipeline=pipeline, **which)
            pipeline.execute()
        if release_slot is not None:
            release_slot(job)

    def handle_job_failure(self, job: Job, *args: Any, **kwargs: Any) -> None:
        """Handle a failure as RQ does, then tell the line of its key whether RQ retries the job."""
        in_s = job.get_retry_interval() if job.should_retry else 0
        super().handle_job_failure(job, *args, **kwargs)
        tell_line(job, in_s=in_s)

    def handle_exception(self, job: Job, *exc_info: Any) -> None:
        """Handle an error as RQ does. Log it at INFO if an earlier delivery has reported it.

        Error trackers hook into RQ's own method, so they hear only of the first one.
        """
        error = exc_info[1] if len(exc_info) > 1 else None
        if not isinstance(error, WorkStillDeadError | WorkFailedError):
            super().handle_exception(job, *exc_info)
            return
        logger.info("job %s: %s", job.id, error)
        for handler in self._exc_handlers:
            goes_on = handler(job, *exc_info)
            if goes_on is not None and not goes_on:
                break

    def handle_job_success(self, job: Job, *args: Any, **kwargs: Any) -> None:
        """Handle a success as RQ does. If a decorator suppressed a failure, no retry follows."""
        super().handle_job_success(job, *args, **kwargs)
        tell_line(job, in_s=0)

    def perform_job(self, *args: Any, **kwargs: Any) -> bool:
        """Run the job as RQ does, then hand the counts of a work horse to its worker."""
        if not self.is_horse:
            return super().perform_job(*args, **kwargs)
        counts = self._counts  # None in a new interpreter
        if counts is not None:
            counts.begin()
        try:
            return super().perform_job(*args, **kwargs)
        finally:
            flush_all() if counts is None else counts.hand_over()

    def handle_work_horse_killed(self, *args: Any, **kwargs: Any) -> None:
        """Handle a killed work horse as RQ does, and count that its counts are lost."""
        super().handle_work_horse_killed(*args, **kwargs)  # type: ignore[no-untyped-call]  # RQ's
        if self._counts is not None:
            self._counts.note_killed()

    def dequeue_job_and_maintain_ttl(self, timeout: int | None, *args: Any, **kwargs: Any) -> Any:
        """Dequeue as RQ does. Before that, and while no job comes, send counts."""
        if self._counts is not None:
            self._counts.send()
            if timeout is not None and not self._counts.is_empty:
                timeout = min(timeout, _SEND_COUNTS_S)
        return super().dequeue_job_and_maintain_ttl(timeout, *args, **kwargs)

    def heartbeat(self, *args: Any, **kwargs: Any) -> None:
        """Send a heartbeat as RQ does. Then send counts, and start the relay if it is needed."""
        super().heartbeat(*args, **kwargs)
        if self._counts is None:
            flush_all(due=True)  # it has no work horses, or does not know the ledger
        elif not self.is_horse:
            self._counts.send()
        if self._relay is not None and not self.is_horse:
            self._relay.keep()

    def run_maintenance_tasks(self) -> None:
        """Run RQ's maintenance, then start a relay if messages wait in the ledger."""
        super().run_maintenance_tasks()  # type: ignore[no-untyped-call]  # RQ's
        self._look_for_lines()

    def teardown(self) -> None:
        """Shut down as RQ does, then stop the relay."""
        super().teardown()  # type: ignore[no-untyped-call]  # RQ's
        if self._counts is not None and not self.is_horse:
            self._counts.send(due=False)
        if self._relay is not None and not self.is_horse:
            self._relay.stop()

    def _rank_of(self, job: Job) -> int:
        """Return how many queues the worker reads before the job's, or 0 if it rotates them."""
        strategy = self._dequeue_strategy or DequeueStrategy.DEFAULT
        in_order = type(self).reorder_queues is BaseWorker.reorder_queues
        names = self.queue_names()
        if strategy != DequeueStrategy.DEFAULT or not in_order or job.origin not in names:
            return 0
        return names.index(job.origin)

    def _look_for_lines(self) -> None:
        if isinstance(self, SpawnWorker):
            note_parking()  # its children cannot report a job that parks
        look_for_lines()
        if self._relay is not None:
            self._relay.keep()


def _put_off(job: Job, queue: Queue, deferral: Deferral, pipeline: Any) -> None:
    job.number_of_retries = deferral.retries
    job._result = None  # noqa: SLF001  # RQ would store the Deferral, and dashboards would show it
    if deferral.delay_s:
        when = datetime.now(UTC) + timedelta(seconds=deferral.delay_s)
        job.set_status(JobStatus.SCHEDULED, pipeline=pipeline)
        queue.schedule_job(job, when, pipeline=pipeline)
    else:
        queue._enqueue_job(job, pipeline=pipeline)  # noqa: SLF001  # as RQ's own retry


class GuardedWorker(GuardedWorkerMixin, Worker):
    """A worker that forks for each job: `rq worker --worker-class taskguard_rq.GuardedWorker`."""


class GuardedSimpleWorker(GuardedWorkerMixin, SimpleWorker):
    """A worker that runs jobs in its own process, without a fork."""


class GuardedSpawnWorker(GuardedWorkerMixin, SpawnWorker):
    """A worker that starts a new interpreter for each job."""

    def fork_work_horse(self, job: Job, queue: Queue) -> None:
        """Start the work horse, with the job's rank in its environment."""
        os.environ[_RANK_VARIABLE] = str(super()._rank_of(job))
        super().fork_work_horse(job, queue)

    def _rank_of(self, job: Job) -> int:
        del job
        return int(os.environ.get(_RANK_VARIABLE, "0"))


def _is_default_of_command() -> bool:
    """Return True if `rq worker` passes its default of --with-scheduler, which was not typed."""
    click = sys.modules.get("click")
    context = None if click is None else click.get_current_context(silent=True)
    if context is None or "with_scheduler" not in context.params:
        return False
    source = context.get_parameter_source("with_scheduler")
    return source is None or source.name == "DEFAULT"
