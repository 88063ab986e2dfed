"""Sending again: the messages of works that nobody is at any more.

    Sweeper(house, {"celery": send}).sweep()

Guarantees: a work whose call is stored is sent again until somebody claims it, ends it or revokes
it, whatever process dies in between: its message is sent first, and noted as sent only then. Two
sweeps at once send nothing twice: a lease of the house keeps them apart.

Does not guarantee that nothing is sent twice: a message that still waits in its queue is
indistinguishable from a lost one, and a batch may get no answer. The ledger answers such a
duplicate, as any other.

Read next: `ledger/outbox.py` for what is overdue.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from taskguard.api import TaskGuard
from taskguard.errors import ConfigurationError
from taskguard.outbox import AGAIN_AFTER_S, Send, outbox_of, waits_s

if TYPE_CHECKING:
    from taskguard.ledger.outbox import Overdue

    _Calls = list[tuple[Overdue, dict[str, Any]]]

__all__ = ["Sweeper", "Swept"]

logger = logging.getLogger("taskguard")

KEY = "taskguard:sweep"
_TTL_S = 30.0
# A broker that refuses so many in a row is thought to be away. What it refused goes behind the
# rest: these may be calls that can never be sent.
_REFUSALS = 10
_REFUSED_AGAIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep did.

    Attributes:
        sent: messages sent.
        refused: calls that could not be sent; see the log. They are tried again in half a minute.
        strange: calls of a queue that this sweep cannot send to, or of another application, by its
            namespace.
    """

    sent: int = 0
    refused: int = 0
    strange: int = 0


class Sweeper:
    """Sends the messages of overdue works again.

    Args:
        house: locks and ledger.
        senders: how to send, by the name of the queue that a stored call carries. One that has
            `batch()`, a context manager, gives by it a faster sender: what that was given was
            taken if the block ends without an error.
        again_after_s: after so many seconds without a claim a message counts as lost again, at
            least 1. Not much shorter than messages wait in their queue: each would be sent once
            more.
        batch: works read, sent together, and noted as sent, at a time.

    Raises:
        ConfigurationError: `again_after_s` is too short.
    """

    def __init__(
        self,
        house: TaskGuard,
        senders: Mapping[str, Send],
        *,
        again_after_s: float = AGAIN_AFTER_S,
        batch: int = 500,
    ) -> None:
        if again_after_s < 1:
            raise ConfigurationError(
                f"again_after_s={again_after_s!r}: a sweep would find what it has just sent."
            )
        self._house = house
        self._senders = senders
        self._again_after_s = again_after_s
        self._batch = batch

    def sweep(self) -> Swept:
        """Once over everything that is overdue now.

        Raises:
            KeyBusyError: another sweep is at it.
            LeaseLostError: this one was paused, and another may be at it.
            LedgerUnavailableError: the database is away.
        """
        ledger = outbox_of(self._house)
        after: Overdue | None = None
        tally = _Tally()
        with self._house.lock(KEY, ttl_s=_TTL_S) as lease:
            while not tally.gave_up and (found := ledger.overdue(limit=self._batch, after=after)):
                lease.check()
                after = found[-1]
                sent, refused = self._send_all(found, tally)
                for wait_s, those in _by_wait(sent):
                    ledger.sent(those, again_after_s=self._again_after_s + wait_s)
                if refused:
                    ledger.sent(refused, again_after_s=_REFUSED_AGAIN_S)
        return Swept(tally.sent, tally.refused, tally.strange)

    def _send_all(
        self, works: Sequence[Overdue], tally: _Tally
    ) -> tuple[list[Overdue], list[Overdue]]:
        """Those that were sent, and those that were refused."""
        calls, refused = _calls_of(works)
        tally.strange += self._leave_others(calls)
        sent: list[Overdue] = []
        tally.refused += len(refused)
        for name, those in calls.items():
            send = self._senders.get(name)
            if send is None:  # another sweep's
                tally.strange += len(those)
                continue
            for work, was_sent in _send_together(those, send, tally.in_a_row):
                (sent if was_sent else refused).append(work)
                tally.count(was_sent=was_sent)
        return sent, refused

    def _leave_others(self, calls: dict[str, _Calls]) -> int:
        """Take other applications' calls out: these are for brokers of theirs."""
        namespace, left = self._house.namespace, 0
        for name, those in calls.items():
            ours = [each for each in those if each[1].get("app", namespace) == namespace]
            left += len(those) - len(ours)
            calls[name] = ours
        return left


def _by_wait(works: Sequence[Overdue]) -> list[tuple[float, list[Overdue]]]:
    """Works by how long their messages wait before anybody may take them; mostly not at all."""
    found: dict[float, list[Overdue]] = {}
    for work in works:
        found.setdefault(waits_s(json.loads(work.call)), []).append(work)
    return list(found.items())


class _Tally:
    """What a sweep has done so far."""

    def __init__(self) -> None:
        self.sent = self.refused = self.strange = 0
        self.in_a_row = 0  # refused by a broker

    @property
    def gave_up(self) -> bool:
        """Whether the broker is thought to be away."""
        return self.in_a_row >= _REFUSALS

    def count(self, *, was_sent: bool) -> None:
        if was_sent:
            self.sent += 1
            self.in_a_row = 0
        else:
            self.refused += 1
            self.in_a_row += 1


def _calls_of(works: Sequence[Overdue]) -> tuple[dict[str, _Calls], list[Overdue]]:
    """By queue; and those that cannot be read."""
    calls: dict[str, _Calls] = {}
    unreadable: list[Overdue] = []
    for work in works:
        try:
            call = json.loads(work.call)
            calls.setdefault(call["queue"], []).append((work, call))
        except Exception:
            logger.exception("%s could not be sent", work.work)
            unreadable.append(work)
    return calls, unreadable


def _send_together(calls: _Calls, send: Send, in_a_row: int) -> list[tuple[Overdue, bool]]:
    """In a batch. Where that fails nobody knows what arrived, so each is sent by itself.

    So one that can never be sent holds up no other, and some are sent twice.
    """
    try:
        with _batch_of(send) as together:
            outcomes = _send_each(calls, together, in_a_row)
    except Exception as error:  # noqa: BLE001  # one by one it is told of which
        reason = error.__cause__ or error
        logger.warning("%d messages are sent one by one: %s", len(calls), reason)
        outcomes = _send_each(calls, send, in_a_row)
    return outcomes


def _send_each(calls: _Calls, send: Send, in_a_row: int) -> list[tuple[Overdue, bool]]:
    """Whether each was sent, until the broker is thought to be away."""
    outcomes: list[tuple[Overdue, bool]] = []
    for work, call in calls:
        if in_a_row >= _REFUSALS:
            break
        was_sent = _try(work, call, send)
        in_a_row = 0 if was_sent else in_a_row + 1
        outcomes.append((work, was_sent))
    return outcomes


def _try(work: Overdue, call: dict[str, Any], send: Send) -> bool:
    try:
        send(call, work.message)
    except Exception:
        # Whatever is wrong with one call, the others are to be sent.
        logger.exception("%s could not be sent", work.work)
        return False
    return True


def _batch_of(send: Any) -> AbstractContextManager[Send]:
    batch: Callable[[], AbstractContextManager[Send]] | None = getattr(send, "batch", None)
    return nullcontext(send) if batch is None else batch()
