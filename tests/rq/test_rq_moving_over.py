"""RQ's `unique` and `once_per="run"`, over the same jobs on one real worker.

Each comparison is by library: whether it enqueues a job, and which bodies run. The page
`docs/how-to/moving-over.md` describes the differences.
"""

from __future__ import annotations

from collections import Counter

import pytest

from support import moved_jobs
from support.moved_jobs import LIBRARIES
from support.office import SHORT_LEASES, Office
from support.waiting import wait_until

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("producer")]

BOTH = dict.fromkeys(LIBRARIES, True)
NONE = dict.fromkeys(LIBRARIES, False)
ONLY_TASKGUARD = {"RQ": False, "taskguard": True}


def send(office: Office, words: str, how: str = "") -> dict[str, bool]:
    """Enqueue a job by each library. Return which libraries enqueued it."""
    return {each: moved_jobs.is_sent(office.queue, each, words, how) for each in LIBRARIES}


def wait_for_effects(office: Office, *expected: str) -> None:
    office.wait_for(lambda: office.effects() == Counter(expected), f"the effects {expected}")


def wait_until_idle(office: Office) -> None:
    """Wait until each job has ended."""

    def is_idle() -> bool:
        return not office.queue.count and not office.queue.started_job_registry.count

    office.wait_for(is_idle, "no job waits or runs")


def test_a_job_is_refused_while_another_one_waits_or_runs(office: Office) -> None:
    """While a job waits or runs, both libraries refuse a second one, and one body runs."""
    assert send(office, "first", "waits") == BOTH
    assert send(office, "second") == NONE
    for _ in LIBRARIES:
        office.worker()
    office.wait_for(lambda: len(office.steps("began")) == 2, "both bodies")
    assert send(office, "third") == NONE
    office.let_go()
    wait_for_effects(office, "RQ first", "taskguard first")


def test_a_job_that_is_enqueued_after_the_end(office: Office) -> None:
    """After the end, RQ refuses a job as long as it keeps the result. A guard runs it."""
    office.worker()
    assert send(office, "first") == BOTH
    wait_for_effects(office, "RQ first", "taskguard first")
    wait_until_idle(office)
    assert send(office, "second") == ONLY_TASKGUARD
    wait_for_effects(office, "RQ first", "taskguard first", "taskguard second")


def test_a_job_that_is_enqueued_after_a_failure(office: Office) -> None:
    """After a failure, RQ refuses a job as long as it keeps the failed job. A guard runs it."""
    office.worker()
    assert send(office, "first", "fails") == BOTH
    office.wait_for(lambda: office.queue.failed_job_registry.count == 2, "both jobs have failed")
    assert send(office, "second") == ONLY_TASKGUARD
    wait_for_effects(office, "taskguard second")


def test_a_job_that_is_enqueued_after_a_kill(office: Office) -> None:
    """If a worker is killed, RQ refuses a job as long as it keeps the killed one. A guard's run is
    continued by the next job when its lease has ended."""
    office.queue.enqueue(moved_jobs.run, "taskguard", "first", "waits")
    assert moved_jobs.is_sent(office.queue, "RQ", "first", "waits")
    workers = [office.worker(**SHORT_LEASES) for _ in LIBRARIES]
    office.wait_for(lambda: len(office.steps("began")) == 2, "both bodies")
    for worker in workers:
        worker.kill()
    wait_until(
        lambda: moved_jobs.is_sent(office.queue, "taskguard", "second"),
        takes_s=2,
        message="the lease ends",
    )
    assert not moved_jobs.is_sent(office.queue, "RQ", "second")
    office.worker(**SHORT_LEASES)
    wait_for_effects(office, "taskguard second")
