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
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        swept = Swept()
        after: Overdue | None = None
        tried = _Tried()
        with self._house.lock(KEY, ttl_s=_TTL_S) as lease:
            while not tried.gave_up and (found := ledger.overdue(limit=self._batch, after=after)):
                lease.check()
                after = found[-1]
                tried = self._send(found, refused_in_a_row=tried.in_a_row)
                swept = tried.added_to(swept)
                if tried.sent:
                    ledger.sent(tried.sent, again_after_s=self._again_after_s)
                if tried.refused:
                    ledger.sent(tried.refused, again_after_s=_REFUSED_AGAIN_S)
        return swept

    def _send(self, works: Sequence[Overdue], *, refused_in_a_row: int) -> _Tried:
        """Together. Where that fails nobody knows what arrived, so each is sent by itself.

        So one that can never be sent holds up no other, and some are sent twice.
        """
        try:
            with ExitStack() as opened:
                senders = {
                    name: opened.enter_context(_batch_of(send))
                    for name, send in self._senders.items()
                }
                return _Tried(refused_in_a_row).all(works, senders)
        except Exception as error:  # noqa: BLE001  # what is wrong with which one is told below
            logger.warning("%d messages are sent one by one: %s", len(works), error)
        return _Tried(refused_in_a_row).all(works, self._senders)


def _batch_of(send: Any) -> AbstractContextManager[Send]:
    batch: Callable[[], AbstractContextManager[Send]] | None = getattr(send, "batch", None)
    return nullcontext(send) if batch is None else batch()


class _Tried:
    """What became of the messages of some works."""

    def __init__(self, in_a_row: int = 0) -> None:
        self.in_a_row = in_a_row  # refused, up to now
        self.sent: list[Overdue] = []
        self.refused: list[Overdue] = []
        self.strange = 0

    @property
    def gave_up(self) -> bool:
        """Whether the broker is thought to be away."""
        return self.in_a_row >= _REFUSALS

    def added_to(self, swept: Swept) -> Swept:
        return Swept(
            swept.sent + len(self.sent),
            swept.refused + len(self.refused),
            swept.strange + self.strange,
        )

    def all(self, works: Iterable[Overdue], senders: Mapping[str, Send]) -> _Tried:
        """Each, until it gives up."""
        for work in works:
            if self.gave_up:
                break
            self._try(work, senders)
        return self

    def _try(self, work: Overdue, senders: Mapping[str, Send]) -> None:
        try:
            call = json.loads(work.call)
            send = senders.get(call["queue"])
            if send is None:  # another sweep's
                self.strange += 1
                return
            send(call, work.message)
        except Exception:
            # Whatever is wrong with one call, the others are to be sent.
            logger.exception("%s could not be sent", work.work)
            self.refused.append(work)
            self.in_a_row += 1
        else:
            self.sent.append(work)
            self.in_a_row = 0
