"""`once_per="run"` on real workers: unique until it has ended, and then again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import sqlalchemy as sa
from celery import chord
from celery.exceptions import TaskRevokedError

from support.waiting import patience_s, wait_until
from taskguard.errors import WorkFailedError
from taskguard.ledger.tables import MESSAGES, WORK
from taskguard.model.runs import RUN
from taskguard_celery import enqueue


def wait_for_step(shop: Any, name: str) -> None:
    wait_until(lambda: bool(shop.steps(name)), message=name)


def wait_for_member(shop: Any, result: Any) -> None:
    """Wait until the message of this result is a member of a run."""
    theirs = MESSAGES.c.message.startswith(result.id), MESSAGES.c.work.contains(RUN)

    def joined() -> bool:
        with shop.engine.connect() as db:
            return db.execute(sa.select(MESSAGES.c.work).where(*theirs)).first() is not None

    wait_until(joined, message=f"{result.id} joined a run")


def attempts(shop: Any) -> list[tuple[str, int]]:
    """Return state and attempts of each run."""
    with shop.engine.connect() as db:
        rows = db.execute(sa.select(WORK).where(WORK.c.base.is_not(None))).all()
    return sorted((row.state, row.attempts) for row in rows)


@pytest.mark.parametrize("name", ["sync", "sync_or_skip", "sync_or_raise"])
def test_a_second_message_in_progress_is_answered_and_a_later_one_runs(
    shop: Any, name: str
) -> None:
    """A message that meets its own work is answered by it, whatever `busy=` says. One that is sent
    after its end runs."""
    sync = getattr(shop.tasks, name)
    with shop.worker(concurrency=2):
        first = sync.delay("a", "one", "go one")
        wait_for_step(shop, "began one")
        second = sync.delay("a", "two")
        wait_for_member(shop, second)
        shop.let_go("go one")
        assert [each.get(timeout=patience_s()) for each in (first, second)] == ["one", "one"]
        assert sync.delay("a", "three").get(timeout=patience_s()) == "three"
        shop.wait_for_quiet()
    assert shop.effects() == Counter({"a one": 1, "a three": 1})


@pytest.mark.parametrize("name", ["sync", "sync_in_line"])
def test_replace_while_a_body_runs_never_loses_the_newest_call(shop: Any, name: str) -> None:
    """A debounce: while a body runs, each call replaces the one that follows. The newest runs
    after the body, and its caller gets its own result."""
    sync = getattr(shop.tasks, name)
    with shop.worker(concurrency=2):
        first = enqueue(sync, ("a", "one", "go one"), duplicate="replace")
        wait_for_step(shop, "began one")
        second = enqueue(sync, ("a", "two"), duplicate="replace")
        third = enqueue(sync, ("a", "three"), duplicate="replace", delay_s=1)
        assert second.result.id != first.result.id
        assert third.result.id == second.result.id
        shop.let_go("go one")
        assert first.result.get(timeout=patience_s()) == "one"
        assert third.result.get(timeout=patience_s()) == "three"
        shop.wait_for_quiet()
    assert shop.effects() == Counter({"a one": 1, "a three": 1})


def test_the_members_of_a_failed_run_read_its_error(shop: Any) -> None:
    """If a run gives up, its members fail with WorkFailedError, which is not retried. A chord that
    waits for a member fails, too. The next message begins a run."""
    retried = shop.tasks.sync_retried
    with shop.worker(concurrency=2):
        first = enqueue(retried, ("a", "fails", "go"))
        wait_for_step(shop, "began fails")
        member = enqueue(retried, ("a", "member"))
        joined = chord([retried.s("a", "header")], shop.tasks.total.s()).delay()
        wait_for_member(shop, joined.parent.children[0])
        shop.let_go("go")
        with pytest.raises(ValueError, match="fails"):
            first.result.get(timeout=patience_s())
        with pytest.raises(WorkFailedError, match="ValueError: fails"):
            member.result.get(timeout=patience_s())
        wait_until(lambda: joined.state == "FAILURE", message="the chord's end")
        assert "WorkFailedError" in str(joined.result)
        assert retried.delay("a", "next").get(timeout=patience_s()) == "next"
        shop.wait_for_quiet()
    assert len(shop.steps("began fails")) == 2  # one retry
    assert shop.effects() == Counter({"a next": 1})


def test_an_id_that_is_sent_again_resumes_its_failed_run(shop: Any) -> None:
    """If a person sends the id of a failed message again, its run goes on with the next
    attempt."""
    sync = shop.tasks.sync
    with shop.worker():
        failed = sync.delay("a", "fails")
        with pytest.raises(ValueError, match="fails"):
            failed.get(timeout=patience_s())
        shop.wait_for_quiet()
        sync.apply_async(("a", "mended"), task_id=failed.id)
        wait_for_step(shop, "began mended")
        shop.wait_for_quiet()
    assert attempts(shop) == [("DONE", 2)]
    assert shop.effects() == Counter({"a mended": 1})


def test_a_revoked_message_that_opened_the_run_ends_it(shop: Any) -> None:
    """If the message that opened a run is revoked while it waits, the other members are REVOKED,
    too. The next message begins a run."""
    tasks = shop.tasks
    with shop.worker(concurrency=2):
        holder = tasks.sync.delay("a", "holder", "go")
        wait_for_step(shop, "began holder")
        first = tasks.sync_in_line.delay("a", "one")
        wait_for_member(shop, first)
        second = tasks.sync_in_line.delay("a", "two")
        wait_for_member(shop, second)
        shop.revoke(first)
        shop.let_go("go")
        assert holder.get(timeout=patience_s()) == "holder"
        for revoked in (first, second):
            with pytest.raises(TaskRevokedError):
                revoked.get(timeout=patience_s())
        assert tasks.sync_in_line.delay("a", "next").get(timeout=patience_s()) == "next"
        shop.wait_for_quiet()
    assert shop.effects() == Counter({"a holder": 1, "a next": 1})
