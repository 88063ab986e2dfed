"""Jobs that end their process or are cancelled without a request to stop."""

from __future__ import annotations

from typing import Any

from rq import Retry

from support.invoices import charge, leave


def test_a_job_that_exits_is_dead_after_max_crashes(office: Any) -> None:
    """Each `sys.exit()` of a job counts as a crash. The record says how the jobs ended."""
    office.queue.enqueue(leave, 1, "exit", retry=Retry(max=10))
    office.worker()
    office.wait_for(lambda: "is DEAD" in office.logs(), "DEAD")
    other = office.queue.enqueue(charge, 2)
    office.wait_for(lambda: other.get_status(refresh=True) == "finished", "the queue goes on")
    assert len([item for item, _ in office.steps("began") if item == "1"]) == 3
    view = office.ledger.view("support.invoices.leave invoice:1")
    assert view is not None
    assert (view.state.value, view.crashes) == ("DEAD", 3)
    assert view.error == "SystemExit: usage: leave"


def test_a_cancelled_job_is_failed(office: Any) -> None:
    """A job that raises asyncio.CancelledError is FAILED for RQ and in its record."""
    job = office.queue.enqueue(leave, 3, "cancelled")
    office.worker()
    office.wait_for(lambda: job.get_status(refresh=True) == "failed", "failed")
    view = office.ledger.view("support.invoices.leave invoice:3")
    assert view is not None
    assert (view.state.value, view.crashes) == ("FAILED", 0)
    assert (view.error or "").startswith("CancelledError")
