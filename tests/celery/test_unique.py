"""`enqueue(duplicate=, delay_s=)` on real workers: one message of a work from its enqueueing on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from celery import chord
from celery.exceptions import TaskRevokedError
from sqlalchemy import orm

from support.clock_shim import server_clock, unavailable
from support.needs import missing
from support.waiting import patience_s, wait_until
from taskguard.errors import AlreadyEnqueuedError, ConfigurationError
from taskguard.model.states import State
from taskguard_celery import enqueue, runtime_of


def sent(shop: Any) -> int:
    with shop.broker() as broker:
        return int(shop.messages(broker))


def test_who_attaches_gets_the_result_of_the_first_message(shop: Any) -> None:
    """While the first message waits or runs, an enqueue that attaches sends nothing. Afterwards a
    new message gets the stored result."""
    index = shop.tasks.index

    def attach(words: str) -> list[Any]:
        with orm.Session(shop.engine) as session, session.begin():
            kept = enqueue(index, (1, words), session=session, duplicate="attach")
        return [kept, enqueue(index, (2, words), duplicate="attach")]

    firsts, seconds = attach("first"), attach("second")
    assert [each.outcome for each in firsts + seconds] == ["sent"] * 2 + ["attached"] * 2
    assert [each.result.id for each in firsts] == [each.result.id for each in seconds]
    for second in seconds:
        second.send()
    assert sent(shop) == 2
    with shop.worker():
        for second in seconds:
            assert second.result.get(timeout=patience_s()) == "first"
        for third in attach("third"):
            assert third.outcome == "sent"
            assert third.result.get(timeout=patience_s()) == "first"
        shop.wait_for_quiet()
    assert shop.effects() == Counter({"1 first": 1, "2 first": 1})


def test_who_attaches_to_work_in_progress_gets_its_result(shop: Any) -> None:
    """An enqueue can attach to running work that `delay()` sent."""
    tasks = shop.tasks
    running = tasks.index.delay(1, "running", waits=True)
    with shop.worker():
        shop.wait_for_steps("began")
        attached = enqueue(tasks.index, (1, "late"), duplicate="attach")
        assert attached.outcome == "attached"
        assert attached.result.id == running.id
        shop.let_go()
        assert attached.result.get(timeout=patience_s()) == "running"
        shop.wait_for_quiet()
    assert shop.effects() == Counter({"1 running": 1})


def test_skipped_or_refused_nothing_is_sent(shop: Any) -> None:
    """With `duplicate="skip"` or `"raise"`, nothing is sent. The call returns None, or raises an
    error with the key and the first message."""
    index = shop.tasks.index
    first = enqueue(index, (1, "first"))
    assert enqueue(index, (1, "second"), duplicate="skip") is None
    with orm.Session(shop.engine) as session:
        assert enqueue(index, (1, "second"), session=session, duplicate="skip") is None
        with pytest.raises(AlreadyEnqueuedError, match=f"is enqueued.*{first.result.id}"):
            enqueue(index, (1, "second"), session=session, duplicate="raise")
        session.commit()
    with pytest.raises(AlreadyEnqueuedError) as refused:
        enqueue(index, (1, "second"), duplicate="raise")
    assert (refused.value.key, refused.value.begun) == ("order:1", False)
    assert sent(shop) == 1
    other = enqueue(index, (2, "other"), duplicate="skip")
    assert other is not None
    assert other.outcome == "sent"
    assert enqueue(index, (3, "third"), duplicate="raise").outcome == "sent"


def test_the_newest_arguments_run_under_the_first_id(shop: Any) -> None:
    """With `duplicate="replace"`, older messages run nothing, and all callers get one result."""
    index = shop.tasks.index
    calls = [enqueue(index, (1, words), duplicate="replace") for words in ("a", "b", "c")]
    assert [each.outcome for each in calls] == ["sent", "replaced", "replaced"]
    assert len({each.result.id for each in calls}) == 1
    assert sent(shop) == 3
    with shop.worker():
        assert [each.result.get(timeout=patience_s()) for each in calls] == ["c"] * 3
        shop.wait_for_quiet()
    assert shop.effects() == Counter({"1 c": 1})
    assert len(shop.steps("began")) == 1
    assert shop.work("shop.index", 1).attempts == 1


def test_callers_of_a_replaced_call_hear_of_it(shop: Any) -> None:
    """A chord whose member waits for its key gets the newest result. A failed message that was to
    be retried is REVOKED: the newer call has an id of its own."""
    tasks = shop.tasks
    with shop.worker(concurrency=2):
        with runtime_of(tasks.app).lock("order:1"):
            total = chord([tasks.number.s(1, 10)])(tasks.total.s())
            wait_until(lambda: len(shop.ledger.waiting()) == 1, message="it waits")
            assert enqueue(tasks.number, (1, 20), duplicate="replace").outcome == "replaced"
        assert total.get(timeout=patience_s()) == 20
        failed = tasks.number.delay(2, -1)
        wait_until(lambda: failed.state == "RETRY", message="its first failure")
        assert (
            enqueue(tasks.number, (2, 30), duplicate="replace").result.get(timeout=patience_s())
            == 30
        )
        assert failed.get(timeout=patience_s()) == 30  # its retry found the newer call DONE
        failed = tasks.number.delay(3, -1)
        wait_until(lambda: failed.state == "RETRY", message="its first failure")
        with runtime_of(tasks.app).lock("order:3"):
            enqueue(tasks.number, (3, 40), duplicate="replace")
            with pytest.raises(TaskRevokedError, match="a newer call of order:3 took its place"):
                failed.get(timeout=patience_s())


def test_debounced_it_runs_once_after_the_last_time(shop: Any) -> None:
    """Each enqueue moves the start, and the last message runs once."""
    index = shop.tasks.index
    with shop.worker():
        shop.wait_for_quiet()
        for words in ("a", "b", "c"):
            due_s = time.time() + 6
            last = enqueue(index, (1, words), duplicate="replace", delay_s=6)
        assert last.result.get(timeout=patience_s()) == "c"
        shop.wait_for_quiet()
    [began] = shop.steps("began")
    assert began.at_s > due_s - 0.5
    assert shop.effects() == Counter({"1 c": 1})


@pytest.mark.once
@pytest.mark.parametrize("hours", [3, -3])
def test_a_senders_clock_does_not_count(shop: Any, hours: int) -> None:
    """A delay counts by the database's clock, even if the sender's clock is wrong."""
    missing(unavailable())
    code = (
        "from support.shop import index; from taskguard_celery import enqueue\n"
        "for each in 'abc': enqueue(index, (1, each), duplicate='replace', delay_s=4)"
    )
    with server_clock() as clock, shop.worker():
        shop.wait_for_quiet()
        clock.jump(hours * 3600)
        before_s = time.time()
        environment = {**os.environ, **shop.environment, **clock.environment}
        environment["PYTHONPATH"] = str(Path(__file__).parents[1])
        subprocess.run(
            [sys.executable, "-c", code], env=environment, check=True, timeout=patience_s()
        )
        [began] = shop.wait_for_steps("began")
        shop.wait_for_quiet()
    assert began.at_s > before_s + 3.5
    assert shop.effects() == Counter({"1 c": 1})


@pytest.mark.once
def test_a_call_that_has_begun_is_not_replaced(shop: Any) -> None:
    """A call that has begun is not replaced. The caller gets an error, and nothing is written."""
    index = shop.tasks.index
    with shop.worker():
        first = enqueue(index, (1, "first", True), duplicate="replace")
        shop.wait_for_steps("began")
        with pytest.raises(AlreadyEnqueuedError, match=r"is in progress.*when it has ended") as why:
            enqueue(index, (1, "second"), duplicate="replace")
        assert why.value.begun
        shop.let_go()
        assert first.result.get(timeout=patience_s()) == "first"
    assert shop.effects() == Counter({"1 first": 1})


def test_what_cannot_be_is_refused_with_the_reason(shop: Any) -> None:
    """Combinations that cannot work are refused before anything is written."""
    tasks = shop.tasks
    with pytest.raises(ConfigurationError, match="each message, or tick, is work of its own"):
        enqueue(tasks.index_each, (1,), duplicate="skip")
    with pytest.raises(ConfigurationError, match="has a link, which would be lost"):
        enqueue(tasks.index, (1, "a"), duplicate="attach", link=tasks.index.s("b"))
    with pytest.raises(ConfigurationError, match="give one of answer, attach"):
        enqueue(tasks.index, (1, "a"), duplicate="unique")  # type: ignore[call-overload]
    with pytest.raises(ConfigurationError, match="delay_s, and a countdown"):
        enqueue(tasks.index, (1, "a"), delay_s=1, countdown=1)
    with pytest.raises(ConfigurationError, match="delay_s=-1"):
        enqueue(tasks.index, (1, "a"), delay_s=-1)
    assert sent(shop) == 0
    assert shop.ledger.list_work(State.NEW) == []
