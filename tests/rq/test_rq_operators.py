"""An operator pauses a key and drops a job, with real RQ workers."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

import taskguard
from support.invoices import book_unless_busy, queue_up
from taskguard_rq.calls import RQSender

pytestmark = pytest.mark.once


def test_jobs_of_a_paused_key_wait_and_a_dropped_one_is_canceled(office: Any) -> None:
    """A job that would be skipped is deferred. The line goes on as soon as the pause ends, and the
    dropped job reads CANCELED, revoked."""
    locks = office.environment["TASKGUARD_LOCKS_URL"]
    ledger = office.environment["TASKGUARD_LEDGER_URL"]
    with closing(taskguard.connect(locks=locks, ledger=ledger)) as tg:
        tg.senders["rq"] = RQSender(office.connection).hand_off
        tg.operations.pause("queue:a", reason="audit")
        tg.operations.pause("account:7", reason="audit")
        office.worker()
        dropped, kept = (office.queue.enqueue(queue_up, "a", number) for number in (1, 2))
        skipping = office.queue.enqueue(book_unless_busy, 7)
        office.wait_for(lambda: len(office.ledger.waiting()) == 2, "two in line")
        office.wait_for(lambda: skipping.get_status(refresh=True) == "scheduled", "deferred")
        assert office.effects() == {}
        works = {each.message.partition("@")[0]: each.work for each in office.ledger.waiting()}
        assert tg.operations.drop(works[dropped.id], reason="not wanted")[0].changed
        office.wait_for(lambda: dropped.get_status(refresh=True) == "canceled", "canceled")
        assert dropped.get_meta()["taskguard_line"] == "revoked"
        for key in ("queue:a", "account:7"):
            assert tg.operations.resume(key, reason="done") is not None
        for job in (kept, skipping):
            office.wait_for(
                lambda job=job: job.get_status(refresh=True) == "finished", f"{job} finished"
            )
    assert set(office.effects().values()) == {1}
