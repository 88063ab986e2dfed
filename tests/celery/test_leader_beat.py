"""Several beats with `taskguard_celery.LeaderScheduler`: one sends, another goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import redis

from support.celery_beat import HERE, CeleryBeat
from support.waiting import patience_s, wait_until
from taskguard_celery.beat import LeaderScheduler

EVERY_S = 0.5
TTL_S = 4.0  # longer than a short pause of the machine, which must not elect another leader
SCHEDULER = "taskguard_celery.LeaderScheduler"
ENTRIES = {"entry": {"task": "shop.each", "schedule": EVERY_S, "args": ["entry"]}}


class Beats:
    """Two beats of a shop, without workers: what they send stays in the broker."""

    def __init__(self, shop: Any, stack: ExitStack) -> None:
        self.shop = shop
        self._stack = stack
        self._number = 0

    def start(
        self, entries: dict[str, Any] = ENTRIES, *, app: str = "support.shop", **settings: Any
    ) -> CeleryBeat:
        self._number += 1
        settings = {
            "beat_schedule": entries,
            "result_expires": None,
            "taskguard_beat_ttl_s": TTL_S,
            **settings,
        }
        beat = CeleryBeat(
            {**self.shop.environment, "SHOP_SETTINGS": json.dumps(settings)},
            log=self.shop.folder / f"worker-beat-{self._number}.log",
            scheduler=SCHEDULER,
            app=app,
        )
        return self._stack.enter_context(beat)

    def wait_for_a_record(self) -> None:
        """Wait until a message was sent and recorded. The next one is not due yet."""

        def record() -> Any:
            view = self.shop.ledger.view("leader leader:beat")
            return view and view.progress_json

        before = record()
        wait_until(lambda: record() != before, message="a record")

    def pair(self, **settings: Any) -> tuple[CeleryBeat, CeleryBeat]:
        """Return the leader and the other beat."""
        beats = [self.start(**settings) for _ in range(2)]
        leader = wait_until(
            lambda: next((each for each in beats if each.sent()), None), message="one sends"
        )
        return leader, next(each for each in beats if each is not leader)


@pytest.fixture
def beats(make_shop: Callable[..., Any]) -> Any:
    with ExitStack() as stack:
        yield Beats(make_shop(), stack)


def goes_on(beat: CeleryBeat) -> None:
    """Wait until the beat sends again."""
    before = beat.sent()
    wait_until(lambda: beat.sent() > before + 1, message=lambda: beat.text()[-3000:])


def follows_s(beat: CeleryBeat, since_s: float) -> float:
    """After what time it sent for the first time."""
    wait_until(beat.sent, interval_s=0.005, message=lambda: beat.text()[-3000:])
    return time.monotonic() - since_s


def soonest(follow_s: Callable[[], float], bound_s: float) -> None:
    """The bound is kept in one of three tries: a busy machine may be late."""
    tries_s: list[float] = []
    while not tries_s or tries_s[-1] >= bound_s:
        assert len(tries_s) < 3, tries_s
        tries_s.append(follow_s())


def test_a_beat_that_is_killed_is_followed_within_its_lease_and_a_second(beats: Beats) -> None:
    """The other beat sends within the killed one's lease and a second. Until then only one
    sends."""

    def follow_s() -> float:
        leader, other = beats.pair()
        goes_on(leader)
        assert not other.sent()
        leader.kill()
        took_s = follows_s(other, time.monotonic())
        other.kill()
        return took_s

    # It sends at once what was due meanwhile.
    soonest(follow_s, TTL_S + 1.0)


@pytest.mark.once
def test_a_beat_that_is_frozen_neither_dies_nor_sends_once_it_wakes(beats: Beats) -> None:
    """A frozen leader that wakes sends at most one more message, and is a candidate again."""
    leader, other = beats.pair()
    leader.pause()
    follows_s(other, time.monotonic())
    sent = leader.sent()
    leader.resume()
    wait_until(lambda: "leads no more" in leader.text(), message="it has noticed")
    goes_on(other)
    # At most the message that it was about to send when it was frozen.
    assert leader.sent() - sent <= 1
    assert other.terminate() == 0
    goes_on(leader)
    assert leader.terminate() == 0


def test_a_beat_that_is_stopped_is_followed_at_once(beats: Beats) -> None:
    """After SIGTERM the other beat sends at once, and not after the lease. No tick is sent twice or
    left out."""
    entries = {"entry": {"task": "shop.tick", "schedule": EVERY_S, "args": ["entry"]}}
    leader, other = beats.pair(entries=entries, taskguard_beat_ttl_s=600.0)
    goes_on(leader)
    beats.wait_for_a_record()
    assert leader.terminate() == 0
    follows_s(other, time.monotonic())
    goes_on(other)
    beats.wait_for_a_record()
    assert other.terminate() == 0
    with beats.shop.broker() as broker:
        sent = beats.shop.messages(broker)
    with beats.shop.worker():
        beats.shop.wait_for_quiet()
    # No two of one tick: the second leader knew when the first one sent.
    assert sum(beats.shop.effects().values()) == sent >= 6


@pytest.mark.once
def test_servers_that_are_away_end_no_beat(
    make_shop: Callable[..., Any], spare_valkey: Any, database_server: Any
) -> None:
    """If the lock server is emptied, frozen or down, the leader goes on. If the database is down,
    it waits for it."""
    shop = make_shop(
        SHOP_LOCKS=spare_valkey.url, SHOP_DATABASE=database_server.create_database("shop")
    )
    with ExitStack() as stack:
        beats = Beats(shop, stack)
        beat = beats.start()
        goes_on(beat)
        with redis.Redis.from_url(spare_valkey.url) as client:
            client.flushall()
        goes_on(beat)
        spare_valkey.pause()
        goes_on(beat)
        spare_valkey.kill()
        goes_on(beat)
        assert "leads no more" not in beat.text()
        shop.engine.dispose()
        database_server.halt()
        wait_until(lambda: "leads no more" in beat.text(), message="leads no more")
        wait_until(
            lambda: "no server answers which process leads" in beat.text(), message="campaigns"
        )
        database_server.start()
        goes_on(beat)
        assert beat.terminate() == 0


def test_a_beat_that_the_broker_does_not_answer_lets_another_lead(
    make_shop: Callable[..., Any], spare_valkey: Any
) -> None:
    """The other beat sends what this one could not send. This one is a candidate again when the
    broker is up."""
    with ExitStack() as stack:
        beats = Beats(make_shop(), stack)
        first = beats.start(broker_url=spare_valkey.url)
        goes_on(first)
        other = beats.start()
        spare_valkey.halt()
        follows_s(other, time.monotonic())
        goes_on(other)
        assert first.process.poll() is None
        assert other.terminate() == 0
        spare_valkey.start()
        goes_on(first)
        assert first.terminate() == 0


@pytest.mark.parametrize("state", ["starting", "campaigning", "leading"])
def test_sigterm_ends_a_beat_whatever_it_is_doing(
    make_shop: Callable[..., Any], spare_valkey: Any, state: str
) -> None:
    """SIGTERM ends a beat even while the lock server gives no answer."""
    shop = make_shop(SHOP_LOCKS=spare_valkey.url)
    with ExitStack() as stack:
        beats = Beats(shop, stack)
        if state == "starting":
            stopped = beats.start()
        else:
            leader, other = beats.pair()
            stopped = leader if state == "leading" else other
        spare_valkey.pause()
        assert stopped.terminate() == 0
        spare_valkey.resume()


def test_stopped_before_its_thread_is_started(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal just before its thread starts ends the beat without an error."""

    def interrupted(_: threading.Thread) -> None:
        raise SystemExit(0)

    scheduler = LeaderScheduler(app=shop.tasks.app, lazy=True)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(SystemExit):
            scheduler.tick()
    scheduler.close()


def test_a_scheduler_inside_of_itself_is_refused(beats: Beats) -> None:
    """A LeaderScheduler that is to wrap itself raises, with the setting to use."""
    with pytest.raises(AssertionError, match="taskguard_beat_scheduler names the scheduler"):
        beats.start(taskguard_beat_scheduler=SCHEDULER)


@pytest.fixture
def django_beats(beats: Beats) -> Beats:
    """Their schedule is in the database."""
    pytest.importorskip("django_celery_beat")
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **beats.shop.environment, "PYTHONPATH": path}
    made = subprocess.run(
        [sys.executable, "-m", "support.django_beat"],
        env=environment,
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        timeout=patience_s(),
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return beats


def test_around_django_celery_beat_one_sends(django_beats: Beats) -> None:
    """Around django-celery-beat one beat sends, also if it was frozen. SIGTERM ends each of
    them."""
    entries = {"entry": {"task": "shop.each", "schedule": 1.0, "args": ["entry"]}}
    settings = {"entries": entries, "app": "support.django_beat"}
    leader, other = django_beats.pair(**settings, taskguard_beat_scheduler="django")
    goes_on(leader)
    assert not other.sent()
    leader.pause()
    follows_s(other, time.monotonic())
    leader.resume()
    wait_until(lambda: "leads no more" in leader.text(), message="it has noticed")
    sent = leader.sent()
    goes_on(other)
    assert leader.sent() == sent
    assert other.terminate() == 0
    goes_on(leader)
    third = django_beats.start(**settings, taskguard_beat_scheduler="django")
    assert third.terminate() == 0
    assert leader.terminate() == 0
    assert "Traceback" not in leader.text() + other.text() + third.text()
