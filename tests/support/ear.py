"""Celery's events, as Flower and other monitors receive them."""

from __future__ import annotations

import threading
from typing import Any, Self

from support.waiting import patience_s


class Ear:
    """Receives the events of an app's workers, as Flower does."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._listens = threading.Event()
        self.heard: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._listens.wait(patience_s())
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
        """Return the events of a task, in order."""
        return [event["type"] for event in self.heard if event.get("uuid") == task_id]
