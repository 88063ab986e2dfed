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

With `busy="latest"` and `"supersede"` one waits, the newest: a message whose place it takes is sent
again at once, and finds in the ledger that it never runs.

Read next: `ledger/statements/lines.py`, and `newest.py` there.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from taskguard.delivery import Delivery, stored_call
from taskguard.errors import LockServerUnavailableError, StoredCallError, TaskguardError
from taskguard.events import Called, Events, Parked
from taskguard.lease import new_owner
from taskguard.ledger.outbox import Overdue
from taskguard.ledger.protocol import Answer, ClaimRequest, LineLedger
from taskguard.locks.base import Granted, LockProvider

__all__ = ["CALLED_WAIT_S", "EXPECTED_S", "Line"]

logger = logging.getLogger("taskguard")

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

    def park(
        self, delivery: Delivery, request: ClaimRequest, *, by_lock_server: bool
    ) -> bool | Answer:
        """Store it; False if that cannot be, or is not to be. Raises as a claim does.

        An Answer: it is superseded by a newer one.

        `by_lock_server`: it was that which said that the key is taken, not the ledger.
        """
        assert delivery.parking is not None  # noqa: S101
        call = delivery.parking.call()
        if call is None:
            return False
        text = stored_call(call, delivery.message, delivery.app)
        request = replace(request, call=text)
        if request.newest is None:
            parked = self._ledger.park(request)
        else:
            found = self._ledger.park_newest(request)
            if isinstance(found, Answer):
                return found
            parked = found is not None
            self.tell(delivery, () if found is None else found.replaced)
        if not parked:
            return False
        if self._events.hears(Parked.level):
            message = delivery.message.id
            self._events.emit(Parked(key=delivery.key, task=delivery.task, message=message))
        # Whoever holds the key looks for us when he has released it, which is after this.
        if not by_lock_server or self._is_free(request):
            self.call_next(delivery)
        return True

    def tell(self, delivery: Delivery, replaced: Iterable[Overdue]) -> None:
        """Send messages again whose place this delivery took: their callers hear of it by that."""
        assert delivery.parking is not None  # noqa: S101
        for work in replaced:
            send(work, delivery.parking.send, self._events, key=delivery.key)

    def hear(self, delivery: Delivery) -> None:
        """Its caller hears now that it never runs: it is sent no more for that. Never raises."""
        try:
            self._ledger.told(str(delivery.work))
        except TaskguardError as error:
            logger.debug("%s: that it was told got no answer: %s", delivery.key, error)

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
        assert delivery.parking is not None  # noqa: S101
        (key,) = delivery.keys
        try:
            found = self._ledger.call_next(key, expected_s=EXPECTED_S, app=delivery.app)
            if found is None:
                return False
            return send(found, delivery.parking.send, self._events, key=key)
        except TaskguardError as error:
            logger.debug("%s: whether somebody waits got no answer: %s", key, error)
            return False


def send(
    work: Overdue, to: Callable[[dict[str, Any], Any], None], events: Events, *, key: str
) -> bool:
    """Send a call that the ledger has noted; a relay sends it again if that fails."""
    try:
        to(json.loads(work.call), work.message)
    except StoredCallError as error:
        logger.debug("%s: its call is left to the relay: %s", work.work, error)
        return False
    except Exception as error:  # noqa: BLE001  # whatever a broker raises
        logger.warning("%s: called, and not sent yet; a relay will: %s", work.work, error)
        return False
    if events.hears(Called.level):
        events.emit(Called(key=key, task=work.task, message=work.message.id))
    return True
