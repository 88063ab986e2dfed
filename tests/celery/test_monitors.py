"""What Flower and other monitors hear of messages that are put off: Celery's events."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, Self

import taskguard
from support.waiting import wait_until


class Ear:
    """Hears the events of an app's workers, as Flower does."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._listens = threading.Event()
        self.heard: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._listens.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _listen(self) -> None:
        with self._app.connection_for_read() as connection:
            receiver = self._app.events.Receiver(connection, handlers={"*": self.heard.append})
            with receiver.consumer_context() as (cloned, _, _):
                while not self._over.is_set():
                    try:
                        cloned.drain_events(timeout=0.2)
                    except TimeoutError:
                        self._listens.set()  # subscribed, and nothing is there

    def of(self, task_id: str) -> list[str]:
        """What was heard of a task, in order."""
        return [event["type"] for event in self.heard if event.get("uuid") == task_id]


def test_a_deferral_is_one_more_reception_and_start_of_the_same_task(make_shop: Any) -> None:
    """No retry, no failure, no other task; and one success, whatever it took."""
    shop = make_shop(SHOP_SETTINGS='{"worker_send_task_events": true}')
    locks, ledger = shop.environment["SHOP_LOCKS"], shop.environment["SHOP_DATABASE"]
    other = taskguard.connect(locks=locks, ledger=ledger)
    with shop.worker() as worker, Ear(shop.tasks.app) as ear:
        with other.lock("order:7"):
            message = shop.tasks.ship.apply_async([7])
            wait_until(
                lambda: worker.text().count("deferred") >= 2, timeout_s=60, message="put off twice"
            )
        shop.wait_for_effects(1)
        wait_until(
            lambda: "task-succeeded" in ear.of(message.id), timeout_s=60, message="succeeded"
        )
    other.close()
    kinds = Counter(ear.of(message.id))
    deferrals = worker.text().count("deferred")
    assert deferrals >= 2
    assert kinds == {
        "task-received": deferrals + 1,
        "task-started": deferrals + 1,
        "task-succeeded": 1,
    }
    assert {event["uuid"] for event in ear.heard if "uuid" in event} == {message.id}
