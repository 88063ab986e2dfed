"""`busy="latest"` and `"supersede"` with real workers: the newest message of a key wins."""

from __future__ import annotations

import time
from typing import Any

import pytest
import sqlalchemy as sa
from celery import chain, chord, group
from celery.exceptions import ChordError, TaskRevokedError

from support.waiting import patience_s, wait_until
from taskguard.ledger.tables import WORK
from taskguard.model.states import OUTDATED
from taskguard_celery.marks import HEADER, Marks

HOLDS_S = 600.0  # or until `shop.go()`, or until the lease is lost


def states_of(shop: Any) -> dict[str, tuple[str, bool]]:
    """The state of each work, by its message's id, and whether it was superseded."""
    with shop.engine.connect() as db:
        return {
            row.message.partition("@")[0]: (row.state, (row.error or "").startswith(OUTDATED))
            for row in db.execute(sa.select(WORK))
        }


def superseded(shop: Any, result: Any) -> bool:
    """Return True if the caller reads that the message is superseded, and the record says so."""
    with pytest.raises(TaskRevokedError):
        result.get(timeout=patience_s())
    return states_of(shop)[result.id] == ("FAILED", True)


def began(shop: Any, number: int) -> None:
    """Wait until the body of this number has begun."""
    wait_until(lambda: f"a {number}" in [step.item for step in shop.steps("began")])


def expect(shop: Any, *numbers: int) -> None:
    """Each of these has its effect once, and no others have any."""
    wait_until(lambda: set(shop.effects()) >= {f"a {number}" for number in numbers})
    shop.wait_for_quiet()
    assert dict(shop.effects()) == {f"a {number}": 1 for number in numbers}


def sent_at(sent_s: float) -> dict[str, Any]:
    """Options of a message that says when it was first published."""
    message = f"sent-at-{sent_s}"
    return {"task_id": message, "headers": {HEADER: Marks(message, sent_s=sent_s).header()}}


class TestLatest:
    def test_the_newest_waits(self, shop: Any) -> None:
        """The first and the last of three messages run. The caller of the middle one reads that it
        never runs."""
        task = shop.tasks.latest
        with shop.worker(concurrency=2):
            first = task.delay("a", 1, HOLDS_S)
            began(shop, 1)
            second = task.delay("a", 2)
            wait_until(lambda: second.id in states_of(shop))
            third = task.delay("a", 3)
            assert superseded(shop, second)
            assert not first.ready()
            shop.go()
            assert [first.get(timeout=patience_s()), third.get(timeout=patience_s())] == [1, 3]
            expect(shop, 1, 3)

    def test_an_older_one_that_comes_late(self, shop: Any) -> None:
        """An older message that arrives after the newer one has run is superseded."""
        sent_s = time.time()
        with shop.worker(concurrency=1):
            assert shop.tasks.latest.delay("a", 2).get(timeout=patience_s()) == 2
            older = shop.tasks.latest.apply_async(("a", 1), **sent_at(sent_s))
            assert superseded(shop, older)
            expect(shop, 2)

    def test_canvas(self, shop: Any) -> None:
        """A chord or a chain with a superseded member fails, and does not wait for ever."""
        latest, add_up = shop.tasks.latest, shop.tasks.add_up
        with shop.worker(concurrency=2):
            latest.delay("a", 1, HOLDS_S)
            began(shop, 1)
            chained = chain(latest.s("a", 2), add_up.s()).delay()
            wait_until(lambda: chained.parent.id in states_of(shop))
            total = chord(group([latest.s("a", 3), shop.tasks.add.s(1, 2)]))(add_up.s())
            with pytest.raises(TaskRevokedError):
                chained.get(timeout=patience_s())
            last = latest.delay("a", 4)
            wait_until(lambda: last.id in states_of(shop))
            shop.go()
            assert last.get(timeout=patience_s()) == 4
            with pytest.raises((ChordError, TaskRevokedError)):
                total.get(timeout=patience_s())


class TestSupersede:
    def test_a_living_holder(self, shop: Any) -> None:
        """The holder's commit is refused, its body and its caller learn of it, and the newest
        message commits."""
        task = shop.tasks.supersede
        with shop.worker(concurrency=3):
            first = task.delay("a", 1, HOLDS_S)
            began(shop, 1)
            second = task.delay("a", 2, HOLDS_S)
            began(shop, 2)
            third = task.delay("a", 3)
            assert third.get(timeout=patience_s()) == 3
            assert superseded(shop, first)
            assert superseded(shop, second)
            assert {step.item for step in shop.steps("lost")} == {"a 1", "a 2"}
            expect(shop, 3)
        assert len(shop.steps("began")) == 3

    def test_interrupted(self, shop: Any) -> None:
        """With `on_lost="interrupt"`, the older body ends at its next renewal."""
        with shop.worker(concurrency=2):
            first = shop.tasks.supersede_at_once.delay("a", 1, HOLDS_S)
            began(shop, 1)
            assert shop.tasks.supersede_at_once.delay("a", 2).get(timeout=patience_s()) == 2
            assert superseded(shop, first)
            expect(shop, 2)
