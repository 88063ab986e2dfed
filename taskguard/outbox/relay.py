"""Promote parked messages that no holder promoted: one of all workers looks for them each second.

    Relay(runtime, {"celery": send}).run()

A worker that has finished with a key promotes the first message in its line. The relay does it if
the worker could not: its process died, a plain lock freed the key, or the promoted message was
lost. The relay promotes a message within a second after its key is free. If the message does not
arrive, the relay sends it again after 5 s, and then after twice that time. If a message expires in
a line, the relay sends it within a second, so that a worker notifies its caller.

Guarantees: of all relays of a namespace with the same queues, one works, elected by a lease. Two at
a time do no harm. A relay survives a database or a broker that is down. A broker that is down does
not delay messages of another broker. Does not guarantee the order of messages that it sends again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from taskguard.api import TaskGuard
from taskguard.clock import Clock
from taskguard.errors import (
    CallWithdrawnError,
    KeyBusyError,
    LeaseLostError,
    StoredCallError,
    TaskguardError,
)
from taskguard.guarded import prefix_of
from taskguard.model.bounds import MOST_SLOTS, Rate
from taskguard.model.delivery import MessageRef
from taskguard.outbox.enqueue import Send, outbox_of
from taskguard.outbox.janitor import Janitor
from taskguard.outbox.sweep import REFUSED_AGAIN_S, Sweeper, Swept, away_of, namespace_of
from taskguard.periodic.leader import Leader, Leadership
from taskguard.run.parking import AHEAD_S, EXPECTED_S, promote_next, send_stored

if TYPE_CHECKING:
    from taskguard.ledger.ports import LineLedger, Outbox
    from taskguard.model.claims import Overdue

__all__ = ["Relay"]

logger = logging.getLogger("taskguard")

_NAME = "taskguard-relay"
# Its renewals and one look a second are less than two transactions a second.
_TTL_S = 8.0
_EVERY_S = 1.0
_MOST_EXPIRED = _MOST_DRAINED = 500
_MOST_PAGES = 10
_LONGEST_REST_S = 30.0


class Relay:
    """Promotes messages that no holder promoted, and sends overdue work again.

    Args:
        runtime: locks and ledger.
        senders: senders, by the name of the queue in the stored calls, as for a `Sweeper`. A sender
            may have a method `rate_of(task)`. It returns the present `rate=` of a task, or None. It
            raises LookupError for a task that this process does not know.
        callers: senders for messages that are promoted for the first time. By default `senders`.
        every_s: pause between two looks, in seconds; 1 by default.
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
        self._broken = _Broken(runtime.runner.clock)
        given = senders if callers is None else callers
        self._callers: Mapping[str, Send] = {
            name: self._broken.watched(name, send, away_of(senders.get(name, send)))
            for name, send in given.items()
        }
        self._senders = senders
        self._rates: dict[str, Rate | None] = {}  # by the names of tasks
        self._after: str | None = None  # the last key that the last look has read
        self._drained: dict[str, str | None] = {}  # that key for each former namespace
        self._every_s = every_s
        # The name contains the queues, so that a relay for RQ and a relay for Celery both lead.
        name = f"{_NAME}:{'+'.join(sorted(senders))}"
        from taskguard.outbox.following import Following  # with locks only there is no SQLAlchemy

        self._following = Following(
            runtime.runner.locks,
            runtime.ledger,
            prefix_of(runtime.namespace) + name,
            lease_s=_TTL_S,
        )
        self._leader = Leader(
            runtime,
            name,
            ttl_s=_TTL_S,
            on_lost="fence",
            follow=self._following.wait,
        )
        self._stopped = threading.Event()
        self._janitor = Janitor(runtime)
        self._recalls = _Recalls(name, runtime, senders)

    def run(self) -> None:
        """Relay whenever this process leads, until `stop()` is called. Blocks."""
        while not self._stopped.is_set():
            try:
                self._leader.run(self._work)
            except Exception:
                logger.exception("the relay of parked messages failed, and goes on")
                self._stopped.wait(self._every_s)
        self._following.close()

    def is_needed(self) -> bool:
        """Return True if messages wait for a key, or if the ledger gives no answer."""
        try:
            ledger, queues = self._runtime.ledger, list(self._callers)
            apps = (self._runtime.namespace, *self._runtime.formerly_namespaces)
            return ledger is not None and any(
                ledger.has_lines(app=app, queues=queues) for app in apps
            )
        except TaskguardError as error:
            logger.debug("whether messages wait for a key got no answer: %s", error)
            return True

    def stop(self) -> None:
        """Let `run()` end, and another process take over. Any thread may call this."""
        self._stopped.set()
        self._leader.step_down()

    def _work(self, leadership: Leadership) -> None:
        while not leadership.lost.is_set() and not self._stopped.is_set():
            try:
                self.look()
                self._janitor.step()
            except TaskguardError as error:
                logger.debug("the relay's look got no answer: %s", error)
            self._stopped.wait(self._every_s)
        self._following.leave()

    def look(self) -> int:
        """Look over the lines once, and return how many messages were sent.

        At most ten pages of 2,000 messages are read. The next look begins after the last of them.

        Raises:
            LedgerUnavailableError: the database is down.
        """
        promoted = 0
        for _ in range(_MOST_PAGES):
            queues = self._broken.working(self._callers)
            if not queues:
                break
            promoted += self._look_at_page(queues)
            if self._after is None:
                break
        for app in self._runtime.formerly_namespaces:
            promoted += self._drain(app)
        return promoted

    def _drain(self, app: str) -> int:
        """Send what waits in a former namespace into the present one. Returns how many were sent.

        There it has another key, and a place by when it was sent if it has to wait again. Its work
        here ends only after that: if this process dies in between, the message is sent twice.
        """
        ledger, moved = outbox_of(self._runtime), 0
        queues = self._broken.working(self._senders)
        waits = functools.partial(
            ledger.promote_next, expected_s=EXPECTED_S, app=app, ahead_s=AHEAD_S, rates=self._rates
        )
        expired = overdue = False
        for _ in range(_MOST_PAGES):
            seen = ledger.look(
                app=app,
                queues=queues,
                ahead_s=AHEAD_S,
                after=self._drained.get(app),
                rates=self._rates,
            )
            expired, overdue = seen.expired, seen.overdue
            for key in seen.keys:
                while moved < _MOST_DRAINED and (found := waits(key, queues=queues)) is not None:
                    if not self._move(ledger, found):
                        return moved
                    moved += 1
            if moved >= _MOST_DRAINED:
                break  # the next look goes on with the same page
            self._drained[app] = seen.after
            if seen.after is None:
                break
        late = ledger.expired(app=app, queues=queues, limit=_MOST_EXPIRED) if expired else []
        if overdue:
            late += _overdue_of(ledger, app, queues)
        for each in late:
            moved += self._move(ledger, each)
        return moved

    def _move(self, ledger: LineLedger, found: Overdue) -> bool:
        """Send a message of a former namespace, and end its work there; False if it stays."""
        try:
            send_stored(replace(found, wait_s=0.0), self._senders)
            reason = f"its message was sent into the namespace {self._runtime.namespace!r}"
        except (CallWithdrawnError, StoredCallError) as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001  # whatever a broker raises
            logger.warning("%s: not sent yet into the new namespace: %s", found.work, error)
            return False
        return ledger.abandon(found, error=reason)

    def _look_at_page(self, queues: list[str]) -> int:
        ledger, promoted = outbox_of(self._runtime), 0
        app, events = self._runtime.namespace, self._runtime.events
        seen = ledger.look(
            app=app,
            queues=queues,
            ahead_s=AHEAD_S,
            after=self._after,
            announce=self._following.announcement,
            rates=self._rates,
        )
        self._after = seen.after
        for task in seen.early:
            self._declare(task)
        if seen.expired:
            self._send_expired(ledger, app, queues)
        for key in seen.keys:
            callers = {name: self._callers[name] for name in self._broken.working(queues)}
            if not callers:
                break
            promoted += promote_next(
                ledger,
                key,
                callers,
                events,
                app=app,
                ahead_s=AHEAD_S,
                most=MOST_SLOTS,
                rates=self._rates,
            )
        if seen.overdue:
            try:
                promoted += self._recalls.sweep(self._broken.working(queues)).sent
            except (KeyBusyError, LeaseLostError):
                logger.debug("another relay calls again what was lost")
        return promoted

    def _declare(self, task: str) -> None:
        """Find out which rate a task has now: a deploy may have removed or raised it."""
        for send in self._senders.values():
            rate_of = getattr(send, "rate_of", None)
            if rate_of is not None:
                with contextlib.suppress(LookupError):
                    self._rates[task] = rate_of(task)

    def _send_expired(self, ledger: LineLedger, app: str, queues: Sequence[str]) -> None:
        """Send messages that expired while they waited: the worker that gets one announces it."""
        for work in ledger.expired(app=app, queues=queues, limit=_MOST_EXPIRED):
            try:
                send_stored(work, self._callers)
            except Exception as error:  # noqa: BLE001  # overdue by now, and so a recall
                logger.debug("%s has expired, and is not sent yet: %s", work.work, error)
            else:
                ledger.sent([work], again_after_s=EXPECTED_S)


def _overdue_of(ledger: LineLedger, app: str, queues: Sequence[str]) -> list[Overdue]:
    """Return overdue work in the lines of one namespace, even if other namespaces have more."""
    found: list[Overdue] = []
    after: Overdue | None = None
    while len(found) < _MOST_DRAINED and (
        page := ledger.overdue(limit=_MOST_DRAINED, after=after, parked=True)
    ):
        after = page[-1]
        ours = (each for each in page if namespace_of(each) == app)
        found += [each for each in ours if json.loads(each.call).get("queue") in queues]
    return found


class _Broken:
    """Queues whose broker gave no answer: for a while nothing is sent to them.

    So a broker that is down costs one attempt, and delays no message of another queue.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rests: dict[str, tuple[float, float]] = {}  # until when, and the length of the pause

    def working(self, names: Iterable[str]) -> list[str]:
        """Return the queues to which messages may be sent now."""
        now_s = self._clock.monotonic_s()
        return [name for name in names if self._rests.get(name, (0.0, 0.0))[0] <= now_s]

    def watched(self, name: str, send: Send, is_away: Callable[[Exception], bool]) -> Send:
        """Return a sender that notes whether its broker answers."""

        def watch(call: dict[str, Any], message: MessageRef) -> None:
            try:
                send(call, message)
            except (StoredCallError, CallWithdrawnError):
                raise
            except Exception as error:
                if is_away(error):
                    pause_s = min(2 * self._rests.get(name, (0.0, 0.5))[1], _LONGEST_REST_S)
                    self._rests[name] = self._clock.monotonic_s() + pause_s, pause_s
                raise
            self._rests.pop(name, None)

        return watch


class _Recalls(Sweeper):
    """Sends promoted messages again that have not arrived.

    A message that the broker refuses stays overdue. So it blocks no other message, and is tried
    again later.
    """

    def __init__(self, relay: str, runtime: TaskGuard, senders: Mapping[str, Send]) -> None:
        super().__init__(runtime, senders, again_after_s=EXPECTED_S)
        self._key = f"{relay}:recalls"
        self._again_at_s: dict[str, float] = {}
        self._all = senders

    def sweep(self, queues: Iterable[str] | None = None) -> Swept:
        """Sweep as a Sweeper does, but only for `queues`, if given."""
        self._senders = {name: self._all[name] for name in queues or self._all if name in self._all}
        return super().sweep()

    def _overdue(self, ledger: Outbox, after: Overdue | None) -> list[Overdue]:
        now_s = self._now_s()
        self._again_at_s = {work: at_s for work, at_s in self._again_at_s.items() if at_s > now_s}
        while found := ledger.overdue(limit=self._batch, after=after, parked=True):
            after = found[-1]
            # An enqueued message that has not arrived is promoted when it is first in line.
            not_promoted = [each for each in found if each.keeps_position and not each.sends]
            if not_promoted:
                ledger.sent(not_promoted, again_after_s=None)
                found = [each for each in found if each not in not_promoted]
            if those := [each for each in found if each.work not in self._again_at_s]:
                return those
        return []

    def _now_s(self) -> float:
        return self._runtime.runner.clock.monotonic_s()

    def _put_off(self, ledger: Outbox, refused: Sequence[Overdue]) -> None:
        super()._put_off(ledger, refused)
        again_at_s = self._now_s() + REFUSED_AGAIN_S
        self._again_at_s |= {each.work: again_at_s for each in refused}
