"""Redeliveries by a visibility timeout of 2 s, and the copies that deferring makes of them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any, Self

import pytest
import redis

from support.celery_process import deliver, local_app, next_message
from support.claims import request
from support.waiting import patience_s, wait_until
from taskguard_celery import enqueue, guarded_task
from taskguard_celery.marks import HEADER, Marks


class Census:
    """Counts a Redis broker's messages over and over; `most` is the highest number seen."""

    def __init__(self, shop: Any) -> None:
        self._shop = shop
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._count)
        self.most = 0
        self.counts = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _count(self) -> None:
        with redis.Redis.from_url(self._shop.environment["SHOP_BROKER"]) as broker:
            while not self._over.wait(0.001):
                self.most = max(self.most, self._shop.messages(broker))
                self.counts += 1


@pytest.mark.usefixtures("short_leases")
def test_a_redelivery_during_the_body_does_not_run_twice_nor_get_lost(make_shop: Any) -> None:
    """A redelivery is deferred while the body runs. If the first worker is killed then, the work is
    done once. It is killed while a copy is noted as taken, because kombu loses what a worker takes
    before it notes that."""
    shop = make_shop(SHOP_VISIBILITY_S="2")
    shop.tasks.ship.apply_async([9, 60])
    with shop.worker() as first, shop.broker() as broker:
        shop.wait_for_steps("began")
        with shop.worker():
            wait_until(
                lambda: any(b'"deferrals"' in each for each in broker.hvals("unacked")),
                message="the redelivery is put off, and its copy taken",
            )
            first.kill()
            shop.wait_for_effects(1)
    assert shop.effects() == Counter({"9": 1})


def test_a_task_id_that_is_sent_again_after_its_retries_is_run(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a task id is sent again after all its retries have failed, the numbers of its retries
    begin anew. A late duplicate of the first message does not run."""
    with local_app(sqlite_url, monkeypatch) as app:
        down = True
        done = []

        @app.task(name="charge", shared=False)
        @guarded_task(key="order:<order>")
        def charge(order: int) -> None:
            if down:
                raise OSError("the bank is down")
            done.append(order)

        app.finalize()
        task = app.tasks["charge"]

        def come(published_s: float, retries: int) -> str | None:
            headers = {HEADER: Marks("a", sent_s=published_s).header()}
            info = deliver(task, 1, task_id="a", headers=headers, retries=retries).info
            return None if info is None else str(info.state)

        first_s = time.time()
        assert [come(first_s, retries) for retries in range(3)] == ["FAILURE"] * 3
        down = False
        assert come(first_s, 0) == "IGNORED"
        assert done == []
        assert come(first_s + 1, 0) is None  # Celery's word for a success
        assert done == [1]


def test_a_message_that_is_enqueued_is_one_however_often_it_is_sent(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If enqueued work is sent twice, both copies have one stamp, so that a deferral of one
    supersedes the other."""
    with local_app(sqlite_url, monkeypatch) as app:

        @app.task(name="charge", shared=False)
        @guarded_task(key="order:<order>", recoverable=True)
        def charge(order: int) -> None: ...

        app.finalize()
        sent = enqueue(app.tasks["charge"], (1,))
        sent.send()
        stamps = {next_message(app).headers[HEADER]["sent"] for _ in range(2)}
        assert len(stamps) == 1


@pytest.mark.parametrize("limits", [(None, 1.0), (1.0, None)], ids=["soft", "hard"])
def test_who_waits_for_a_key_is_put_off_before_a_time_limit(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, limits: tuple[float | None, float | None]
) -> None:
    """A delivery that waits for its key is deferred before its time limit."""
    with local_app(sqlite_url, monkeypatch) as app:

        @app.task(name="charge", shared=False)
        @guarded_task(key="order:<order>", busy="wait", wait_s=3600)
        def charge(order: int) -> None: ...

        app.finalize()
        app.conf.taskguard_ledger.claim(request(1, work="refund order:1", ttl_s=7200.0))
        info = deliver(app.tasks["charge"], 1, task_id="a", timelimit=limits).info
        assert info.state == "IGNORED"
        assert next_message(app).headers[HEADER]["deferrals"] == 1


@pytest.mark.once
def test_a_message_never_has_more_than_two_live_copies(
    make_shop: Any, record_property: Any
) -> None:
    """If a body runs for three visibility timeouts under two workers, its message has at most two
    copies."""
    shop = make_shop(SHOP_VISIBILITY_S="2")
    with shop.worker() as first, shop.worker() as second, Census(shop) as census:
        result = shop.tasks.ship.delay(11, shop.tasks.UNTIL_GO)
        (began,) = shop.wait_for_steps("began")
        wait_until(
            lambda: (
                shop.now_s() > began.at_s + 6.0
                and (first.text() + second.text()).count("deferred") >= 2
            ),
            message="put off twice",
        )
        shop.let_go()
        assert result.get(timeout=patience_s()) == {"order": 11}
        shop.wait_for_quiet()
        deferred = (first.text() + second.text()).count("deferred")
        received = (first.text() + second.text()).count(" received")
    record_property("most_live_copies", census.most)
    print(f"at most {census.most} copies in {census.counts} counts; {received} deliveries")
    assert deferred >= 2
    assert 1 <= census.most <= 2
    assert shop.effects() == Counter({"11": 1})
    assert len(shop.steps("began")) == 1
