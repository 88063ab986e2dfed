"""Sending again: the messages of works that nobody is at any more.

    Sweeper(house, {"celery": send}).sweep()

Guarantees: a work whose call is stored is sent again until somebody claims it, ends it or revokes
it, whatever process dies in between: its message is sent first, and noted as sent only then. Two
sweeps at once send nothing twice: a lease of the house keeps them apart.

Does not guarantee that nothing is sent twice: a message that still waits in its queue is
indistinguishable from a lost one. The ledger answers such a duplicate, as any other.

Read next: `ledger/outbox.py` for what is overdue.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from taskguard.api import TaskGuard
from taskguard.errors import ConfigurationError
from taskguard.outbox import AGAIN_AFTER_S, Send, outbox_of

if TYPE_CHECKING:
    from taskguard.ledger.outbox import Overdue

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
        strange: calls of a queue that this sweep cannot send to.
    """

    sent: int = 0
    refused: int = 0
    strange: int = 0


class Sweeper:
    """Sends the messages of overdue works again.

    Args:
        house: locks and ledger.
        senders: how to send, by the name of the queue that a stored call carries. One that
            has `kept()`, a context manager, gives by it the sender of one sweep.
        again_after_s: after so many seconds without a claim a message counts as lost again, at
            least 1. Not much shorter than messages wait in their queue: each would be sent once
            more.
        batch: works read, and noted as sent, at a time.

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
        tally = _Tally()
        after: Overdue | None = None
        with self._house.lock(KEY, ttl_s=_TTL_S) as lease, ExitStack() as opened:
            senders = {
                name: opened.enter_context(_kept(send)) for name, send in self._senders.items()
            }
            while not tally.gave_up and (found := ledger.overdue(limit=self._batch, after=after)):
                lease.check()
                after = found[-1]
                self._send_all(ledger, found, senders, tally)
        return Swept(tally.sent, tally.refused, tally.strange)

    def _send_all(
        self, ledger: Any, works: list[Overdue], senders: Mapping[str, Send], tally: _Tally
    ) -> None:
        again: dict[float, list[Overdue]] = {self._again_after_s: [], _REFUSED_AGAIN_S: []}
        for work in works:
            if tally.gave_up:
                break
            sent = _sent(work, senders, tally)
            if sent is not None:
                again[self._again_after_s if sent else _REFUSED_AGAIN_S].append(work)
        for again_after_s, those in again.items():
            if those:
                ledger.sent(those, again_after_s=again_after_s)


def _kept(send: Any) -> AbstractContextManager[Send]:
    keep: Callable[[], AbstractContextManager[Send]] | None = getattr(send, "kept", None)
    return nullcontext(send) if keep is None else keep()


def _sent(work: Overdue, senders: Mapping[str, Send], tally: _Tally) -> bool | None:
    """Whether it was sent; None: it is another sweep's."""
    try:
        call = json.loads(work.call)
        send = senders.get(call["queue"])
        if send is None:
            tally.strange += 1
            return None
        send(call, work.message)
    except Exception:
        # Whatever is wrong with one call, the others are to be sent.
        logger.exception("%s could not be sent", work.work)
        tally.refused += 1
        tally.in_a_row += 1
        return False
    tally.sent += 1
    tally.in_a_row = 0
    return True


class _Tally:
    """What a sweep has done so far."""

    sent = 0
    refused = 0
    strange = 0
    in_a_row = 0

    @property
    def gave_up(self) -> bool:
        """Whether the broker is thought to be away."""
        return self.in_a_row >= _REFUSALS
