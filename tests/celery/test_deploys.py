"""A deploy changes a guard: workers before it and after it, killed and side by side."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from typing import Any

import pytest
import sqlalchemy as sa

import taskguard
from support.waiting import patience_s, wait_until
from taskguard.ledger.tables import WORK

pytestmark = pytest.mark.once

LEASES = {"SHOP_TTL_S": "1", "SHOP_VISIBILITY_S": "3"}
DONE_ELSEWHERE = "has done shop.deployed order:1 before, and now does shop.deployed shop:order:1"


def redeliver(make_shop: Any, *, before: str, after: str) -> tuple[Any, Any, str]:
    """Send a message, and kill its worker after DONE, before it can acknowledge it.

    Return the shop, its caller's result and the log of the next deploy's worker.
    """
    shop = make_shop(SHOP_VISIBILITY_S="2")
    result = shop.tasks.deployed.delay(1, lingers=before)
    # Its visibility timeout is longer, so that no other worker answers the message.
    with shop.worker({"SHOP_GUARD": before, "SHOP_VISIBILITY_S": "600"}) as worker:
        shop.wait_for_steps("done")
        worker.kill()
    with shop.worker({"SHOP_GUARD": after}) as worker:
        value = result.get(timeout=patience_s())
        shop.wait_for_quiet()
        return shop, value, worker.text()


def test_a_redelivery_after_a_deploy_is_answered(make_shop: Any) -> None:
    """The work has one effect, and its caller gets the first result."""
    shop, value, said = redeliver(make_shop, before="former", after="new")
    assert shop.effects() == Counter({"1": 1})
    assert len(shop.steps("began")) == 1
    assert value == "former"
    assert "has done" not in said


def test_a_redelivery_after_a_deploy_without_formerly_is_logged(make_shop: Any) -> None:
    """Without `formerly=` the effect happens twice. The log names both ids of the work, and the
    option."""
    shop, value, said = redeliver(make_shop, before="former", after="forgotten")
    assert shop.effects() == Counter({"1": 2})
    assert value == "forgotten"
    assert DONE_ELSEWHERE in said
    assert "formerly=" in said


def test_a_line_goes_on_over_a_deploy(make_shop: Any) -> None:
    """Messages run in the order in which they were sent, whichever worker parked them.

    The former worker holds the key when it is killed.
    """
    shop = make_shop(**LEASES)
    task = shop.tasks.deployed_in_line
    with shop.worker({"SHOP_GUARD": "former"}, concurrency=2) as former:
        results = [task.delay("a", 0)]
        shop.wait_for_steps("began")
        results += [task.delay("a", number) for number in (1, 2, 3)]
        wait_until(lambda: len(shop.ledger.waiting("queue:a")) == 3, message="three wait")
        former.kill()
        with shop.worker({"SHOP_GUARD": "new"}, concurrency=2):
            results += [task.delay("a", number) for number in (4, 5, 6)]
            wait_until(lambda: len(shop.ledger.waiting()) >= 6, message="six wait")
            shop.let_go()
            assert [each.get(timeout=patience_s()) for each in results] == list(range(7))
            shop.wait_for_quiet()
    assert shop.effects() == Counter(f"a {number}" for number in range(7))
    began = list(dict.fromkeys(int(step.item.split()[1]) for step in shop.steps("began")))
    assert began == list(range(7))
    with shop.engine.connect() as db:
        assert db.execute(sa.select(WORK.c.id).where(WORK.c.parked.is_not(None))).all() == []


PARK = {"busy": "park"}
DEPLOYS = {
    "rate and strict": ({**PARK, "order": "strict", "rate": "1/h"}, {"busy": "retry"}),
    "a higher rate": ({**PARK, "rate": "1/h"}, {**PARK, "rate": "5/s"}),
    "latest": ({"busy": "latest"}, {"busy": "retry"}),
}


def deploy(declared: dict[str, Any], **settings: Any) -> dict[str, str]:
    """The environment of workers of a deploy."""
    return {
        "SHOP_APP": "support.lone_shop",
        "SHOP_DECLARED": json.dumps(declared),
        "SHOP_SETTINGS": json.dumps(settings),
    }


def leave_in_line(
    shop: Any, declared: dict[str, Any], count: int, *, queue: str = "shop", **settings: Any
) -> list[Any]:
    """Return results of messages that a worker has parked behind a plain lock, before it was
    killed."""
    runtime = taskguard.connect(
        locks=shop.environment["SHOP_LOCKS"],
        ledger=shop.environment["SHOP_DATABASE"],
        namespace=settings.get("taskguard_namespace", ""),
    )
    with (
        contextlib.closing(runtime),
        shop.worker(deploy(declared, **settings), queue=queue) as worker,
    ):
        if "rate" in declared:
            shop.tasks.queue_up.delay("a", 99).get(timeout=patience_s())
        with runtime.lock("queue:a"):
            send = shop.tasks.queue_up.apply_async
            results = [send(("a", number), queue=queue) for number in range(count)]
            wait_until(lambda: len(in_line(shop)) == count, message="all wait")
            worker.kill()
    return results


def test_a_deploy_that_moves_a_task_to_another_queue(shop: Any) -> None:
    """After no worker consumes from the old queue any more, waiting messages are sent to the new
    one."""
    results = leave_in_line(shop, PARK, 3, queue="old")
    routes = {"shop.queue_up": {"queue": "shop"}}
    with shop.worker(deploy(PARK, task_routes=routes)) as worker:
        assert [each.get(timeout=patience_s()) for each in results] == [0, 1, 2]
        assert "no worker consumes from old" in worker.text()
    assert in_line(shop) == []
    assert set(shop.effects().values()) == {1}


def test_lines_of_a_former_namespace(shop: Any) -> None:
    """A worker reports messages that wait in a former namespace, with the setting that sends them
    into its own."""
    before = "eu"
    results = leave_in_line(shop, PARK, 3, taskguard_namespace=before)
    wait_until(lambda: not held(shop, before), message="its relay's lease has ended")
    with shop.worker(deploy(PARK, taskguard_namespace="new")) as worker:
        wait_until(lambda: "(finding stranded_namespace)" in worker.text(), message="the finding")
        assert f"taskguard_formerly_namespaces = [{before!r}]" in worker.text()
        assert len(in_line(shop)) == 3
        worker.kill()
    settings = {"taskguard_namespace": "new", "taskguard_formerly_namespaces": [before]}
    with shop.worker(deploy({"busy": "retry"}, **settings)) as worker:
        assert [each.get(timeout=patience_s()) for each in results] == [0, 1, 2]
        wait_until(lambda: not in_line(shop), message="none waits")
        assert "(finding stranded_" not in worker.text()
    assert set(shop.effects().values()) == {1}


def held(shop: Any, namespace: str) -> list[Any]:
    """Return the holders of a namespace's relay lease."""
    prefix = f"{namespace}:" if namespace else ""
    return list(shop.ledger.holders(f"{prefix}leader:taskguard-relay:celery"))


def in_line(shop: Any) -> list[Any]:
    """Return the records with a position in a line."""
    with shop.engine.connect() as db:
        return list(db.execute(sa.select(WORK).where(WORK.c.parked.is_not(None))))


@pytest.mark.parametrize("what", DEPLOYS)
def test_what_waits_outlives_a_deploy_that_takes_options_away(shop: Any, what: str) -> None:
    """Waiting messages run even if the task does not park any more, because the ledger's record
    counts."""
    before, after = DEPLOYS[what]
    count = 1 if what == "latest" else 3
    results = leave_in_line(shop, before, count)
    with shop.worker(deploy(after)):
        assert [each.get(timeout=patience_s()) for each in results] == list(range(count))
    assert in_line(shop) == []
    assert set(shop.effects().values()) == {1}
