"""`busy="park"` with real workers: messages wait in the ledger, and run in order."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from celery import chord, group
from celery.exceptions import ChordError

import taskguard
from support import invoices
from support.office import Office
from support.waiting import patience_s, wait_until
from taskguard.errors import LineFullError, StoredCallError
from taskguard.ledger.tables import WORK
from taskguard.model.states import State


def inversions(numbers: list[int]) -> int:
    """Return how often a later message ran before an earlier one.

    Two messages that arrive at one moment may swap places, and a worker that pauses lets several
    pass. With retries every third message may be affected.
    """
    return sum(one > other for one, other in pairwise(numbers))


def numbers_of(shop: Any, name: str) -> list[int]:
    """In which order bodies of a key began."""
    items = [step.item.split() for step in shop.steps("began")]
    return [int(number) for key, number in items if key == name]


def overlaps(shop: Any, name: str) -> int:
    """How many bodies began while another one of the key was at work."""
    moments = [
        (step.at_s, what)
        for what, named in ((1, "began"), (-1, "ended"))
        for step in shop.steps(named)
        if step.item.split()[0] == name
    ]
    inside, found = 0, 0
    for _, what in sorted(moments):
        found += what == 1 and inside > 0
        inside += what
    return found


def waiting(shop: Any) -> list[Any]:
    """Return the records in line, in order."""
    with shop.engine.connect() as db:
        return list(
            db.execute(sa.select(WORK).where(WORK.c.parked.is_not(None)).order_by(WORK.c.parked))
        )


def test_messages_of_two_keys_run_in_order(shop: Any) -> None:
    """Messages of two keys run one at a time for each key, each once, in order, and none is
    left."""
    results = [
        shop.tasks.queue_up.delay(name, number, 0.005) for number in range(25) for name in "ab"
    ]
    # One child each: it parks messages in the order of the queue.
    with shop.worker(concurrency=1), shop.worker(concurrency=1):
        assert [each.get(timeout=patience_s()) for each in results] == [
            n for n in range(25) for _ in "ab"
        ]
        shop.wait_for_quiet()
    assert set(shop.effects().values()) == {1}
    assert len(shop.effects()) == 50
    for name in "ab":
        assert overlaps(shop, name) == 0
        numbers = numbers_of(shop, name)
        assert inversions(numbers) <= 5
    assert waiting(shop) == []


def test_on_a_quorum_queue(quorum_shop: Any) -> None:
    """On a quorum queue, which drops what comes back twice, messages run in order without a relay,
    and none is left."""
    shop = quorum_shop
    results = [shop.tasks.queue_up.delay("a", number, 0.005) for number in range(25)]
    with shop.without_relay(), shop.worker(concurrency=2):
        assert [each.get(timeout=patience_s()) for each in results] == list(range(25))
    assert set(shop.effects().values()) == {1}
    assert overlaps(shop, "a") == 0
    assert inversions(numbers_of(shop, "a")) <= 5
    assert waiting(shop) == []


@pytest.mark.once
def test_by_priority(shop: Any) -> None:
    """With priorities, the message that the broker would deliver first runs first: 0 on Redis.
    Equal ones run in send order.

    Beyond `max_waiting` a message fails with an error that names the key.
    """
    take_turns_by_priority(shop, [2, 4, 8, 6, 7, 3, 1, 5, 9])


def test_by_priority_on_rabbitmq(rabbit_shop: Any) -> None:
    """On RabbitMQ the highest priority runs first."""
    take_turns_by_priority(rabbit_shop, [1, 5, 9, 3, 6, 7, 2, 4, 8])


def take_turns_by_priority(shop: Any, order: list[int]) -> None:
    """Send nine messages of four priorities, and one too many."""
    with shop.worker(concurrency=2):
        first = shop.tasks.by_priority.delay("a", 0, shop.tasks.UNTIL_GO)
        shop.wait_for_steps("began")
        later = [
            shop.tasks.by_priority.apply_async(("a", number), priority=priority)
            for number, priority in enumerate((9, 0, 5, 0, 9, 3, 3, 0, 9), 1)
        ]
        wait_until(lambda: len(waiting(shop)) == 9)
        with pytest.raises(LineFullError, match="queue:a"):
            shop.tasks.by_priority.delay("a", 10).get(timeout=patience_s())
        shop.let_go()
        assert [each.get(timeout=patience_s()) for each in (first, *later)] == list(range(10))
    assert numbers_of(shop, "a") == [0, *order]
    assert overlaps(shop, "a") == 0


def test_a_waiting_message_occupies_no_worker(shop: Any) -> None:
    """Waiting messages are in no queue and in no worker, so that a single child runs other keys."""
    with shop.worker(concurrency=1), shop.worker(concurrency=1):
        first = shop.tasks.queue_up.delay("a", 0, shop.tasks.UNTIL_GO)
        shop.wait_for_steps("began")
        later = [shop.tasks.queue_up.delay("a", number) for number in range(1, 6)]
        wait_until(lambda: len(waiting(shop)) == 5)
        assert {row.state for row in waiting(shop)} == {"NEW"}
        assert [json.loads(row.call)["message"].partition("@")[0] for row in waiting(shop)] == [
            each.id for each in later
        ]
        assert shop.tasks.queue_up.delay("b", 0).get(timeout=patience_s()) == 0
        assert not first.ready()
        shop.let_go()
        assert [each.get(timeout=patience_s()) for each in later] == [1, 2, 3, 4, 5]
        assert first.get(timeout=patience_s()) == 0
    assert numbers_of(shop, "a") == [0, 1, 2, 3, 4, 5]


def test_a_parked_message_is_the_same_message(shop: Any) -> None:
    """A message that waited keeps its id and its chord, whose body gets all results."""
    with shop.worker(concurrency=2):
        members = group(shop.tasks.queue_up.s("a", number, 0.2) for number in range(4))
        total = chord(members)(shop.tasks.add_up.s())
        assert total.get(timeout=patience_s()) == 6
    assert len(shop.effects()) == 4


@pytest.mark.once
def test_one_that_was_called_and_got_lost_is_called_again(shop: Any) -> None:
    """A relay sends a lost promoted message again. Those behind it go on meanwhile."""
    with shop.worker(concurrency=2):
        first = shop.tasks.queue_up.delay("a", 0, shop.tasks.UNTIL_GO)
        shop.wait_for_steps("began")
        later = [shop.tasks.queue_up.delay("a", number) for number in range(1, 4)]
        wait_until(lambda: len(waiting(shop)) == 3)
        # As if it had been promoted, and the broker had lost its message.
        with shop.engine.begin() as db:
            lost = waiting(shop)[0].id
            db.execute(sa.update(WORK).where(WORK.c.id == lost).values(due=1))
            db.execute(sa.text("insert into steps values ('', 'go', 0)"))
        assert [each.get(timeout=patience_s()) for each in [first, *later]] == [0, 1, 2, 3]
    assert set(shop.effects().values()) == {1}
    # The relay is in a process that does not fork: a child would inherit the locks of its thread.
    # It is no process of the pool, which ends them as it shrinks.
    led = [
        line for line in shop.logs().splitlines() if "leader taskguard-relay:celery: this" in line
    ]
    assert led
    assert all("/taskguard-relay" in line for line in led)


def _has_children(worker: Any, number: int) -> bool:
    return len(worker.children()) == number


@pytest.mark.once
def test_the_relay_outlives_the_pools_children_and_itself(shop: Any) -> None:
    """The relay still promotes after the pool shrank to nothing, after its children were replaced,
    and after the relay was killed.

    Each time a message waits behind a key that is released without promoting another.
    """
    runtime = taskguard.connect(
        locks=shop.environment["SHOP_LOCKS"], ledger=shop.environment["SHOP_DATABASE"]
    )
    control = shop.tasks.app.control

    def call_one(number: int) -> None:
        """Park a message behind a plain lock, which knows of no line."""
        with runtime.lock("queue:a", ttl_s=60.0):
            result = shop.tasks.queue_up.delay("a", number)
            wait_until(lambda: waiting(shop), message="it waits")
        control.pool_grow(1)
        assert result.get(timeout=patience_s()) == number

    def shrink(number: int) -> None:
        """End children of the pool one by one; a pool refuses to end a child that is busy."""
        for _ in range(number):
            left = len(worker.children()) - 1
            wait_until(
                lambda: "ok" in str(control.pool_shrink(1, reply=True, limit=1, timeout=30.0)),
                message="a child is idle",
            )
            wait_until(functools.partial(_has_children, worker, left), message="it has ended")

    with contextlib.closing(runtime), shop.worker(concurrency=3) as worker:
        shrink(2)
        call_one(1)
        wait_until(functools.partial(_has_children, worker, 3), message="the pool grew")
        shrink(2)
        wait_until(lambda: len(worker.children()) == 1, message="the relay")
        held = runtime.lock("queue:a", ttl_s=60.0)
        with held:
            control.pool_grow(1)
            result = shop.tasks.queue_up.delay("a", 2)
            wait_until(lambda: waiting(shop), message="it waits")
            shrink(1)
            wait_until(lambda: len(worker.children()) == 1, message="the relay")
        wait_until(lambda: waiting(shop)[0].due is not None, message="it was called")
        control.pool_grow(2)
        assert result.get(timeout=patience_s()) == 2
        relay = int(re.findall(r"of this worker is process (\d+)", worker.text())[-1])
        os.kill(relay, signal.SIGKILL)
        wait_until(lambda: relay not in worker.children(), message="the worker noticed")
        call_one(3)
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
    assert set(shop.effects().values()) == {1}


def test_a_line_of_celery_and_rq(shop: Any, valkey: Any, tmp_path: Path) -> None:
    """Tasks and jobs of one key run in the order in which they were sent, each promoted by its own
    sender."""
    office = Office(
        broker=valkey.url_of(4),
        locks=shop.environment["SHOP_LOCKS"],
        database=shop.environment["SHOP_DATABASE"],
        folder=tmp_path,
        tables=False,
    )
    with contextlib.closing(office), shop.worker(concurrency=2):
        office.worker()
        office.worker()
        first = shop.tasks.queue_up.delay("a", 0, shop.tasks.UNTIL_GO)
        shop.wait_for_steps("began")
        others: list[Any] = []
        for number in (1, 3, 5):
            others.append(office.queue.enqueue(invoices.queue_up, "a", number))
            others.append(shop.tasks.queue_up.delay("a", number + 1))
        wait_until(lambda: len(waiting(shop)) == 6, message="all in line")
        shop.let_go()
        assert first.get(timeout=patience_s()) == 0
        for number, other in enumerate(others, 1):
            if hasattr(other, "return_value"):
                office.wait_for(lambda job=other: job.return_value() is not None, "its end")
                assert other.return_value() == number
            else:
                assert other.get(timeout=patience_s()) == number
    assert numbers_of(shop, "a") == list(range(7))
    # A process that cannot send a message leaves it to a relay, which looks every second, and not
    # to a recall.
    moments = [step.at_s for step in shop.steps("began")]
    assert max(later - one for one, later in pairwise(moments[1:])) < 5


def test_a_revoked_one_does_not_run(shop: Any) -> None:
    """A revoked message leaves the line at its turn, is REVOKED, and those behind it run."""
    with shop.worker(concurrency=2):
        first = shop.tasks.queue_up.delay("a", 0, shop.tasks.UNTIL_GO)
        shop.wait_for_steps("began")
        later = [shop.tasks.queue_up.delay("a", number) for number in range(1, 4)]
        wait_until(lambda: len(waiting(shop)) == 3)
        shop.revoke(later[1])
        shop.let_go()
        assert [each.get(timeout=patience_s()) for each in (first, later[0], later[2])] == [0, 1, 3]
        wait_until(lambda: later[1].state == "REVOKED")
    assert numbers_of(shop, "a") == [0, 1, 3]
    assert State.NEW.value not in {row.state for row in waiting(shop)}


@pytest.mark.once
def test_one_that_was_sent_without_a_claim(shop: Any) -> None:
    """A message that was sent ten times without a claim fails for its caller and its chord."""
    with shop.worker(concurrency=2):
        first = shop.tasks.queue_up.delay("a", 0, shop.tasks.UNTIL_GO)
        shop.wait_for_steps("began")
        member = shop.tasks.queue_up.s("a", 1).set(task_id="in-vain")
        total = chord(group([member, shop.tasks.add.s(1, 2)]))(shop.tasks.add_up.s())
        wait_until(lambda: len(waiting(shop)) == 1)
        # As if it had been called, and sent ten times since.
        with shop.engine.begin() as db:
            [row] = waiting(shop)
            sent = {"line": "resent", "sends": 10, "due": 1}
            db.execute(sa.update(WORK).where(WORK.c.id == row.id).values(**sent))
        failed = shop.tasks.app.AsyncResult("in-vain")
        with pytest.raises(StoredCallError, match="sent 10 times"):
            failed.get(timeout=patience_s())
        with pytest.raises((ChordError, StoredCallError)):
            total.get(timeout=patience_s())
        shop.let_go()
        assert first.get(timeout=patience_s()) == 0
    assert waiting(shop) == []
    assert "is FAILED: its message was sent 10 times" in shop.logs()
