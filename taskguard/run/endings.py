"""Ends a delivery whose body lost its lease, failed, or was ended by a shutdown or a crash.

Guarantees: the claim is ended, and the lease released, before the queue learns of the outcome.
StaleTokenError and LeaseLostError are never raised if the delivery can be deferred. Work whose
COMMIT was interrupted is reported as completed only if the record names this very holder.

Read next: `holding.py` for how a claim is ended.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, NoReturn

from taskguard.clock import Clock
from taskguard.errors import (
    BodyCancelledError,
    StaleTokenError,
    TaskguardError,
    TransactionFailedError,
)
from taskguard.events import Events, Failed, StaleRefused
from taskguard.ledger.connections.errors import NoConnectionError
from taskguard.log_fields import said_of
from taskguard.model.claims import Answer, Claim
from taskguard.model.delivery import Codec, Completed, Delivery, Outcome
from taskguard.model.history import Happened
from taskguard.model.outcomes import Ended
from taskguard.model.states import Decision, State
from taskguard.run.answers import Answers
from taskguard.run.counting import Counting
from taskguard.run.deferrals import NO_LEDGER, Deferrals
from taskguard.run.holding import Holding, Releases
from taskguard.run.late import uncount_crash
from taskguard.run.shutdown import is_cancellation, is_shutdown

if TYPE_CHECKING:
    from taskguard.ledger.ports import Ledger

__all__ = ["Endings", "end_child"]

logger = logging.getLogger("taskguard")

# Maximum number of deliveries in a row whose body ran, and whose transaction the database ended. A
# body that idles in its transaction loses it each time. Without a maximum that would stay unseen.
_MOST_ROUNDS = 4
_ERROR_CHARS = 500


class Endings:
    """Ends deliveries whose bodies ran, and did not complete their work."""

    def __init__(
        self,
        *,
        ledger: Ledger | None,
        releases: Releases,
        answers: Answers,
        deferrals: Deferrals,
        codec: Codec,
        events: Events,
        clock: Clock,
        counting: Counting,
    ) -> None:
        self._ledger = ledger
        self._releases = releases
        self._answers = answers
        self._deferrals = deferrals
        self._codec = codec
        self._events = events
        self._clock = clock
        self._counting = counting

    def after_loss(self, holding: Holding, error: TaskguardError) -> Outcome:
        """After a lost lease or commit: answer from the record, or defer the delivery."""
        delivery, lease = holding.delivery, holding.tracked.lease
        holding.ended = Ended.STALE
        if isinstance(error, StaleTokenError):
            held_s = self._held_s(holding)
            self._counting.tally.stale_commit(delivery.task)
            attempt = holding.attempt.number
            self._events.about(
                delivery, StaleRefused, fence=lease.fence, attempt=attempt, held_s=held_s
            )
        stale = isinstance(error, StaleTokenError)
        happened = Happened.STALE if stale else Happened.LEASE_LOST
        self._releases.end_claim(
            holding, lambda ledger, claim: uncount_crash(ledger, claim, happened=happened)
        )
        self._releases.release(holding)
        if self._ledger is not None and holding.claimed is not None and delivery.work is not None:
            try:
                found = self._peek(self._ledger, holding)
            except NO_LEDGER as unavailable:
                return self._deferrals.defer_or_raise(delivery, unavailable)
            if found is not None:
                return self._answers.answer(delivery, found)
        return self._deferrals.defer_or_raise(delivery, error)

    def after_trouble(self, holding: Holding, error: TaskguardError) -> Outcome:
        """After an error of the database: defer the delivery. After several of these, FAILED."""
        delivery, attempt = holding.delivery, holding.attempt
        found: list[State | None] = []

        def end(ledger: Ledger, claim: Claim) -> None:
            # Other threads have all connections, and will give them back.
            crowded = isinstance(error, NoConnectionError)
            if delivery.queue is None or claim.work is None or crowded:
                ledger.give_back(claim)  # a plain call gets the error; the round is not counted
            else:
                reason = f"{type(error).__name__}: {error}"[:_ERROR_CHARS]
                again_in_s = delivery.queue.retries_in_s(error)
                found.append(
                    ledger.end_round(claim, reason, most=_MOST_ROUNDS, again_in_s=again_in_s)
                )
                if found == [State.FAILED]:
                    _ask_queue(delivery, claim)

        self._releases.end_claim(holding, end)
        self._releases.release(holding)
        if found != [State.FAILED]:
            holding.ended = Ended.UNAVAILABLE if delivery.queue is None else None
            return self._deferrals.defer_or_raise(delivery, error)
        self._emit_failed(holding, TransactionFailedError.__name__)
        raise TransactionFailedError(
            f"{delivery.task} {delivery.key}: the body ran in {_MOST_ROUNDS} deliveries in a row, "
            f"and each time its transaction was not committed. The last error: {error} The work is "
            "FAILED. Fix what ends the transaction, then let it run again: taskguard work "
            f"requeue {attempt.work!r} --reason …",
            key=delivery.key,
            fence=holding.tracked.lease.fence,
        ) from error

    def after_failure(self, holding: Holding, error: BaseException) -> Outcome | None:
        """After an exception: FAILED, unless DONE is committed. The queue gets the exception.

        An exception between COMMIT and its answer, for example a time limit, is no failure. If the
        work was superseded meanwhile, an exception of its body is no failure either.
        """
        delivery, attempt = holding.delivery, holding.attempt
        if attempt.completed:
            return None
        text = _error_text(error)
        again_in_s = None if delivery.queue is None else delivery.queue.retries_in_s(error)
        ended: list[bool] = []

        def end(ledger: Ledger, claim: Claim) -> None:
            ended.append(ledger.fail(claim, text, again_in_s=again_in_s))
            if ended[0]:
                _ask_queue(delivery, claim)

        self._releases.end_claim(holding, end)
        if ended == [False] and attempt.may_have_committed(error):
            done = self._committed_unheard(holding)
            if done is not None:
                return done
        obeyed = isinstance(error, delivery.orders)
        if ended == [False] and delivery.policy.newest is not None and not obeyed:
            outdated = self._superseded(holding)
            if outdated is not None:
                return outdated
        self._emit_failed(holding, type(error).__name__)
        return None

    def _committed_unheard(self, holding: Holding) -> Completed | None:
        """Return the outcome if the record names this holder as the one of DONE. Else None."""
        attempt, lease = holding.attempt, holding.tracked.lease
        assert self._ledger is not None  # noqa: S101
        try:
            found = self._peek(self._ledger, holding)
        except TaskguardError as error:
            logger.warning(
                "%s: whether it is DONE got no answer: %s",
                lease.key,
                error,
                extra=_said_of(holding),
            )
            return None
        if found is None or found.decision is not Decision.DONE or found.owner != lease.owner:
            return None
        text = found.result_json
        attempt.answered = text is not None
        attempt.note_committed_unheard()
        return Completed(None if text is None else self._codec.loads(text))

    def _superseded(self, holding: Holding) -> Outcome | None:
        """Return the outcome if a newer message superseded the work. Else None."""
        delivery = holding.delivery
        assert self._ledger is not None  # noqa: S101
        try:
            found = self._peek(self._ledger, holding)
        except TaskguardError as error:
            logger.debug("%s: whether it was superseded got no answer: %s", delivery.key, error)
            return None
        if found is None or found.decision is not Decision.OUTDATED:
            return None
        self._releases.release(holding)
        return self._answers.answer(delivery, found)

    def _peek(self, ledger: Ledger, holding: Holding) -> Answer | None:
        """Return the record's answer to this holder, or None."""
        owner = holding.tracked.lease.owner
        found = ledger.peek(holding.delivery.request(owner, clock=self._clock))
        return found if isinstance(found, Answer) else None

    def after_exit(self, holding: Holding, error: BaseException) -> None:
        """After a BaseException: a shutdown gives the work back, any other exit is a crash.

        The work of a body that was cancelled before it began is given back, too.

        A hard time limit looks like a shutdown, but counts as a crash, because the next body would
        exceed it, too. With a queue, a cancelled body has failed. A queue would take its
        CancelledError for the end of the worker, and deliver this message again and again.
        """
        delivery = holding.delivery
        if holding.attempt.never_began:
            self._give_back(holding)
        elif is_cancellation(error):
            self.after_failure(holding, error)
            if delivery.queue is not None:
                raise BodyCancelledError(
                    f"The body of {delivery.task} {delivery.key} was cancelled by itself "
                    "(asyncio.CancelledError). Catch that in the body, around its event loop.",
                    key=delivery.key,
                ) from error
        elif holding.attempt.completed:
            return
        elif is_shutdown(error) and delivery.timed_out is not None and delivery.timed_out():
            self._after_crash(holding, error, timed_out=True)
        elif is_shutdown(error):
            # After a revoke and GreenletExit, too: another worker does the work at once.
            self._give_back(holding)
        else:
            self._after_crash(holding, error)

    def _give_back(self, holding: Holding) -> None:
        holding.ended = Ended.INTERRUPTED
        self._releases.end_claim(holding, lambda ledger, claim: ledger.give_back(claim))

    def _after_crash(
        self, holding: Holding, error: BaseException, *, timed_out: bool = False
    ) -> None:
        """Count a crash, because the body ends its process, and would end the next one's."""
        delivery = holding.delivery
        text = "the hard time limit was over" if timed_out else _error_text(error)
        # If the ledger does not answer, the claim expires, which counts as a crash, too.
        self._releases.end_claim(
            holding, lambda ledger, claim: ledger.crash(claim, text), late=False
        )
        self._emit_failed(holding, type(error).__name__)
        if timed_out:
            logger.warning(
                "%s %s: the hard time limit was over, and the queue ends this process: that counts "
                "as a crash. Give the task a longer limit, or a soft one that its body can catch.",
                delivery.task,
                delivery.key,
                extra=_said_of(holding),
            )
            return
        logger.warning(
            "%s %s: the body raised %s. No signal told this process to stop, so it counts as a "
            "crash. Let the body return, or raise an Exception.",
            delivery.task,
            delivery.key,
            text,
            extra=_said_of(holding),
        )

    def _emit_failed(self, holding: Holding, kind: str) -> None:
        fence, held_s = holding.tracked.lease.fence, self._held_s(holding)
        attempt = holding.attempt.number
        self._events.about(
            holding.delivery, Failed, fence=fence, attempt=attempt, error=kind, held_s=held_s
        )

    def _held_s(self, holding: Holding) -> float:
        return self._clock.monotonic_s() - holding.tracked.lease.taken_at_s


def _said_of(holding: Holding) -> dict[str, Any]:
    fence, attempt = holding.tracked.lease.fence, holding.attempt.number
    return said_of(holding.delivery, fence=fence, attempt=attempt)


def _ask_queue(delivery: Delivery, claim: Claim) -> None:
    """Let the queue report whether FAILED work that keeps its position is retried."""
    if claim.request.strict and delivery.parking is not None:
        delivery.parking.failed(claim)


def _error_text(error: BaseException) -> str:
    """Return the text of an error for the record. Its `__str__` may fail or return nothing."""
    name = type(error).__name__
    try:
        said = f"{error}"
    except Exception as failed:  # noqa: BLE001  # code of the user's
        said = f"(str() of it raised {type(failed).__name__})"
    return f"{name}: {said}"[:_ERROR_CHARS]


def end_child(delivery: Delivery, error: BaseException | None) -> NoReturn:
    """End a process that the body forked, if it leaves the body.

    Only the parent reports a result, and takes the next message.
    """
    status = 0 if error is None else 1
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    logger.log(
        logging.INFO if isinstance(error, SystemExit) else logging.ERROR,
        "%s %s: a process that the body forked left the body, and ends with status %d: the work "
        "is its parent's. Leave such a process by os._exit(), or start it by multiprocessing.",
        delivery.task,
        delivery.key,
        status,
        exc_info=error if isinstance(error, Exception) else None,
        extra=said_of(delivery),
    )
    os._exit(status & 0xFF)
