"""Messages that wait for their key in the ledger: `busy="park"`.

A delivery that finds its key taken is stored with its call, and acknowledged: no worker, no thread
and no retry is held meanwhile. Whoever is done with the key calls the first in line: its message is
sent again. What was not called, because a process died, because the key was freed by something that
does not look, or because a call got lost, is called by a relay (`relay.py`).

Guarantees: a message is acknowledged only after it stands in the ledger, flushed; it goes on from
there until its work is claimed or ended. Who has stored one looks whether the key is free by now,
and who has released a key whether somebody waits: so nobody waits for a key that is free, but for
what dies in between. Nothing raises here once a body has run.

Does not guarantee order across what happens within a moment: whoever comes to the ledger while the
key is handed over to one that was sent after it goes next.

Read next: `ledger/statements/lines.py`.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from taskguard.delivery import Delivery, stored_call
from taskguard.errors import (
    CallWithdrawnError,
    LockServerUnavailableError,
    StoredCallError,
    TaskguardError,
)
from taskguard.events import Called, Events, Parked
from taskguard.lease import new_owner
from taskguard.ledger.protocol import ClaimRequest, LineLedger, MessageRef
from taskguard.locks.base import Granted, LockProvider

__all__ = ["CALLED_WAIT_S", "EXPECTED_S", "Line", "call_next"]

logger = logging.getLogger("taskguard")

Send = Callable[[dict[str, Any], MessageRef], None]

EXPECTED_S = 5.0
"""So long after it was sent a call keeps others of its key waiting, in seconds."""

CALLED_WAIT_S = 1.0
"""So long who was called waits for the lock server, where others look whether the key is free."""


class Line:
    """The lines of all keys, for the deliveries of one process."""

    def __init__(self, locks: LockProvider | None, ledger: LineLedger, events: Events) -> None:
        self._locks = locks
        self._ledger = ledger
        self._events = events

    def park(self, delivery: Delivery, request: ClaimRequest, *, by_lock_server: bool) -> bool:
        """Store it; False if that cannot be, or is not to be. Raises as a claim does.

        `by_lock_server`: it was that which said that the key is taken, not the ledger.
        """
        assert delivery.parking is not None  # noqa: S101
        call = delivery.parking.call()
        if call is None:
            return False
        text = stored_call(call, delivery.message, delivery.app)
        sent_s = delivery.published_at_s
        sent_us = None if sent_s is None else int(sent_s * 1e6)
        if not self._ledger.park(replace(request, call=text, sent_us=sent_us)):
            return False
        if self._events.hears(Parked.level):
            message = delivery.message.id
            self._events.emit(Parked(key=delivery.key, task=delivery.task, message=message))
        # Whoever holds the key looks for us when he has released it, which is after this.
        if not by_lock_server or self._is_free(request):
            self.call_next(delivery)
        return True

    def _is_free(self, request: ClaimRequest) -> bool:
        """Whether the lock server would give the key now; True if it gives no answer."""
        if self._locks is None:
            return True
        keys, owner, is_free = request.keys, new_owner(request.message.id), True
        with contextlib.suppress(LockServerUnavailableError):
            try:
                found = self._locks.acquire(
                    keys, owner, ttl_s=request.ttl_s, with_fence=False, wait_s=0.0
                )
                is_free = isinstance(found, Granted)
            finally:
                if is_free:  # also where the answer was lost, or interrupted
                    self._locks.release(keys, owner)
        return is_free

    def call_next(self, delivery: Delivery) -> bool:
        """Call the first in line if its key is free. False if nobody was; never raises."""
        parking = delivery.parking
        assert parking is not None  # noqa: S101
        (key,) = delivery.keys
        senders = {parking.queue: parking.send}
        try:
            return call_next(self._ledger, key, senders, self._events, app=delivery.app)
        except TaskguardError as error:
            logger.debug("%s: whether somebody waits got no answer: %s", key, error)
            return False


def call_next(
    ledger: LineLedger, key: str, senders: Mapping[str, Send], events: Events, *, app: str
) -> bool:
    """Call the first in line whose call can be sent, if the key is free. False if nobody was.

    Nor is anybody if the first one's queue is none of those that there are senders for: its own
    relay calls it. Whose call was withdrawn leaves the line, FAILED. Raises what the ledger does.
    """
    queues = list(senders)
    while found := ledger.call_next(key, expected_s=EXPECTED_S, app=app, queues=queues):
        call = json.loads(found.call)
        try:
            senders[call["queue"]](call, found.message)
        except CallWithdrawnError as error:
            logger.warning("%s leaves the line of %s, and is FAILED: %s", found.work, key, error)
            ledger.abandon(found, error=str(error))
            continue
        except StoredCallError as error:
            # Perhaps by this process, which may be of an older deploy: a relay has the last word.
            logger.debug("%s: its call is left to the relay: %s", found.work, error)
            return False
        except Exception as error:  # noqa: BLE001  # whatever a broker raises
            logger.warning("%s: called, and not sent yet; a relay will: %s", found.work, error)
            return False
        if events.hears(Called.level):
            events.emit(Called(key=key, task=found.task, message=found.message.id))
        return True
    return False
