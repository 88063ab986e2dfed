"""`once_per="run"` on real workers: unique until it has ended, and then again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import sqlalchemy as sa
from rq.job import Job

from support import invoices
from taskguard.ledger.tables import MESSAGES, WORK
from taskguard.model.runs import RUN
from taskguard_rq import enqueue

pytestmark = pytest.mark.usefixtures("producer")


def send(office: Any, words: str, waits: bool = False, **options: Any) -> Job:
    return office.queue.enqueue(invoices.sync, "a", words, waits, **options)


def wait_for_step(office: Any, name: str) -> None:
    office.wait_for(lambda: office.steps(name), f"a step {name!r}")


def wait_for_member(office: Any, job: Job) -> None:
    """Wait until the message of this job is a member of a run."""
    theirs = MESSAGES.c.message.startswith(job.id), MESSAGES.c.work.contains(RUN)

    def joined() -> bool:
        with office.engine.connect() as db:
            return db.execute(sa.select(MESSAGES.c.work).where(*theirs)).first() is not None

    office.wait_for(joined, f"{job.id} joins a run")


def wait_for_end(office: Any, job: Job) -> Any:
    """Wait until a job has ended, and return its result."""

    def ended() -> Any:
        return Job.fetch(job.id, connection=office.connection).latest_result()

    office.wait_for(ended, f"the end of {job.id}")
    return ended()


def attempts(office: Any) -> list[tuple[str, int]]:
    """Return state and attempts of each run."""
    with office.engine.connect() as db:
        rows = db.execute(sa.select(WORK).where(WORK.c.base.is_not(None))).all()
    return sorted((row.state, row.attempts) for row in rows)


def test_a_second_job_in_progress_is_answered_and_a_later_one_runs(office: Any) -> None:
    """A job that meets its own work is answered by it. One that is sent after its end runs."""
    office.worker()
    office.worker()
    first = send(office, "one", waits=True)
    wait_for_step(office, "began one")
    second = send(office, "two")
    wait_for_member(office, second)
    office.let_go()
    assert [wait_for_end(office, each).return_value for each in (first, second)] == ["one"] * 2
    assert wait_for_end(office, send(office, "three")).return_value == "three"
    assert office.effects() == Counter({"a one": 1, "a three": 1})


def test_replace_while_a_body_runs_never_loses_the_newest_call(office: Any) -> None:
    """While a body runs, each call replaces the one that follows. The newest runs after it."""
    office.worker()
    office.worker()
    first = enqueue(office.queue, invoices.sync, ("a", "one", True), duplicate="replace")
    wait_for_step(office, "began one")
    enqueue(office.queue, invoices.sync, ("a", "two"), duplicate="replace")
    third = enqueue(office.queue, invoices.sync, ("a", "three"), duplicate="replace")
    office.let_go()
    assert wait_for_end(office, first.job).return_value == "one"
    assert wait_for_end(office, third.job).return_value == "three"
    assert office.effects() == Counter({"a one": 1, "a three": 1})


def test_a_requeued_job_resumes_its_failed_run(office: Any) -> None:
    """A person requeues a failed job. Its run goes on with the next attempt. The next job begins
    a run of its own."""
    office.worker()
    office.worker()
    failed = send(office, "fails", waits=True)
    wait_for_step(office, "began fails")
    member = send(office, "member")
    wait_for_member(office, member)
    office.let_go()
    assert "ValueError" in wait_for_end(office, failed).exc_string
    assert "WorkFailedError" in wait_for_end(office, member).exc_string
    Job.fetch(failed.id, connection=office.connection).requeue()
    office.wait_for(lambda: attempts(office) == [("DONE", 2)], "the second attempt")
    assert wait_for_end(office, send(office, "next")).return_value == "next"
    assert office.effects() == Counter({"a fails": 1, "a next": 1})
