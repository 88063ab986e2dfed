"""`busy="latest"` and `"supersede"` with real workers: the newest message of a key wins."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from celery import chain, chord, group
from celery.exceptions import ChordError, TaskRevokedError

from support.waiting import patience_s, wait_until
from taskguard.ledger.tables import WORK
from taskguard.model.states import OUTDATED
from taskguard_celery.marks import HEADER, Marks

HOLDS_S = 600.0  # or until `shop.go()`, or it is told


def states_of(shop: Any) -> dict[str, tuple[str, bool]]:
    """The state of each work, by its message's id, and whether it was superseded."""
    with shop.engine.connect() as db:
        return {
            row.message.partition("@")[0]: (row.state, (row.error or "").startswith(OUTDATED))
            for row in db.execute(sa.select(WORK))
        }


def superseded(shop: Any, result: Any) -> bool:
    """Whether the caller is told so, and the record says it."""
    with pytest.raises(TaskRevokedError):
        result.get(timeout=patience_s())
    return states_of(shop)[result.id] == ("FAILED", True)


def began(shop: Any, number: int) -> None:
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
        """The first and the last of three messages run. The middle one is told that it
        never does."""
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
        """After the newer one has run, and from a producer whose message says when it was sent."""
        sent_s = time.time()
        with shop.worker(concurrency=1):
            assert shop.tasks.latest.delay("a", 2).get(timeout=patience_s()) == 2
            older = shop.tasks.latest.apply_async(("a", 1), **sent_at(sent_s))
            assert superseded(shop, older)
            expect(shop, 2)

    @pytest.mark.once
    def test_a_flood(self, shop: Any) -> None:
        """Some run, the last of them, none twice; every caller hears how it ended."""
        with shop.worker(concurrency=2), shop.worker(concurrency=2):
            results = [shop.tasks.latest.delay("a", number, 0.05) for number in range(40)]
            for each in results:
                with suppress(TaskRevokedError):
                    each.get(timeout=patience_s())
            shop.wait_for_quiet()
        ran = [number for number, each in enumerate(results) if each.state == "SUCCESS"]
        assert ran[-1] == 39
        assert dict(shop.effects()) == {f"a {number}": 1 for number in ran}
        assert {each.state for each in results} <= {"SUCCESS", "REVOKED"}
        left = {number: states_of(shop)[each.id] for number, each in enumerate(results)}
        assert {number for number, (state, _) in left.items() if state == "DONE"} == set(ran), left
        assert {state for state, _ in left.values()} == {"DONE", "FAILED"}, left

    def test_canvas(self, shop: Any) -> None:
        """A chord whose member is superseded fails, and does not wait for ever; so does a chain."""
        latest, add_up = shop.tasks.latest, shop.tasks.add_up
        with shop.worker(concurrency=2):
            latest.delay("a", 1, HOLDS_S)
            began(shop, 1)
            chained = chain(latest.s("a", 2), add_up.s()).delay()
            wait_until(lambda: chained.parent.id in states_of(shop))
            told = chord(group([latest.s("a", 3), shop.tasks.add.s(1, 2)]))(add_up.s())
            with pytest.raises(TaskRevokedError):
                chained.get(timeout=patience_s())
            last = latest.delay("a", 4)
            wait_until(lambda: last.id in states_of(shop))
            shop.go()
            assert last.get(timeout=patience_s()) == 4
            with pytest.raises((ChordError, TaskRevokedError)):
                told.get(timeout=patience_s())

    @pytest.mark.once
    def test_whoever_waits_is_told_though_its_caller_died(self, shop: Any) -> None:
        """If a superseded message's notification is lost, a relay sends another one."""
        with shop.worker(concurrency=2):
            shop.tasks.latest.delay("a", 1, HOLDS_S)
            began(shop, 1)
            second = shop.tasks.latest.delay("a", 2)
            wait_until(lambda: second.id in states_of(shop))
            # As if a worker had replaced it, and died before it could send it.
            with shop.engine.begin() as db:
                row = db.execute(sa.select(WORK).where(WORK.c.message.startswith(second.id))).one()
                ended = {"state": "FAILED", "final": 1, "error": f"{OUTDATED}: x", "due": 1}
                ended["line"] = "superseded"
                db.execute(sa.update(WORK).where(WORK.c.id == row.id).values(**ended))
            assert superseded(shop, second)
            shop.go()
            expect(shop, 1)

            def is_noted() -> bool:
                with shop.engine.connect() as db:
                    due = sa.select(WORK.c.due).where(WORK.c.id == row.id)
                    return db.execute(due).scalar() is None

            wait_until(is_noted, message="that it has been told")


class TestSupersede:
    def test_a_living_holder(self, shop: Any) -> None:
        """Its commit is refused, its body is told, its caller hears of it; the newest commits."""
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
            assert {step.item for step in shop.steps("told")} == {"a 1", "a 2"}
            expect(shop, 3)
        assert len(shop.steps("began")) == 3

    def test_interrupted(self, shop: Any) -> None:
        """With on_lost="interrupt" the body of the older one ends within a renewal."""
        with shop.worker(concurrency=2):
            first = shop.tasks.supersede_at_once.delay("a", 1, HOLDS_S)
            began(shop, 1)
            assert shop.tasks.supersede_at_once.delay("a", 2).get(timeout=patience_s()) == 2
            assert superseded(shop, first)
            expect(shop, 2)

    @pytest.mark.once
    @pytest.mark.parametrize("how", ["killed", "frozen"])
    def test_a_holder_that_does_not_hear(self, make_shop: Any, how: str) -> None:
        """A frozen holder blocks no message. Its redelivery is answered, and its late commit
        refused."""
        shop = make_shop(SHOP_VISIBILITY_S="10")
        task = shop.tasks.supersede
        with shop.worker(concurrency=1) as one, shop.worker(concurrency=1) as other:
            first = task.delay("a", 1, HOLDS_S)
            began(shop, 1)
            [step] = shop.steps("began")
            if how == "killed":
                (one if step.pid in one.children() else other).kill()
            else:
                os.kill(step.pid, signal.SIGSTOP)
            assert task.delay("a", 2).get(timeout=patience_s()) == 2
            assert superseded(shop, first)  # by its redelivery
            if how == "frozen":
                os.kill(step.pid, signal.SIGCONT)
                wait_until(lambda: "stale commit refused" in shop.logs())
            expect(shop, 2)
        assert len(shop.steps("began")) == 2

    @pytest.mark.once
    @pytest.mark.parametrize("locks", ["emptied", "away"])
    def test_without_the_lock_servers_word(
        self, make_shop: Any, spare_valkey: Any, locks: str
    ) -> None:
        """The ledger decides alone: the newest commits, the older one never does."""
        shop = make_shop(SHOP_LOCKS=spare_valkey.url_of(1))
        task = shop.tasks.supersede
        with shop.worker(concurrency=2):
            first = task.delay("a", 1, HOLDS_S)
            began(shop, 1)
            if locks == "emptied":
                with redis.Redis.from_url(shop.environment["SHOP_LOCKS"]) as client:
                    client.flushall()
            else:
                spare_valkey.stop()
            second = task.delay("a", 2)
            assert second.get(timeout=patience_s()) == 2
            assert superseded(shop, first)
            expect(shop, 2)

    def test_an_older_one_that_comes_late(self, shop: Any) -> None:
        """While the newer one is at work: that is left alone."""
        sent_s = time.time()
        with shop.worker(concurrency=2):
            newer = shop.tasks.supersede.delay("a", 2, HOLDS_S)
            began(shop, 2)
            older = shop.tasks.supersede.apply_async(("a", 1), **sent_at(sent_s))
            assert superseded(shop, older)
            assert not newer.ready()
            shop.go()
            assert newer.get(timeout=patience_s()) == 2
            expect(shop, 2)
