"""Jobs that return `Retry`: they ask RQ for another execution, which is not a result."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from support.invoices import ask_again, ask_again_atomically, ask_for, charge_and_ask_again
from taskguard_rq.marks import marks_of

KINDS = [
    ("taskguard_rq.GuardedWorker", ()),
    ("rq.Worker", ("--with-scheduler",)),
    ("rq.SimpleWorker", ("--with-scheduler",)),
    ("rq.worker.SpawnWorker", ("--with-scheduler",)),
]


def finished(job: Any) -> bool:
    return bool(job.get_status(refresh=True) == "finished")


def ended(job: Any) -> bool:
    return job.get_status(refresh=True) in ("finished", "failed")


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_returned_retry_is_not_done(office: Any, kind: str, options: tuple[str, ...]) -> None:
    """RQ runs a job that returned `Retry` again, with the next attempt's number, until it returns
    another value."""
    job = office.queue.enqueue(ask_again, 1, 3)
    office.worker(kind, *options)
    office.wait_for(lambda: ended(job), "ended")
    assert finished(job)
    assert job.return_value() == {"attempt": 3}
    assert office.effects() == Counter({"1": 1})
    assert len(office.steps("began")) == 3


def test_a_returned_retry_rolls_an_atomic_body_back(office: Any) -> None:
    """The earlier writes are rolled back, so there is one effect."""
    job = office.queue.enqueue(ask_again_atomically, 2, 3)
    office.worker()
    office.wait_for(lambda: ended(job), "ended")
    assert job.return_value() == {"attempt": 3}
    assert office.effects() == Counter({"2": 1})
    assert len(office.steps("began")) == 3


def test_a_job_that_asks_too_often_is_failed_and_so_is_its_work(office: Any) -> None:
    """After `max` retries the job and its work are FAILED, and the record has the reason."""
    job = office.queue.enqueue(ask_again, 3, 100, most=2)
    office.worker()
    office.wait_for(lambda: ended(job), "ended")
    assert job.get_status(refresh=True) == "failed"
    assert len(office.steps("began")) == 3
    view = office.ledger.view("support.invoices.ask_again invoice:3")
    assert view is not None
    assert (view.state.value, view.crashes) == ("FAILED", 0)
    assert "Retry(max=2" in (view.error or "")


def test_a_retry_that_is_returned_after_done_is_answered_from_the_record(office: Any) -> None:
    """The effect is committed, so the next execution gets the answer of a duplicate."""
    job = office.queue.enqueue(charge_and_ask_again, 4)
    office.worker()
    office.wait_for(lambda: ended(job), "ended")
    assert finished(job)
    assert office.effects() == Counter({"4": 1})
    assert len(office.steps("began")) == 1
    assert "after DONE" in office.logs()


def test_a_plain_call_hands_the_retry_to_its_caller(office: Any) -> None:
    """A plain call returns the `Retry` to its caller, and the work is not DONE."""
    job = office.queue.enqueue(ask_for, 5, 2)
    office.worker()
    office.wait_for(lambda: ended(job), "ended")
    assert job.return_value() == {"attempt": 2}
    assert office.effects() == Counter({"5": 1})


def test_deferrals_are_not_counted_as_retries_by_the_stock_worker(office: Any) -> None:
    """A stock worker grants `Retry(max=1)` to a job that was deferred before."""
    office.worker("rq.Worker", "--with-scheduler")
    with office.holding("invoice:6"):
        job = office.queue.enqueue(ask_again, 6, 2, most=1)
        office.wait_for(lambda: marks_of(job).deferrals >= 2, "twice")
    office.wait_for(lambda: ended(job), "ended")
    assert finished(job)
    assert office.effects() == Counter({"6": 1})
