"""A tick that several beats sent runs once, with Celery's own beats as they are."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from typing import Any

import pytest

from support import clock_shim
from support.celery_beat import CeleryBeat
from support.waiting import patience_s, wait_until

EVERY_S = 0.5
ENTRIES = {
    name: {"task": task, "schedule": EVERY_S, "args": [name]}
    for name, task in (("guarded entry", "shop.tick"), ("other", "shop.each"))
}
SETTINGS = json.dumps({"beat_schedule": ENTRIES, "result_expires": None})


def beat(shop: Any, name: str, **environment: str) -> CeleryBeat:
    """Return a beat that sends both entries."""
    return CeleryBeat(
        {**shop.environment, "SHOP_SETTINGS": SETTINGS, **environment},
        log=shop.folder / f"worker-beat-{name}.log",
    )


def messages(shop: Any) -> Counter[str]:
    """How many messages came of each tick of the entry that nothing guards."""
    return Counter(step.item for step in shop.steps("came"))


def test_a_tick_that_two_beats_sent_runs_once(shop: Any) -> None:
    """A tick that two beats sent runs once with a guard, and twice without one. The beats' clocks
    differ."""
    missing = clock_shim.unavailable()
    if missing:
        pytest.skip(missing)
    with clock_shim.server_clock() as clock, shop.worker():
        clock.jump(-3 * EVERY_S)
        with beat(shop, "one"), beat(shop, "other", **clock.environment):
            wait_until(
                lambda: list(messages(shop).values()).count(2) >= 6,
                message=lambda: f"ticks of both beats: {messages(shop)}",
            )
        shop.wait_for_quiet()
    assert max(messages(shop).values()) == 2
    effects = shop.effects()
    assert len(effects) >= 6
    assert set(effects.values()) == {1}
    assert all(item.startswith("guarded%20entry@") for item in effects)


def test_a_beat_alone_loses_no_tick(shop: Any) -> None:
    """Each message of a single beat is a tick of its own, also after a restart of the beat."""
    sent = 0
    with shop.worker():
        for number in range(2):
            with CeleryBeat(
                {**shop.environment, "SHOP_SETTINGS": SETTINGS},
                log=shop.folder / f"worker-beat-{number}.log",
                folder=shop.folder,
            ) as alone:
                wait_until(lambda: alone.sent() >= 10, message="10 messages")
                alone.pause_between_ticks()
                sent += alone.sent()
                os.kill(alone.process.pid, signal.SIGTERM)
                alone.resume()
                assert alone.process.wait(patience_s()) == 0
                assert "beat raised exception" not in alone.text()
        wait_until(
            lambda: sum(messages(shop).values()) + len(shop.effects()) == sent,
            message=lambda: f"{sent} runs: {messages(shop)} {shop.effects()}",
        )
    assert {*messages(shop).values(), *shop.effects().values()} == {1}


def test_a_call_by_hand_is_no_tick(shop: Any) -> None:
    """With `once_per="tick"`, a call by hand is work of its own."""
    with shop.worker():
        for _ in range(2):
            shop.tasks.tick.delay("by hand")
        shop.publish_raw(shop.tasks.tick, ["doubled"], times=2, task_id="the same")
        wait_until(lambda: sum(shop.effects().values()) >= 3, message="three")
        shop.wait_for_quiet()
    assert shop.effects() == Counter({"by hand": 2, "doubled": 1})
