"""Celery's events that Flower and other monitors get, and `celery inspect taskguard`.

docs/how-to/monitors.md has the states that these tests show.
"""

from __future__ import annotations

import time
from collections import Counter
from datetime import datetime
from typing import Any

import celery.events.state
import pytest

import taskguard
from support.ear import Ear
from support.waiting import patience_s, wait_until

EVENTS = '{"worker_send_task_events": true}'


def monitored_state() -> Any:
    """Return the state that Flower keeps, or Celery's if Flower is not installed."""
    try:
        from flower.events import EventsState
    except ImportError:
        return celery.events.state.State()
    return EventsState()


def shown(ear: Ear, task_id: str) -> str:
    """Return the state that a monitor shows for a task."""
    state = monitored_state()
    for event in list(ear.heard):
        state.event(dict(event))
    task = state.tasks.get(task_id)
    return "" if task is None else str(task.state)


def why(ear: Ear, task_id: str) -> str:
    """Return the text that a monitor shows with the last retry of a task."""
    retries = [each for each in ear.heard if each["type"] == "task-retried"]
    return str([each["exception"] for each in retries if each["uuid"] == task_id][-1])


def test_a_deferral_is_a_retry_of_the_same_task(make_shop: Any) -> None:
    """Monitors see each deferral as a retry, and in the end one success."""
    shop = make_shop(SHOP_SETTINGS=EVENTS)
    locks, ledger = shop.environment["SHOP_LOCKS"], shop.environment["SHOP_DATABASE"]
    other = taskguard.connect(locks=locks, ledger=ledger)
    with shop.worker() as worker, Ear(shop.tasks.app) as ear:
        with other.lock("order:7"):
            message = shop.tasks.ship.apply_async([7])
            wait_until(lambda: worker.text().count("deferred") >= 2, message="put off twice")
        shop.wait_for_effects(1)
        wait_until(lambda: "task-succeeded" in ear.of(message.id), message="succeeded")
        assert shown(ear, message.id) == "SUCCESS"
    other.close()
    assert why(ear, message.id).startswith("deferred by ")
    kinds = Counter(ear.of(message.id))
    deferrals = worker.text().count("deferred")
    assert deferrals >= 2
    assert kinds == {
        "task-received": deferrals + 1,
        "task-started": deferrals + 1,
        "task-retried": deferrals,
        "task-succeeded": 1,
    }
    assert {event["uuid"] for event in ear.heard if "uuid" in event} == {message.id}


def test_a_parked_message_is_shown_as_a_retry_until_it_runs(make_shop: Any) -> None:
    """A message that waits in the ledger is in the state RETRY. Afterwards it is SUCCESS."""
    shop = make_shop(SHOP_SETTINGS=EVENTS)
    task = shop.tasks.queue_up
    with shop.worker(), Ear(shop.tasks.app) as ear:
        first = task.delay("a", 0, shop.tasks.UNTIL_GO)
        shop.wait_for_steps("began")
        parked = task.delay("a", 1)
        wait_until(lambda: len(shop.ledger.waiting()) == 1, message="it waits")
        wait_until(lambda: "task-retried" in ear.of(parked.id), message="its event")
        assert ear.of(parked.id) == ["task-received", "task-started", "task-retried"]
        assert why(ear, parked.id) == "parked"
        assert shown(ear, parked.id) == "RETRY"
        shop.let_go()
        assert [each.get(timeout=patience_s()) for each in (first, parked)] == [0, 1]
        wait_until(lambda: "task-succeeded" in ear.of(parked.id), message="succeeded")
        assert shown(ear, parked.id) == "SUCCESS"
    kinds = Counter(ear.of(parked.id))
    assert kinds == {
        "task-received": 2,
        "task-started": 2,
        "task-retried": 1,
        "task-succeeded": 1,
    }


def test_what_never_runs_is_shown_as_revoked(make_shop: Any) -> None:
    """A message that a newer one superseded is REVOKED. A duplicate of done work is SUCCESS."""
    shop = make_shop(SHOP_SETTINGS=EVENTS)
    tasks = shop.tasks
    with shop.worker(), Ear(tasks.app) as ear:
        first = tasks.latest.delay("a", 0, 600)
        shop.wait_for_steps("began")
        ends = [tasks.latest.delay("a", number) for number in (1, 2)]
        wait_until(lambda: shown(ear, ends[0].id) == "REVOKED", message="superseded")
        wait_until(lambda: shown(ear, ends[1].id) == "RETRY", message="parked")
        shop.let_go()
        assert first.get(timeout=patience_s()) == 0
        assert ends[1].get(timeout=patience_s()) == 2
        done = tasks.ship.delay(9)
        assert done.get(timeout=patience_s()) == {"order": 9}
        duplicate = tasks.ship.delay(9)
        assert duplicate.get(timeout=patience_s()) == {"order": 9}
        wait_until(lambda: shown(ear, duplicate.id) == "SUCCESS", message="answered")


def test_a_skipped_message_is_shown_as_revoked(make_shop: Any) -> None:
    """A message of a task with `busy="skip"` whose key is taken is REVOKED."""
    shop = make_shop(SHOP_SETTINGS=EVENTS)
    locks, ledger = shop.environment["SHOP_LOCKS"], shop.environment["SHOP_DATABASE"]
    other = taskguard.connect(locks=locks, ledger=ledger)
    with shop.worker(), Ear(shop.tasks.app) as ear:
        with other.lock("order:7"):
            skipped = shop.tasks.unless_busy.delay(7)
            wait_until(lambda: shown(ear, skipped.id) == "REVOKED", message="skipped")
    other.close()


def test_no_event_is_sent_if_the_worker_sends_none(shop: Any) -> None:
    """With events off, a deferral sends nothing either."""
    locks, ledger = shop.environment["SHOP_LOCKS"], shop.environment["SHOP_DATABASE"]
    other = taskguard.connect(locks=locks, ledger=ledger)
    with shop.worker() as worker, Ear(shop.tasks.app) as ear:
        with other.lock("order:7"):
            message = shop.tasks.ship.apply_async([7])
            wait_until(lambda: "deferred" in worker.text(), message="put off")
        shop.wait_for_effects(1)
        assert message.get(timeout=patience_s()) == {"order": 7}
    other.close()
    assert not ear.of(message.id)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_inspect_lists_the_leases_of_a_worker(shop: Any, pool: str) -> None:
    """`celery inspect taskguard` answers with key, fencing token, and since when it is held."""
    tasks = shop.tasks
    inspect = tasks.app.control.inspect(limit=1, timeout=10)
    with shop.worker(pool=pool) as worker:
        held = tasks.nap.delay(7, 60)
        [step] = shop.wait_for_steps("began")
        [answer] = inspect._request("taskguard").values()
        [lease] = answer["leases"]
        work = shop.work(tasks.nap.name, 7)
        assert work.owner.startswith(answer["worker"])
        assert (lease["key"], lease["fence"]) == ("order:7", work.fence)
        assert (lease["task"], lease["id"]) == (tasks.nap.name, held.id)
        assert lease["pid"] == step.pid
        assert (step.pid == worker.pid) == (pool == "threads")
        assert datetime.fromisoformat(lease["since"]).timestamp() <= time.time() + 60
        assert lease["lease_left_s"] <= 10
