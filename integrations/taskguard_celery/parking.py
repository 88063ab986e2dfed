"""`busy="park"` for Celery: a message leaves its queue for the ledger, and a worker relays.

Guarantees: what is sent again is the same message (id, links, chord, group, headers, priority,
route), with the numbers that the ledger knows. A message that expires is put off instead: nobody
would hear of its end in the line. Each worker with a task that parks has a thread that may become
the relay; it ends with its worker.

Read next: `calls.py`; in taskguard `parking.py` and `relay.py`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from celery import Celery, Task
from celery.signals import worker_shutting_down

from taskguard import MessageRef, Relay, errors
from taskguard_celery.calls import NAME, CelerySender, call_in_hand
from taskguard_celery.runtime import runtime_of

__all__ = ["CeleryParking", "start_relay"]

logger = logging.getLogger("taskguard")

_relays: list[Relay] = []


class CeleryParking:
    """How the message that `task` is handling is parked."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def call(self) -> dict[str, Any] | None:
        """The message in hand as a stored call; None for one that expires."""
        if self._task.request.expires is not None:
            return None
        return call_in_hand(self._task)

    def send(self, call: Mapping[str, Any], message: MessageRef) -> None:
        """Publish a stored call; raises unless the broker took it."""
        if call.get("queue") != NAME:
            raise errors.StoredCallError(f"it is a call of {call.get('queue')}, not of Celery")
        CelerySender(self._task.app)(dict(call), message)


def start_relay(app: Celery) -> None:
    """A thread that relays whenever this worker is the one to do so."""
    relay = Relay(runtime_of(app), {NAME: CelerySender(app)})
    _relays.append(relay)
    threading.Thread(target=relay.run, name="taskguard-relay", daemon=True).start()


def _stop_relays(**_: Any) -> None:
    while _relays:
        _relays.pop().stop()


worker_shutting_down.connect(_stop_relays, weak=False)
