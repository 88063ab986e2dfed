"""Findings about RQ's queues and jobs that lose or repeat work."""

from __future__ import annotations

from taskguard.integration import FindingTemplate, Level

_ONCE_PER = (
    'Set once_per= in the guard: "tick" runs each tick of a schedule. "run" runs again if the '
    'former run has ended. "message" runs each job. An explicit "key" runs once, and removes '
    "this finding."
)

NO_SCHEDULER = FindingTemplate(
    "no_scheduler",
    Level.WARNING,
    what="No scheduler runs for this queue.",
    why="A deferred job goes straight back into the queue, over and over.",
    fix="Run `rq worker --with-scheduler`, or `--worker-class taskguard_rq.GuardedWorker`.",
    link="docs/how-to/production.md#before-the-first-deploy",
)
NO_RETRY = FindingTemplate(
    "no_retry",
    Level.WARNING,
    what="The job was enqueued without retry=.",
    why="If its work horse is killed, the job is FAILED and nothing runs it again.",
    fix="Enqueue it with retry=Retry(max=3), or use recoverable=True and a sweep.",
    link="docs/tutorial-rq.md#2-guard-a-job",
)
NO_TIME_LIMIT = FindingTemplate(
    "no_time_limit",
    Level.NOTE,
    what="The job has no timeout (job_timeout=-1).",
    why="A body that hangs keeps its key and its worker forever.",
    fix="Set job_timeout=, or max_hold_s= in its guard.",
    link="docs/how-to/long-tasks.md",
)
JOB_TTL = FindingTemplate(
    "job_ttl",
    Level.WARNING,
    what="RQ drops the job after {kept_s:g} s in the queue (ttl), and a lease lasts {lease_s:g} s.",
    why="A job that is deferred because its key is taken can be lost.",
    fix="Leave ttl= out, or set it well above the ttl_s of the guard.",
    link="docs/reference/options-leases.md#ttl_s",
)
PERIODIC_ONCE = FindingTemplate(
    "periodic_once",
    Level.WARNING,
    what="All jobs of this entry are the same work of {task}.",
    why="The work runs once. Later jobs are answered from its record, which is kept for {days:g} "
    "days or longer.",
    fix=_ONCE_PER,
    link="docs/how-to/periodic.md",
)
CONSTANT_KEY = FindingTemplate(
    "constant_key",
    Level.WARNING,
    what="Its key has no arguments, so all its jobs are the same work.",
    why="The work runs once. Later jobs are answered from its record, which is kept for {days:g} "
    "days or longer.",
    fix=_ONCE_PER,
    link="docs/reference/options-once.md#once_per",
)
