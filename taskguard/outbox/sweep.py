"""Sending again: the messages of work that is overdue.

    Sweeper(runtime, {"celery": send}).sweep()

Guarantees: a stored call is sent again until its work is claimed, ended or revoked, even if a
process dies in between. Its message is sent first, and noted as sent after that. Two sweeps at once
send nothing twice, because a lease of the runtime separates them.

Work becomes FAILED, with the reason, if its call cannot be read, or was sent many times without a
claim because its task is gone. It delays no other work. Its caller is notified if its queue can do
that. Only an error of the connection means that the broker is down.

Promoted messages are left to a relay (`relay.py`), which sends them again after a few seconds.
After a sweep such a message would be overdue only an hour later, and strict work would block its
line for as long.

Does not guarantee that nothing is sent twice: a message that still waits in its queue is
indistinguishable from a lost one, and a batch may get no answer. The ledger answers such a
duplicate, as any other.

Read next: `ledger/parts/outbox.py` for what is overdue.
"""

from __future__ import annotations

import enum
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from taskguard.api import TaskGuard
from taskguard.errors import ConfigurationError, StoredCallError
from taskguard.model.delivery import NOT_BEFORE
from taskguard.model.policy import AGAIN_AFTER_S, MOST_ROWS, check_number
from taskguard.outbox.enqueue import Send, outbox_of, waits_s
from taskguard.values import value

if TYPE_CHECKING:
    from taskguard.ledger.ports import Outbox
    from taskguard.model.claims import Overdue

    _Calls = list[tuple[Overdue, dict[str, Any]]]
    _IsAway = Callable[[Exception], bool]

__all__ = ["Sweeper", "Swept", "away_of", "namespace_of"]

logger = logging.getLogger("taskguard")

KEY = "taskguard:sweep"
_TTL_S = 30.0
# How many failures of its connection in a row mean that a broker is down. Refused calls are tried
# again after the others.
_REFUSALS = 10
REFUSED_AGAIN_S = 30.0
_LONGEST_PAUSE_S = 86_400.0
_MOST_DOUBLINGS = 60


@value
class Swept:
    """The counts of one sweep.

    Attributes:
        sent: messages that were sent.
        refused: calls that could not be sent; see the log. A later sweep tries them again.
        failed: work that is FAILED now, because its call can never be sent, or because it was sent
            `max_sends` times and no delivery claimed it.
        strange: calls of another queue or of another application's namespace.
    """

    sent: int = 0
    refused: int = 0
    strange: int = 0
    failed: int = 0


class Sweeper:
    """Sends the messages of overdue work again.

    Args:
        runtime: locks and ledger.
        senders: senders, by the name of the queue in the stored calls that they can send. A sender
            is a `Send`. It may have three methods: `batch()`, a context manager that gives a
            faster sender, whose messages the broker has accepted if the block ends without an
            error; `is_away(error)`, which returns True if the connection failed; and
            `fail(call, message, reason)`, which tells a caller that its work is FAILED.
        again_after_s: in how many seconds a message that no delivery claims counts as lost again.
            At least 1; an hour by default. Each sending doubles it, up to a day. It should be no
            shorter than messages wait in their queue.
        batch: how many items of work are read, sent together and noted as sent at a time; 500 by
            default.
        max_sends: how often a message is sent without a claim before its work is FAILED, because
            its task is gone or refuses its arguments. 10 by default, which takes six days.

    Raises:
        ConfigurationError: `again_after_s` is too short, or `max_sends` is less than 1.
    """

    _key = KEY

    def __init__(
        self,
        runtime: TaskGuard,
        senders: Mapping[str, Send],
        *,
        again_after_s: float = AGAIN_AFTER_S,
        batch: int = 500,
        max_sends: int = 10,
    ) -> None:
        check_number("max_sends", max_sends, at_least=1, at_most=MOST_ROWS, whole=True)
        check_number("batch", batch, at_least=1, at_most=MOST_ROWS, whole=True)
        check_number("again_after_s", again_after_s, at_least=-1)
        if again_after_s < 1:
            raise ConfigurationError(
                f"again_after_s={again_after_s!r}: a sweep would find what it has just sent."
            )
        self._runtime = runtime
        self._senders = senders
        self._again_after_s = again_after_s
        self._batch = batch
        self._max_sends = max_sends

    def sweep(self) -> Swept:
        """Send the message of each item of work that is overdue now, once.

        Raises:
            KeyBusyError: another sweep is running.
            LeaseLostError: this sweep was paused, and another may be running.
            LedgerUnavailableError: the database is down.
        """
        ledger = outbox_of(self._runtime)
        after: Overdue | None = None
        tally = _Tally()
        with self._runtime.lock(self._key, ttl_s=_TTL_S) as lease:
            while not tally.gave_up(self._senders) and (found := self._overdue(ledger, after)):
                lease.check()
                after = found[-1]
                delayed = any(NOT_BEFORE in work.call for work in found)
                now_s = ledger.now_us() / 1e6 if delayed else 0.0
                sent, refused, hopeless = self._send_all(found, tally, now_s)
                former = self._runtime.formerly_namespaces
                moved = [each for each in sent if former and namespace_of(each) in former]
                for work in moved:  # in the present namespace it is another work
                    into = f"its message was sent into the namespace {self._runtime.namespace!r}"
                    ledger.abandon(work, error=into)
                stays = [each for each in sent if each not in moved]
                for pause_s, those in _by_pause(stays, self._again_after_s, now_s):
                    ledger.sent(those, again_after_s=pause_s)
                if refused:
                    self._put_off(ledger, refused)
                for work, reason in hopeless:
                    if ledger.abandon(work, error=reason):
                        logger.error("%s is FAILED: %s", work.work, reason)
                        tally.failed += 1
                        self._tell_caller(work, reason)
        return Swept(tally.sent, tally.refused, tally.strange, tally.failed)

    def _tell_caller(self, work: Overdue, reason: str) -> None:
        """Notify the caller if its queue can do that. The record has the reason, too."""
        try:
            call = json.loads(work.call)
            fail = getattr(self._senders.get(call["queue"]), "fail", None)
            if fail is not None:
                fail(call, work.message, reason)
        except Exception as error:  # noqa: BLE001  # an error in the call, or of a backend
            logger.warning(
                "%s is FAILED, but its caller could not be notified: %s", work.work, error
            )

    def _overdue(self, ledger: Outbox, after: Overdue | None) -> list[Overdue]:
        return ledger.overdue(limit=self._batch, after=after, parked=False)

    def _put_off(self, ledger: Outbox, refused: Sequence[Overdue]) -> None:
        ledger.sent(refused, again_after_s=REFUSED_AGAIN_S, counted=False)

    def _send_all(
        self, items: Sequence[Overdue], tally: _Tally, now_s: float
    ) -> tuple[list[Overdue], list[Overdue], list[tuple[Overdue, str]]]:
        """Return sent work, refused work, and work that can never be sent, with the reason."""
        calls, hopeless = _calls_of(items)
        tally.strange += self._leave_others(calls)
        sent: list[Overdue] = []
        refused: list[Overdue] = []
        for name, those in calls.items():
            send = self._senders.get(name)
            if send is None:  # a call for a queue that another sweep sends to
                tally.strange += len(those)
                continue
            in_vain = [work for work, _ in those if work.sends >= self._max_sends]
            hopeless += [(work, _sent_in_vain(work)) for work in in_vain]
            tried = [each for each in those if each[0].sends < self._max_sends]
            for _, call in tried:
                waits_s(call, now_s)  # removes a time that has passed
            for work, outcome in _send_together(tried, send, tally.in_a_row.get(name, 0)):
                if isinstance(outcome, str):
                    hopeless.append((work, outcome))
                    continue
                (sent if outcome is _Outcome.SENT else refused).append(work)
                tally.count(name, outcome)
        return sent, refused, hopeless

    def _leave_others(self, calls: dict[str, _Calls]) -> int:
        """Remove calls of other applications, which have their own brokers. Return how many."""
        namespace, left = self._runtime.namespace, 0
        mine = {namespace, *self._runtime.formerly_namespaces}
        for name, those in calls.items():
            ours = [each for each in those if each[1].get("app", namespace) in mine]
            left += len(those) - len(ours)
            calls[name] = ours
        return left


def namespace_of(work: Overdue) -> str:
    """Return the namespace of the application that stored the call; "" if it has none."""
    return str(json.loads(work.call).get("app", ""))


def _by_pause(
    items: Sequence[Overdue], again_after_s: float, now_s: float
) -> list[tuple[float, list[Overdue]]]:
    """Group work by the time after which its message counts as lost again.

    That time is the message's own delay, if any, and then twice as long as after the last sending,
    because a slow queue may still have the message.
    """
    longest_s = max(again_after_s, _LONGEST_PAUSE_S)
    found: dict[float, list[Overdue]] = {}
    for work in items:
        pause_s = min(again_after_s * 2.0 ** min(work.sends, _MOST_DOUBLINGS), longest_s)
        found.setdefault(pause_s + waits_s(json.loads(work.call), now_s), []).append(work)
    return list(found.items())


class _Outcome(enum.Enum):
    """The outcome of sending a call."""

    SENT = enum.auto()
    REFUSED = enum.auto()  # by its queue, or because of an error in this call
    AWAY = enum.auto()  # the connection failed


class _Tally:
    """The counts of a sweep so far."""

    def __init__(self) -> None:
        self.sent = self.refused = self.strange = self.failed = 0
        self.in_a_row: dict[str, int] = {}  # failures of the connection, by queue

    def gave_up(self, queues: Iterable[str]) -> bool:
        """Return True if the brokers of all queues are thought to be down."""
        return all(self.in_a_row.get(name, 0) >= _REFUSALS for name in queues)

    def count(self, name: str, outcome: _Outcome) -> None:
        if outcome is _Outcome.SENT:
            self.sent += 1
        else:
            self.refused += 1
        in_a_row = self.in_a_row.get(name, 0)
        self.in_a_row[name] = in_a_row + 1 if outcome is _Outcome.AWAY else 0


def _sent_in_vain(work: Overdue) -> str:
    return (
        f"its message was sent {work.sends} times, but no delivery claimed it: no worker knows "
        f"{work.task}, or it refuses its arguments, or none is there"
    )


def _calls_of(items: Sequence[Overdue]) -> tuple[dict[str, _Calls], list[tuple[Overdue, str]]]:
    """Return the calls by queue, and the work whose call cannot be read, with the reason."""
    calls: dict[str, _Calls] = {}
    unreadable: list[tuple[Overdue, str]] = []
    for work in items:
        try:
            call = json.loads(work.call)
            calls.setdefault(call["queue"], []).append((work, call))
        except (ValueError, TypeError, KeyError) as error:
            unreadable.append((work, f"its stored call cannot be read: {error!r}"))
    return calls, unreadable


def _send_together(
    calls: _Calls, send: Send, in_a_row: int
) -> list[tuple[Overdue, _Outcome | str]]:
    """Send calls in a batch. If that fails, it is unknown which arrived: send them one by one.

    So a call that can never be sent delays no other, and some are sent twice.
    """
    is_away = away_of(send)
    try:
        with _batch_of(send) as together:
            outcomes = _send_each(calls, together, in_a_row, is_away)
    except Exception as error:  # noqa: BLE001  # sending one by one finds out which
        reason = error.__cause__ or error
        logger.warning("%d messages are sent one by one: %s", len(calls), reason)
        outcomes = _send_each(calls, send, in_a_row, is_away)
    return outcomes


def away_of(send: Any) -> _IsAway:
    """Return the test for a failed connection: the sender's, or one by the error's class."""
    is_away: _IsAway | None = getattr(send, "is_away", None)
    return is_away or (lambda error: isinstance(error, OSError))


def _send_each(
    calls: _Calls, send: Send, in_a_row: int, is_away: _IsAway
) -> list[tuple[Overdue, _Outcome | str]]:
    """Return the outcome of each, until the broker seems down. A text is why it cannot be sent."""
    outcomes: list[tuple[Overdue, _Outcome | str]] = []
    for work, call in calls:
        if in_a_row >= _REFUSALS:
            break
        outcome = _try(work, call, send, is_away)
        in_a_row = in_a_row + 1 if outcome is _Outcome.AWAY else 0
        outcomes.append((work, outcome))
    return outcomes


def _try(work: Overdue, call: dict[str, Any], send: Send, is_away: _IsAway) -> _Outcome | str:
    try:
        send(call, work.message)
    except StoredCallError as error:
        return str(error)
    except Exception as error:
        # An error in one call must not stop the others.
        logger.exception("%s could not be sent", work.work)
        return _Outcome.AWAY if is_away(error) else _Outcome.REFUSED
    return _Outcome.SENT


def _batch_of(send: Any) -> AbstractContextManager[Send]:
    batch: Callable[[], AbstractContextManager[Send]] | None = getattr(send, "batch", None)
    return nullcontext(send) if batch is None else batch()
