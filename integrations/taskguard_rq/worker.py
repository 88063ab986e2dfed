"""Workers that put jobs off without a trace, and keep a scheduler for them.

Guarantees: a job that is put off gets no result record, no retry count and no FAILED or FINISHED
entry. The stock workers do the same by a retry, whose result record stays; it is not counted.
`GuardedWorkerMixin` does it for any worker class, in whatever order the two are named. The
scheduler is on unless `with_scheduler=False` is said in Python. A job that waits for its key
(`busy="park"`) is DEFERRED, in that registry, and beside a worker that knows of such jobs runs a
relay (`relay.py`). A job that never runs is CANCELED: it was revoked, skipped, superseded by a
newer job, or it expired in its line. Of jobs in line those of a queue
that the worker looks into first have priority.

Work horses find the drivers of the lock server and the ledger loaded: each of them is a fork that
would load them anew, for a quarter of a second of every job. If only the jobs' module says which
they are (`taskguard_rq.configure()`), the first horse loads them.

Does not guarantee the former for a `SpawnWorker` before RQ 3, whose children are stock workers.
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

from taskguard.errors import ConfigurationError, LedgerUnavailableError
from taskguard.integration import Configuration, examine, log_findings
from taskguard_rq.parking import (
    CanceledJob,
    ParkedJob,
    allow_parking,
    cancel,
    defer_in_registry,
    tell_line,
)
from taskguard_rq.preloading import load, tell_version
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

# Until RQ 3 a worker had one execution at a time, and cleaned up that one.
_NAMES_EXECUTION = "execution" in inspect.signature(Worker.cleanup_execution).parameters
_RANK_VARIABLE = "TASKGUARD_RQ_RANK"
_SAID_BY_RQ = frozenset({"queue_server_away"})
_SCHEDULER = list(inspect.signature(BaseWorker.work).parameters).index("with_scheduler") - 1


def _load(connection: Any) -> None:
    """Load what work horses need, and say what is wrong with the servers, by connections that are
    closed again; a worker whose tables are not as they have to be ends here."""
    tell_version(connection)
    try:
        runtime()
    except ConfigurationError:
        return  # may be set right by the job's module, and is the job's error otherwise
    reports = examine(Configuration(runtime, queue_server=connection, serves="rq", starts=True))
    found = [finding for report in reports for finding in report.findings]
    try:
        if "ledger_away" not in {finding.name for finding in found}:
            load(connection)
    except LedgerUnavailableError as error:
        logger.warning("the ledger is down; jobs will be deferred: %s", error)
    except ConfigurationError as error:
        logger.critical("the worker does not start: %s", error)
        raise SystemExit(f"taskguard: {error}") from error
    log_findings(found, but=_SAID_BY_RQ)


class GuardedWorkerMixin(BaseWorker):
    """For a worker class of your own: `class OurWorker(HerokuWorker, GuardedWorkerMixin)`.

    The order does not matter: as a BaseWorker itself, it always comes before RQ's.
    """

    _relay: RQRelay | None = None

    def work(self, *args: Any, **kwargs: Any) -> bool:
        """As RQ's, with the scheduler on, and with what every work horse needs loaded before.

        `with_scheduler=False` leaves the scheduler to another worker: jobs are put off only while
        one runs. `rq worker` cannot say so, and always gets the scheduler. A worker whose ledger's
        tables are missing, or may not be written, does not start.
        """
        _load(self.connection)
        self._relay = RQRelay(self.connection)
        self._look_for_lines()
        by_position = len(args) > _SCHEDULER
        if not by_position and ("with_scheduler" not in kwargs or _is_default_of_command()):
            kwargs["with_scheduler"] = True
        return super().work(*args, **kwargs)

    def prepare_job_execution(self, job: Job, *args: Any, **kwargs: Any) -> None:
        """As RQ's, which forgets here that the job was begun before."""
        note_start(job)
        allow_parking(job, rank=self._rank_of(job))
        super().prepare_job_execution(job, *args, **kwargs)

    def handle_job_retry(
        self, job: Job, queue: Queue, retry: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Schedule a job that was put off, or say that it waits or never runs, and forget this
        execution."""
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
        """As RQ's; and the line of its key hears whether it tries the job again."""
        in_s = job.get_retry_interval() if job.should_retry else 0
        super().handle_job_failure(job, *args, **kwargs)
        tell_line(job, in_s=in_s)

    def handle_job_success(self, job: Job, *args: Any, **kwargs: Any) -> None:
        """As RQ's; a job whose own decorator has swallowed its failure does not come again."""
        super().handle_job_success(job, *args, **kwargs)
        tell_line(job, in_s=0)

    def heartbeat(self, *args: Any, **kwargs: Any) -> None:
        """As RQ's, after each job and now and then; a relay that is wanted runs from then on."""
        super().heartbeat(*args, **kwargs)
        if self._relay is not None and not self.is_horse:
            self._relay.keep()

    def run_maintenance_tasks(self) -> None:
        """As RQ's; and a line in which somebody is left by others gets a relay."""
        super().run_maintenance_tasks()  # type: ignore[no-untyped-call]  # RQ's
        self._look_for_lines()

    def teardown(self) -> None:
        """As RQ's; the relay ends with the worker."""
        super().teardown()  # type: ignore[no-untyped-call]  # RQ's
        if self._relay is not None and not self.is_horse:
            self._relay.stop()

    def _rank_of(self, job: Job) -> int:
        """How many queues it looks into before the job's; 0 if it takes them in turns."""
        strategy = self._dequeue_strategy or DequeueStrategy.DEFAULT
        in_order = type(self).reorder_queues is BaseWorker.reorder_queues
        names = self.queue_names()
        if strategy != DequeueStrategy.DEFAULT or not in_order or job.origin not in names:
            return 0
        return names.index(job.origin)

    def _look_for_lines(self) -> None:
        if isinstance(self, SpawnWorker):
            note_parking()  # its children cannot tell that they know of a job that parks
        look_for_lines()
        if self._relay is not None:
            self._relay.keep()


def _put_off(job: Job, queue: Queue, deferral: Deferral, pipeline: Any) -> None:
    job.number_of_retries = deferral.retries
    if deferral.delay_s:
        when = datetime.now(UTC) + timedelta(seconds=deferral.delay_s)
        job.set_status(JobStatus.SCHEDULED, pipeline=pipeline)
        queue.schedule_job(job, when, pipeline=pipeline)
    else:
        queue._enqueue_job(job, pipeline=pipeline)  # noqa: SLF001  # as RQ's own retry


class GuardedWorker(GuardedWorkerMixin, Worker):
    """`rq worker --worker-class taskguard_rq.GuardedWorker`: a fork for each job."""


class GuardedSimpleWorker(GuardedWorkerMixin, SimpleWorker):
    """The same without forks: jobs run in the worker itself."""


class GuardedSpawnWorker(GuardedWorkerMixin, SpawnWorker):
    """The same with a fresh interpreter for each job."""

    def fork_work_horse(self, job: Job, queue: Queue) -> None:
        """As RQ's, which does not tell the horse how this worker takes its queues."""
        os.environ[_RANK_VARIABLE] = str(super()._rank_of(job))
        super().fork_work_horse(job, queue)

    def _rank_of(self, job: Job) -> int:
        del job
        return int(os.environ.get(_RANK_VARIABLE, "0"))


def _is_default_of_command() -> bool:
    """Whether `rq worker` hands on its own default of --with-scheduler, which nobody typed."""
    click = sys.modules.get("click")
    context = None if click is None else click.get_current_context(silent=True)
    if context is None or "with_scheduler" not in context.params:
        return False
    source = context.get_parameter_source("with_scheduler")
    return source is None or source.name == "DEFAULT"
