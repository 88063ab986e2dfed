"""An operator pauses, resumes and drops, with real workers."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import sqlalchemy as sa
from celery.exceptions import TaskRevokedError

from support.waiting import patience_s, wait_until
from taskguard.ledger.tables import WORK
from taskguard_celery import enqueue, runtime_of

pytestmark = pytest.mark.once


def operations(shop: Any) -> Any:
    return runtime_of(shop.tasks.app).operations


def message_of(shop: Any, work: str) -> str:
    with shop.engine.connect() as db:
        return str(db.execute(sa.select(WORK.c.message).where(WORK.c.id == work)).scalar_one())


def waiting_works(shop: Any, count: int) -> list[str]:
    """Wait until so many messages are in line. Return their works, in order."""
    wait_until(lambda: len(shop.ledger.waiting()) == count, message=f"{count} in line")
    return [each.work for each in shop.ledger.waiting()]


def revoked(result: Any) -> None:
    with pytest.raises(TaskRevokedError):
        result.get(timeout=patience_s())


def test_no_message_is_lost_while_a_key_is_paused(shop: Any) -> None:
    """Messages in line wait, and others are deferred, also those that would be skipped. After the
    pause each runs once, and the line goes on without a relay."""
    operations(shop).pause("queue:a", reason="audit")
    operations(shop).pause("order:7", reason="audit")
    tasks = shop.tasks
    lined_up = [tasks.queue_up.delay("a", number) for number in range(4)]
    skipping = [tasks.unless_busy.apply_async((7,), ignore_result=False) for _ in range(6)]
    with shop.without_relay(), shop.worker(concurrency=4) as worker:
        waiting_works(shop, 4)
        wait_until(lambda: worker.text().count("the key is paused by") >= 6, message="all deferred")
        assert shop.effects() == {}
        for key in ("queue:a", "order:7"):
            operations(shop).resume(key, reason="done")
        assert [each.get(timeout=patience_s()) for each in lined_up] == [0, 1, 2, 3]
        # Two that come at the same moment after the pause: one of them may be skipped, as ever.
        states = [finished(each) for each in skipping]
    assert set(states) <= {"SUCCESS", "REVOKED"}
    assert "SUCCESS" in states
    assert shop.effects()["7"] == states.count("SUCCESS")


def finished(result: Any) -> str:
    """Wait until the message has a final state."""
    wait_until(lambda: result.state in ("SUCCESS", "REVOKED"), message="a final state")
    return str(result.state)


def test_a_suspended_holder_of_a_slot_commits_nothing_during_a_pause(shop: Any) -> None:
    """A pause at once ends the leases of all slots. The suspended body wakes up, and its commit is
    refused. After the pause it runs again, once."""
    tasks = shop.tasks
    results = [tasks.by_two.delay("a", number, tasks.UNTIL_GO) for number in (1, 2)]
    with shop.worker(concurrency=3) as worker:
        suspended, other = shop.wait_for_steps("began", 2)
        os.kill(suspended.pid, signal.SIGSTOP)
        try:
            operations(shop).pause("queue:a", reason="stuck", now=True)
            shop.let_go()
        finally:
            os.kill(suspended.pid, signal.SIGCONT)
        wait_until(
            lambda: worker.text().count("the key is paused by") >= 2, message="both deferred"
        )
        assert (shop.effects(), other.pid != suspended.pid) == ({}, True)
        operations(shop).resume("queue:a", reason="done")
        assert sorted(each.get(timeout=patience_s()) for each in results) == [1, 2]
    assert set(shop.effects().values()) == {1}


def test_a_pause_waits_for_the_holders(shop: Any) -> None:
    """The bodies at work end, and no other begins until the pause is over."""
    tasks = shop.tasks
    with shop.worker(concurrency=3):
        first = [tasks.queue_up_by_two.delay("a", number, tasks.UNTIL_GO) for number in (1, 2)]
        shop.wait_for_steps("began", 2)
        later = tasks.queue_up_by_two.delay("a", 3)
        waiting_works(shop, 1)
        shop.let_go()
        operations(shop).pause("queue:a", reason="audit", timeout_s=patience_s())
        assert sorted(each.get(timeout=patience_s()) for each in first) == [1, 2]
        done = len(shop.effects())
        assert done == 2 or later.state == "SUCCESS"  # it may have had the first free slot
        operations(shop).resume("queue:a", reason="done")
        assert later.get(timeout=patience_s()) == 3
    assert set(shop.effects().values()) == {1}


def test_a_dropped_message_reads_revoked_and_the_line_goes_on(shop: Any) -> None:
    """The dropped message is sent to notify its caller. The next one runs without a relay."""
    tasks = shop.tasks
    with shop.worker(concurrency=2):
        holder = tasks.queue_up.delay("a", 1, tasks.UNTIL_GO)
        shop.wait_for_steps("began")
        dropped, kept = (tasks.queue_up.delay("a", number) for number in (2, 3))
        works = waiting_works(shop, 2)
        messages = {message_of(shop, work).partition("@")[0]: work for work in works}
        [found] = operations(shop).drop(messages[dropped.id], reason="not wanted")
        assert found.changed
        revoked(dropped)
        assert holder.state != "SUCCESS"
        shop.let_go()
        assert kept.get(timeout=patience_s()) == 3
        wait_until(lambda: shop.ledger.overdue() == [], message="notified once")


def test_a_dropped_message_that_was_never_published_reads_revoked(shop: Any) -> None:
    """It is only in the ledger. A relay sends it, and a worker stores its state."""
    with shop.engine.connect() as db:
        stored = enqueue(shop.tasks.recover, (3,), session=db)
        db.commit()
    assert stored.outcome == "stored"
    [found] = operations(shop).drop("shop.recover order:3", reason="not wanted")
    assert found.changed
    with shop.worker():
        revoked(stored.result)
        wait_until(lambda: shop.ledger.overdue() == [], message="notified once")
    assert shop.effects() == {}
