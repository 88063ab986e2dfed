"""Decides the one outcome of each delivery, counts it, and reports it: the event `Delivered`.

Guarantees: each delivery is reported once, when it ends, and under one outcome. A process that a
body forked reports nothing. If the queue goes on with a delivery that it could not publish again,
the end of that delivery is reported, not the attempt. A time limit that arrives here is dropped:
the delivery has ended. Only a shutdown goes on.

A body that ran, and lost its lease or was refused, is `stale`, even if its message was deferred or
answered after that. A body that raised after DONE was committed is `done`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from taskguard import errors
from taskguard.clock import Clock
from taskguard.events import Delivered, Events
from taskguard.metrics import COUNTS_LOST, TASKS
from taskguard.model.counts import Count, Noted
from taskguard.model.delivery import (
    Answered,
    Completed,
    Deferred,
    Delivery,
    Dropped,
    MessageRef,
    Parked,
)
from taskguard.model.history import Happened
from taskguard.model.outcomes import Ended
from taskguard.model.policy import Policy
from taskguard.model.texts import shown_id
from taskguard.run import tracing
from taskguard.run.flush import Flush
from taskguard.run.shutdown import is_time_limit
from taskguard.run.tally import Tally

if TYPE_CHECKING:
    from taskguard.ledger.ports import Counts
    from taskguard.model.delivery import Outcome
    from taskguard.run.holding import Holding

__all__ = ["Counting", "ended_by", "ended_by_error"]

logger = logging.getLogger("taskguard")

_BY_TYPE = {
    Completed: Ended.DONE,
    Answered: Ended.DUPLICATE,
    Deferred: Ended.DEFERRED,
    Parked: Ended.PARKED,
}
_BY_REASON = {each.value: each for each in Ended}

_NO_POLICY = Policy()
_NOTED = ("n", "key", "task", "work", "owner", "fence", "detail")
_MOST_BYTES = 4_090  # a pipe takes 4,096 bytes at once

# Outcomes that are happenings of a key, because they change no record.
_HAPPENED = {
    **dict.fromkeys(
        (
            Ended.DUPLICATE,
            Ended.OUTDATED,
            Ended.SUPERSEDED,
            Ended.REPLACED,
            Ended.REVOKED,
            Ended.EXPIRED,
            Ended.DEAD,
            Ended.MISMATCH,
            Ended.TOO_OLD,
            Ended.MISSING,
            Ended.INELIGIBLE,
        ),
        Happened.DUPLICATE,
    ),
    Ended.DEFERRED: Happened.DEFERRED,
    Ended.SKIPPED: Happened.SKIPPED,
}

# The first class that fits decides.
_BY_ERROR: tuple[tuple[type[BaseException], Ended], ...] = (
    (errors.KeyBusyError, Ended.REFUSED),
    (errors.KeyAlreadyHeldError, Ended.REFUSED),
    (errors.LineFullError, Ended.REFUSED),
    (errors.WorkDeadError, Ended.DEAD),
    (errors.WorkRevokedError, Ended.REVOKED),
    (errors.SupersededError, Ended.OUTDATED),
    (errors.FingerprintMismatchError, Ended.MISMATCH),
    (errors.MessageTooOldError, Ended.TOO_OLD),
    (errors.RowMissingError, Ended.MISSING),
    (errors.RowIneligibleError, Ended.INELIGIBLE),
    (errors.WorkFailedError, Ended.DUPLICATE),
    (errors.LedgerUnavailableError, Ended.UNAVAILABLE),
    (errors.LedgerSchemaError, Ended.UNAVAILABLE),
    (errors.TransactionRetryError, Ended.UNAVAILABLE),
    (errors.LockServerUnavailableError, Ended.UNAVAILABLE),
    (Exception, Ended.FAILED),
)


def ended_by(outcome: Outcome) -> Ended:
    """Return how a delivery with this outcome ended."""
    if isinstance(outcome, Dropped):
        return _BY_REASON[outcome.reason]
    return _BY_TYPE[type(outcome)]


def ended_by_error(error: BaseException) -> Ended | None:
    """Return how a delivery ended that raised this error before its body. None: it goes on."""
    if getattr(error, "delivery_goes_on", False):
        return None
    for kind, ended in _BY_ERROR:
        if isinstance(error, kind):
            return ended
    return Ended.INTERRUPTED


class Counting:
    """Counts and reports the deliveries of one runner.

    Attributes:
        tally: the counters.
        flush: sends them to the ledger.
    """

    def __init__(self, *, ledger: Counts | None, events: Events, clock: Clock) -> None:
        self._events = events
        self._clock = clock
        self._tasks: set[str] = set()
        self.tally = Tally(kept=ledger is not None)
        self.flush = Flush(self.tally, ledger)

    def returned(
        self, delivery: Delivery, outcome: Outcome, holding: Holding | None, begun_s: float
    ) -> None:
        """Report a delivery that ended with an outcome for its queue.

        Args:
            delivery: the delivery.
            outcome: its outcome.
            holding: what it held. None: it did not get its key.
            begun_s: when it began, by the monotonic clock.
        """
        if isinstance(outcome, Deferred) and getattr(delivery.queue, "waits_here", False):
            return  # its queue goes on with it
        ended = None if holding is None else holding.ended
        self._report(delivery, ended or ended_by(outcome), holding, begun_s)

    def raised(
        self, delivery: Delivery, error: BaseException, holding: Holding | None, begun_s: float
    ) -> None:
        """Report a delivery that ended with an error, unless its queue goes on with it."""
        ended: Ended | None
        if holding is None:
            ended = ended_by_error(error)
        elif holding.attempt.completed:
            ended = Ended.DONE
        elif getattr(error, "delivery_goes_on", False):
            ended = None
        else:
            ended = holding.ended or Ended.FAILED
        if ended is not None:
            self._report(delivery, ended, holding, begun_s)

    def no_answer(self, op: str) -> None:
        """Count a request to the ledger that got no answer. Counts are sent later."""
        self.tally.no_answer("ledger", op)
        self.flush.put_off()

    def unrun(self, delivery: Delivery, ended: Ended) -> None:
        """Report a delivery that ended outside of the runner: revoked, or expired."""
        self._report(delivery, ended, None, 0.0)

    def unread(self, task: str, message: str, ended: Ended) -> None:
        """Report a delivery whose keys are unknown, for example because its arguments are wrong."""
        no_keys = Delivery(
            keys=(), work=None, task=task, message=MessageRef(message), policy=_NO_POLICY
        )
        self._report(no_keys, ended, None, 0.0)

    # -- processes --------------------------------------------------------------------------------

    def note_gap(self) -> None:
        """Count that a process was killed: what it had counted, and not yet sent, is lost."""
        self.tally.count("", COUNTS_LOST.what())

    def hand_over(self, send: Callable[[bytes], object]) -> None:
        """Hand all counts to the process that forked this one, in lines of at most 4,096 bytes.

        If `send` raises OSError, the ledger gets these counts instead.
        """
        rows, happened = self.tally.drain()
        parts = [[row.task, row.what, row.n] for row in rows]
        parts += [
            [noted.what.value, *(getattr(noted, each) for each in _NOTED)] for noted in happened
        ]
        for line in _lines(parts):
            try:
                send(line)
            except OSError as error:
                logger.debug("counts were not handed over: %s", error)
                self.take_over(line)
        if not self.tally.is_empty:
            self.flush.hand(False)
            self.flush.flush()

    def take_over(self, line: bytes) -> None:
        """Add the counts of one line that a forked process has handed over."""
        rows, happened = [], []
        for each in json.loads(line):
            if len(each) == 3:  # a count
                rows.append(Count(*each))
            else:
                what, *values = each
                known = dict(zip(_NOTED, values, strict=True))
                happened.append(Noted(what=Happened(what), **known))
        self.tally.put_back(rows, happened)

    # -- one delivery -----------------------------------------------------------------------------

    def _report(
        self, delivery: Delivery, ended: Ended, holding: Holding | None, begun_s: float
    ) -> None:
        try:
            self._count(delivery, ended, holding, begun_s)
        except BaseException as error:
            if not is_time_limit(error):
                raise
            logger.debug("%s: counting was interrupted", delivery.key, exc_info=True)

    def _count(
        self, delivery: Delivery, ended: Ended, holding: Holding | None, begun_s: float
    ) -> None:
        waited_s, held_s = 0.0, -1.0
        attempt = fence = 0
        if holding is not None:
            lease = holding.tracked.lease
            if lease.is_parents:
                return
            taken_s = lease.taken_at_s
            held_s, fence = self._clock.monotonic_s() - taken_s, lease.fence
            published_s = delivery.published_at_s
            if published_s is None:
                waited_s = taken_s - begun_s
            else:
                waited_s = self._clock.wall_s() - held_s - published_s
            waited_s = max(0.0, waited_s)
            attempt = 1 if holding.claimed is None else holding.claimed.attempt
        tracing.ended(delivery, ended)
        tally, flush = self.tally, self.flush
        tally.delivery(delivery.task, ended, waited_s, held_s)
        if ended in _HAPPENED and delivery.keys:
            self._note(delivery, ended)
        if self._events.hears(Delivered.level):
            self._events.emit(
                Delivered(
                    key=delivery.key,
                    task=delivery.task,
                    message=delivery.message.id,
                    work=delivery.work or "",
                    outcome=ended,
                    waited_s=waited_s,
                    held_s=max(0.0, held_s),
                    attempt=attempt,
                    fence=fence,
                )
            )
        if tally.kept:
            # Names that a program makes up would fill the memory, and the table.
            if delivery.task not in self._tasks and len(self._tasks) < TASKS:
                self._tasks.add(delivery.task)
                flush.begin([delivery.task])
            if flush.is_due:
                flush.flush()
            else:
                flush.watch()

    def _note(self, delivery: Delivery, ended: Ended) -> None:
        self.tally.happened(
            Noted(
                what=_HAPPENED[ended],
                key=delivery.key,
                task=delivery.task,
                work=delivery.work,
                detail=f"{ended}: message {shown_id(delivery.message.id)}",
            )
        )


def _lines(parts: list[list[Any]]) -> Iterator[bytes]:
    """Yield the parts as lines of JSON, each short enough to be written to a pipe at once."""
    texts: list[str] = []
    size = 2
    for part in parts:
        text = json.dumps(part, ensure_ascii=False)
        length = len(text.encode("utf-8", "replace")) + 1
        if texts and size + length > _MOST_BYTES:
            yield _line(texts)
            texts, size = [], 2
        texts.append(text)
        size += length
    if texts:
        yield _line(texts)


def _line(texts: list[str]) -> bytes:
    return f"[{','.join(texts)}]\n".encode("utf-8", "replace")
