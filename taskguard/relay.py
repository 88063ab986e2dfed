"""Calls of parked messages that nobody has made: one process of all looks for them each second.

    Relay(runtime, {"celery": send}).run()

Whoever is done with a key calls the first in its line. Where that did not happen (a holder died,
the key was freed by a plain lock or by a task that does not park, a call got lost on its way) the
relay does it: within a second of when the key is free, or 5 s after a call that nobody followed,
then after twice as long. Who has expired in a line is sent within a second of that, so that a
worker announces it, and is out of the way of those behind it.

Guarantees: of all relays of a namespace that send to the same queues one works, elected by a lease;
two at a time do no harm. A database or a broker that is away ends nothing. Does not guarantee the
order of what it calls again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from taskguard.api import TaskGuard
from taskguard.bounds import MOST_SLOTS
from taskguard.errors import KeyBusyError, LeaseLostError, TaskguardError
from taskguard.leader import Leadership
from taskguard.outbox import Send, outbox_of
from taskguard.parking import AHEAD_S, EXPECTED_S, call_next, send_stored
from taskguard.sweep import REFUSED_AGAIN_S, Sweeper

if TYPE_CHECKING:
    from taskguard.ledger.protocol import LineLedger, Overdue

__all__ = ["Relay"]

logger = logging.getLogger("taskguard")

_NAME = "taskguard-relay"
_TTL_S = 5.0
_EVERY_S = 1.0
_MOST_KEYS = _MOST_EXPIRED = 500


class Relay:
    """Calls what was not called.

    Args:
        runtime: locks and ledger.
        senders: how to send, by the name of the queue that a stored call carries, as for a Sweeper.
        callers: the same for who is called for the first time; as `senders` by default.
        every_s: how often it looks, in seconds.
    """

    def __init__(
        self,
        runtime: TaskGuard,
        senders: Mapping[str, Send],
        callers: Mapping[str, Send] | None = None,
        *,
        every_s: float = _EVERY_S,
    ) -> None:
        self._runtime = runtime
        self._callers: Mapping[str, Send] = senders if callers is None else callers
        self._every_s = every_s
        # One that sends to RQ keeps nobody from sending to Celery.
        name = f"{_NAME}:{'+'.join(sorted(senders))}"
        self._leader = runtime.leader(name, ttl_s=_TTL_S, on_lost="fence")
        self._stopped = threading.Event()
        self._recalls = _Recalls(name, runtime, senders)

    def run(self) -> None:
        """Until `stop()`, whenever this process is the one."""
        while not self._stopped.is_set():
            try:
                self._leader.run(self._work)
            except Exception:
                logger.exception("the relay of parked messages failed, and goes on")
                self._stopped.wait(self._every_s)

    def is_needed(self) -> bool:
        """Return True if messages wait for a key, or if the ledger gives no answer."""
        try:
            return bool(self._runtime.ledger and self._runtime.ledger.waiting(limit=1))
        except TaskguardError as error:
            logger.debug("whether messages wait for a key got no answer: %s", error)
            return True

    def stop(self) -> None:
        """Let `run()` end, and another process take over; from any thread."""
        self._stopped.set()
        self._leader.step_down()

    def _work(self, leadership: Leadership) -> None:
        while not leadership.lost.is_set() and not self._stopped.is_set():
            try:
                self.look()
            except TaskguardError as error:
                logger.debug("the relay's look got no answer: %s", error)
            self._stopped.wait(self._every_s)

    def look(self) -> int:
        """Once over all lines: how many were called.

        Raises:
            LedgerUnavailableError: the database is away.
        """
        ledger, called = outbox_of(self._runtime), 0
        app = self._runtime.namespace
        queues, events = list(self._callers), self._runtime.events
        self._send_expired(ledger, app, queues)
        for key in ledger.open_keys(app=app, queues=queues, limit=_MOST_KEYS, ahead_s=AHEAD_S):
            called += call_next(
                ledger, key, self._callers, events, app=app, ahead_s=AHEAD_S, most=MOST_SLOTS
            )
        if ledger.overdue(limit=1, parked=True):
            try:
                called += self._recalls.sweep().sent
            except (KeyBusyError, LeaseLostError):
                logger.debug("another relay calls again what was lost")
        return called

    def _send_expired(self, ledger: LineLedger, app: str, queues: Sequence[str]) -> None:
        """Send who has expired while he waited: the worker that gets the message announces it."""
        for work in ledger.expired(app=app, queues=queues, limit=_MOST_EXPIRED):
            try:
                send_stored(work, self._callers)
            except Exception as error:  # noqa: BLE001  # overdue by now, and so a recall
                logger.debug("%s has expired, and is not sent yet: %s", work.work, error)
            else:
                ledger.sent([work], again_after_s=EXPECTED_S)


class _Recalls(Sweeper):
    """Sends again what was called and has not come.

    What the broker refuses stays overdue, so that it holds up nobody, and is tried again later.
    """

    def __init__(self, relay: str, runtime: TaskGuard, senders: Mapping[str, Send]) -> None:
        super().__init__(runtime, senders, again_after_s=EXPECTED_S)
        self._key = f"{relay}:recalls"
        self._again_at_s: dict[str, float] = {}

    def _overdue(self, ledger: LineLedger, after: Overdue | None) -> list[Overdue]:
        now_s = self._now_s()
        self._again_at_s = {work: at_s for work, at_s in self._again_at_s.items() if at_s > now_s}
        while found := ledger.overdue(limit=self._batch, after=after, parked=True):
            if those := [each for each in found if each.work not in self._again_at_s]:
                return those
            after = found[-1]
        return []

    def _now_s(self) -> float:
        return self._runtime.runner.clock.monotonic_s()

    def _put_off(self, ledger: LineLedger, refused: Sequence[Overdue]) -> None:
        super()._put_off(ledger, refused)
        again_at_s = self._now_s() + REFUSED_AGAIN_S
        self._again_at_s |= {each.work: again_at_s for each in refused}
