"""RabbitMQ as the broker behaves as Redis does."""

from __future__ import annotations

import contextlib
import signal
import uuid
from collections import Counter
from typing import Any

import pytest
from celery import Celery

from support.waiting import patience_s, wait_until
from taskguard.integration import MessageRef
from taskguard_celery.calls import CelerySender, call_of

pytestmark = pytest.mark.debian
# The versions of Debian's stable and unstable differ in quorum queues and in how they treat a
# returned message. Tests that do not depend on that run on the first.
both_versions = pytest.mark.parametrize(
    "any_rabbitmq", ["rabbitmq", "newest_rabbitmq"], indirect=True
)


def waiting(shop: Any) -> int:
    """Return the number of messages that RabbitMQ has given to no worker."""
    with shop.tasks.app.connection_for_write() as connection:
        name = shop.tasks.app.conf.task_default_queue
        return int(connection.default_channel.queue_declare(name, passive=True).message_count)


@both_versions
def test_what_is_sent_in_a_row_has_been_confirmed(any_rabbitmq: Any) -> None:
    """A batch of messages is confirmed by RabbitMQ, even if the app does not ask for it."""
    with Celery("confirm", broker=any_rabbitmq.url, set_as_current=False) as app:
        app.conf.task_default_queue = f"confirm-{uuid.uuid4().hex}"
        lost = app.signature("any", exchange="there-is-none", routing_key="x")
        calls = [app.signature("any", (n,)) for n in range(10)] + [lost]
        calls += [app.signature("any", (n,)) for n in range(10)]
        sent = 0
        with CelerySender(app).batch() as send:
            for call in calls:
                with contextlib.suppress(Exception):
                    send(call_of(app, call), MessageRef("m"))
                    sent += 1
        with app.connection_for_write() as connection:
            channel = connection.default_channel
            found = channel.queue_declare(app.conf.task_default_queue, passive=True)
            channel.queue_delete(app.conf.task_default_queue)
        assert sent == found.message_count == 20


@both_versions
@pytest.mark.usefixtures("short_leases")
def test_a_killed_childs_work_is_done_again(rabbit_shop: Any) -> None:
    """The message of a killed child comes back at once, is deferred until the lease ends, and is
    done once."""
    shop = rabbit_shop
    results = [shop.tasks.ship.delay(7, 60)]
    with shop.worker() as worker:
        (first,) = shop.wait_for_steps("began")
        results.append(shop.tasks.ship.delay(7))
        lease_until_s = shop.kill_holder(first.pid, "shop.ship", 7)
        assert [result.get(timeout=patience_s()) for result in results] == [{"order": 7}] * 2
        assert "deferred" in worker.text()
    assert shop.work("shop.ship", 7).started_s >= lease_until_s
    assert shop.effects() == Counter({"7": 1})


@both_versions
@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_a_delivery_that_finds_the_key_taken_is_put_off(rabbit_shop: Any, kind: str) -> None:
    """A delivery of a taken key is deferred on classic and on quorum queues, and answered later."""
    shop = rabbit_shop
    settings = {"SHOP_SETTINGS": '{"task_default_queue_type": "%s"}' % kind}  # noqa: UP031  # braces
    shop.tasks.app.conf.task_default_queue_type = kind
    with shop.worker(settings) as worker:
        first = shop.tasks.ship.delay(5, shop.tasks.UNTIL_GO)
        shop.wait_for_steps("began")
        second = shop.tasks.ship.delay(5)
        wait_until(lambda: "deferred" in worker.text(), message="put off")
        shop.let_go()
        assert [each.get(timeout=patience_s()) for each in (first, second)] == [{"order": 5}] * 2
        assert f"(message {second.id})" in worker.text()
        shop.wait_until_acknowledged()
        worker.signal(signal.SIGTERM)
        worker.wait()
    assert waiting(shop) == 0
    assert shop.effects() == Counter({"5": 1})


@both_versions
def test_a_quorum_queue_that_is_declared_is_found_out(quorum_shop: Any) -> None:
    """Celery detects the quorum queue, RabbitMQ delays by whole seconds, and every delivery is
    answered."""
    shop = quorum_shop
    with shop.worker(concurrency=4) as worker:
        results = [shop.tasks.ship.delay(6, shop.tasks.UNTIL_GO)]
        shop.wait_for_steps("began")
        results += [shop.tasks.ship.delay(6) for _ in range(3)]
        wait_until(lambda: worker.text().count("deferred") >= 3, message="put off")
        shop.let_go()
        assert [each.get(timeout=patience_s()) for each in results] == [{"order": 6}] * 4
        assert "could not be deferred" not in worker.text()
    assert shop.effects() == Counter({"6": 1})


@both_versions
def test_a_delivery_limit_outlasts_an_outage_of_publishing(quorum_shop: Any) -> None:
    """A message that cannot be deferred waits in its delivery, instead of coming back until it is
    dropped.

    Once its key is free, it runs without having been deferred.
    """
    shop = quorum_shop
    outage = shop.folder / "outage"
    with shop.worker({"SHOP_OUTAGE": str(outage)}) as worker:
        first = shop.tasks.ship.delay(8, shop.tasks.UNTIL_GO)
        shop.wait_for_steps("began")
        outage.touch()
        second = shop.tasks.ship.delay(8)
        wait_until(
            lambda: worker.text().count("could not be deferred") > 3,
            message="more tries than the queue would allow",
        )
        shop.let_go()
        assert [each.get(timeout=patience_s()) for each in (first, second)] == [{"order": 8}] * 2
    assert shop.effects() == Counter({"8": 1})
