"""Messages that expire while they wait in the line of their key, with real workers.

Each is announced as Celery announces a message that expires in a queue. The messages behind it run.
"""

from __future__ import annotations

import signal
import time
from datetime import UTC, datetime
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery, chord, group
from celery.app.task import Context
from celery.exceptions import ChordError, TaskRevokedError
from celery.signals import before_task_publish, task_revoked

from support.ear import Ear
from support.waiting import patience_s, wait_until
from taskguard.integration import MessageRef
from taskguard.ledger.tables import WORK
from taskguard.model.states import EXPIRED
from taskguard_celery.calls import CelerySender, call_of
from taskguard_celery.marks import HEADER, Marks
from taskguard_celery.message import CeleryQueue
from taskguard_celery.runtime import runtime_of

EVENTS = '{"worker_send_task_events": true}'


def began(shop: Any) -> list[str]:
    return [step.item for step in shop.steps("began")]


def holds(shop: Any, task: Any) -> Any:
    """Send a message that holds the key until the test lets it go on."""
    first = task.delay("a", 0, shop.tasks.UNTIL_GO)
    shop.wait_for_steps("began")
    return first


def wait_for_line(shop: Any, count: int) -> None:
    wait_until(lambda: len(shop.ledger.waiting()) == count, message=f"{count} wait")


def record(shop: Any, result: Any) -> tuple[str, int, str | None]:
    with shop.engine.connect() as db:
        select = sa.select(WORK.c.state, WORK.c.final, WORK.c.error)
        row = db.execute(select.where(WORK.c.message.startswith(result.id))).one()
        return tuple(row)


def expire_in_line(shop: Any) -> None:
    """Let a member of a chord expire in line: the others run in order, and the chord fails."""
    task, add_up = shop.tasks.queue_up, shop.tasks.add_up
    with shop.worker(concurrency=2), Ear(shop.tasks.app) as ear:
        first = holds(shop, task)
        before = task.delay("a", 1)
        wait_for_line(shop, 1)
        member = task.s("a", 2).set(expires=8, task_id="expires-soon")
        total = chord(group([member, shop.tasks.add.s(1, 2)]))(add_up.s())
        after = task.apply_async(("a", 3), expires=600)
        wait_for_line(shop, 3)
        expired = shop.tasks.app.AsyncResult("expires-soon")
        wait_until(lambda: expired.state == "REVOKED", message="REVOKED")
        # The holder is still at work.
        assert not first.ready()
        wait_for_line(shop, 2)
        assert record(shop, expired) == ("FAILED", 0, EXPIRED)
        shop.let_go()
        assert [each.get(timeout=patience_s()) for each in (first, before, after)] == [0, 1, 3]
        with pytest.raises((ChordError, TaskRevokedError)):
            total.get(timeout=patience_s())
        wait_until(lambda: "task-revoked" in ear.of(expired.id))
    assert began(shop) == ["a 0", "a 1", "a 3"]
    [revoked] = [each for each in ear.heard if each["type"] == "task-revoked"]
    assert (revoked["expired"], revoked["terminated"]) == (True, False)
    assert shop.ledger.waiting() == []


def test_a_dropped_message_says_that_it_was_promoted(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A promoted message that Celery drops gives back the key that was kept for it."""
    task, left = shop.tasks.queue_up, []
    monkeypatch.setattr(runtime_of(task.app).runner, "never_runs", left.append)
    for headers in ({}, {HEADER: Marks("m", promoted=("shop", None, None)).header()}):
        request = Context(id="m", args=["a", 1], kwargs={}, headers=headers)
        task_revoked.send(sender=task, request=request, expired=True)
    assert [each.promoted for each in left] == [True]


@pytest.mark.parametrize("sent", ["promoted", "again", "put off"])
def test_what_is_sent_expires_by_its_header_alone(sent: str) -> None:
    """A message that is sent again keeps its expiry in the header only, so that no broker drops it
    unseen."""
    app = Celery("app", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.task_default_queue = "expiry"  # in a process all such brokers are one
    task = app.task(name="t", expires=60)(began)
    expires = datetime.fromtimestamp(time.time() - 60, UTC).isoformat()
    published: list[dict[str, Any]] = []

    def note(headers: Any = None, properties: Any = None, **_: Any) -> None:
        published.append({**properties, "expires": headers["expires"]})

    before_task_publish.connect(note)
    try:
        if sent == "put off":
            task.push_request(id="m", args=[None], kwargs={}, expires=expires, delivery_info={})
            CeleryQueue(task).publish_again(1, 0.0)
        else:
            call = call_of(app, task.signature((None,), expires=expires))
            sender = CelerySender(app)
            (sender if sent == "again" else sender.hand_off)(call, MessageRef("m"))
    finally:
        before_task_publish.disconnect(note)
        app.close()
    assert [each["expires"] for each in published] == [expires]
    assert "expiration" not in published[0]


def test_on_redis(make_shop: Any) -> None:
    """A message leaves the line when it expires, while the key is held, and is announced once."""
    expire_in_line(make_shop(SHOP_SETTINGS=EVENTS))


def test_on_rabbitmq(make_shop: Any, any_rabbitmq: Any) -> None:
    """On RabbitMQ an expired message is announced as on Redis, although the broker would drop it
    unseen."""
    broker = any_rabbitmq.url
    queue = f"shop-{time.time_ns()}"
    expire_in_line(make_shop(SHOP_BROKER=broker, SHOP_QUEUE=queue, SHOP_SETTINGS=EVENTS))


def expire_on_the_way(shop: Any) -> None:
    """Let a promoted message expire before a worker has it: that worker promotes the next one."""
    task = shop.tasks.queue_up
    with shop.worker(concurrency=2) as worker:
        first = holds(shop, task)
        expires = datetime.fromtimestamp(time.time() + 8, UTC)
        expired = task.apply_async(("a", 1), expires=expires)
        after = task.delay("a", 2)
        wait_for_line(shop, 2)
        worker.signal(signal.SIGSTOP)  # which fetches no more; its children go on
        shop.let_go()
        wait_until(lambda: shop.ledger.waiting()[0].expected_until_s is not None)
        assert datetime.now(UTC) < expires
        wait_until(lambda: datetime.now(UTC) > expires)
        worker.signal(signal.SIGCONT)
        assert [each.get(timeout=patience_s()) for each in (first, after)] == [0, 2]
        wait_until(lambda: expired.state == "REVOKED")
        assert record(shop, expired) == ("FAILED", 0, EXPIRED)
    assert began(shop) == ["a 0", "a 2"]


def test_on_its_way_on_redis(shop: Any) -> None:
    """A promoted message that expires on its way is announced, and blocks no other."""
    expire_on_the_way(shop)


def test_on_its_way_on_rabbitmq(rabbit_shop: Any) -> None:
    """On RabbitMQ a promoted message that expires in its queue is announced, too."""
    expire_on_the_way(rabbit_shop)


def test_whoever_announces_calls_the_next(rabbit_shop: Any) -> None:
    """A worker that announces an expired message promotes the next, without a relay.

    That holds for a message that was revoked while it waited, and for one that expired when it was
    promoted.
    """
    shop = rabbit_shop
    task = shop.tasks.queue_up
    with shop.without_relay(), shop.worker(concurrency=2):
        first = holds(shop, task)
        revoked = task.delay("a", 1)
        wait_for_line(shop, 1)
        expires = datetime.fromtimestamp(time.time() + 8, UTC)
        expired = task.apply_async(("a", 2), expires=expires)
        last = task.delay("a", 3)
        wait_for_line(shop, 3)
        shop.revoke(revoked)
        wait_until(lambda: datetime.now(UTC) > expires)
        shop.let_go()
        assert [each.get(timeout=patience_s()) for each in (first, last)] == [0, 3]
        assert (revoked.state, expired.state) == ("REVOKED", "REVOKED")
        assert record(shop, revoked) == ("FAILED", 1, "revoked")
        assert record(shop, expired) == ("FAILED", 0, EXPIRED)
    assert began(shop) == ["a 0", "a 3"]
    assert "leader taskguard-relay:celery: this" not in shop.logs()
