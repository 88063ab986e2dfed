"""The way of one delivery: admit, claim, body, complete, acknowledge. Read it from top to bottom.

Guarantees: a body runs only under a lease that the ledger (or, with locks only, the lock server)
granted to this very attempt. "Completed" is reported only for a committed DONE. A delivery whose
body does not run is answered from the record, parked, superseded, or deferred. Before a deferral is
reported, a live copy was published. StaleTokenError and LeaseLostError never leave this module if
the delivery can be deferred, even if the body swallows them.

Does not guarantee exactly one run of the body: at least one, and one commit.

Read next: `admission.py` and `claiming.py` grant a key. `refusals.py` has deliveries without a key.
In `endings.py` bodies fail, lose their lease, or are interrupted. `watchdog.py` renews leases, and
`parking.py` has the lines.
"""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from taskguard.clock import SYSTEM_CLOCK, Clock
from taskguard.errors import (
    LeaseLostError,
    ResultError,
    StaleTokenError,
    TaskguardError,
    TransactionRetryError,
)
from taskguard.events import Events
from taskguard.ledger.connections.errors import ConnectionBrokenError, LockTimeoutError
from taskguard.locks.base import LockProvider
from taskguard.log_fields import said_of
from taskguard.model.claims import Claim, ClaimRequest
from taskguard.model.delivery import Codec, Completed, Delivery, Outcome, Parked, Parking
from taskguard.run.admission import Admission
from taskguard.run.answers import Answers
from taskguard.run.attempt import Attempt
from taskguard.run.claiming import Admitted, Claiming
from taskguard.run.counting import Counting
from taskguard.run.current import running
from taskguard.run.deferrals import NO_LEDGER, TROUBLE, Deferrals
from taskguard.run.done_elsewhere import DoneElsewhereWarning
from taskguard.run.encoding import JSON, encode
from taskguard.run.endings import Endings, end_child
from taskguard.run.guard import Guard
from taskguard.run.holding import Holding, Releases
from taskguard.run.late import LateReports
from taskguard.run.locking import Locking
from taskguard.run.names import Names
from taskguard.run.parking import Line
from taskguard.run.refusals import Refusals, refuse_reentry, refuse_without_ledger
from taskguard.run.waiting import Waiting
from taskguard.run.watchdog import Watchdog

if TYPE_CHECKING:
    from taskguard.ledger.ports import Counts, Ledger, LineLedger, Workers

__all__ = ["Runner"]

logger = logging.getLogger("taskguard")

# Maximum number of runs of a body under one lease after deadlocks and serialization failures, which
# other writers cause; and, lower, after broken connections.
_BODY_RUNS, _BODY_RUNS_ON_BROKEN = 10, 4
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0
# A null result, stored if duplicates could not learn otherwise that the body has ended.
_NO_RESULT = "null"
_LOST = (StaleTokenError, LeaseLostError)

_Body = Callable[[Guard], Any]


class Runner:
    """Runs deliveries for one lock provider and one ledger; either may be None, not both.

    Thread-safe. After a fork it goes on in the child with no leases.
    """

    def __init__(
        self,
        *,
        locks: LockProvider | None,
        ledger: Ledger | None,
        events: Events | None = None,
        clock: Clock = SYSTEM_CLOCK,
        watchdog: Watchdog | None = None,
        codec: Codec = JSON,
        rng: random.Random | None = None,
    ) -> None:
        self.locks = locks
        self.ledger = ledger
        self.events = events = events or Events()
        self.clock = clock
        self.codec = codec
        self.watchdog = watchdog = watchdog or Watchdog(
            locks=locks, ledger=ledger, events=events, clock=clock
        )
        self.names = names = Names(cast("Workers | None", ledger))
        watchdog.names = names
        self.counting = counting = Counting(
            ledger=cast("Counts | None", ledger), events=events, clock=clock
        )
        watchdog.tally = tally = counting.tally
        self._rng = rng = rng or random.SystemRandom()
        # Used only for deliveries that can be parked, which need a ledger that keeps lines.
        self.line = line = Line(locks, cast("LineLedger", ledger), events)
        self._late = LateReports(ledger)
        self._claiming = claiming = (
            None
            if ledger is None
            else Claiming(
                ledger,
                locks=locks,
                events=events,
                clock=clock,
                watchdog=watchdog,
                late=self._late,
                names=names,
                tally=tally,
            )
        )
        self._admission = Admission(
            locks=locks,
            claiming=claiming,
            events=events,
            clock=clock,
            rng=rng,
            names=names,
            tally=tally,
        )
        self._deferrals = deferrals = Deferrals(ledger=ledger, events=events, clock=clock, rng=rng)
        answers = Answers(
            line=line, deferrals=deferrals, codec=codec, events=events, clock=clock, names=names
        )
        self._refusals = Refusals(
            claiming=claiming,
            line=line,
            answers=answers,
            deferrals=deferrals,
            events=events,
            clock=clock,
            names=names,
        )
        self._releases = Releases(
            ledger=ledger, watchdog=watchdog, line=line, late=self._late, events=events, clock=clock
        )
        self._endings = Endings(
            ledger=ledger,
            releases=self._releases,
            answers=answers,
            deferrals=deferrals,
            codec=codec,
            events=events,
            clock=clock,
            counting=counting,
        )
        self._elsewhere = DoneElsewhereWarning(ledger=ledger, events=events, clock=clock)
        self.locking = Locking(
            locks=locks,
            ledger=ledger,
            watchdog=watchdog,
            releases=self._releases,
            enter=self._enter,
            holding=self._holding,
            clock=clock,
        )

    # -- the way of one delivery --------------------------------------------------------------

    def deliver(
        self, delivery: Delivery, body: _Body, *, waiting: Waiting | None = None
    ) -> Outcome:
        """Run `body` if this delivery gets its key, and return the outcome for the queue.

        Raises the body's exceptions, KeyBusyError, WorkDeadError, WorkRevokedError,
        MessageTooOldError, FingerprintMismatchError, RowMissingError and RowIneligibleError. If it
        cannot be deferred, also LedgerUnavailableError, LeaseLostError and StaleTokenError.

        `waiting`: the wait of a caller that may give up.
        """
        begun_s, holding = self.clock.monotonic_s(), None
        try:
            refuse_reentry(delivery)
            if self.ledger is None:
                refuse_without_ledger(delivery)
            if self._late.pending:
                self._late.report()
            found = self._admit(delivery, waiting)
            if isinstance(found, Admitted):
                holding = self._holding(delivery, found)
                found = self._run(holding, body)
        except BaseException as error:
            self.counting.raised(delivery, error, holding, begun_s)
            raise
        self.counting.returned(delivery, found, holding, begun_s)
        return found

    def _admit(self, delivery: Delivery, waiting: Waiting | None) -> Admitted | Outcome:
        """Acquire and claim the key, or return the outcome of a delivery without it.

        A delivery that is refused may have held the key briefly. Messages that were parked in that
        moment rely on it, so it promotes the next message.
        """
        found: Admitted | Outcome | None = None
        try:
            found = self._enter(delivery, waiting)
        except NO_LEDGER as error:
            if not isinstance(error, LockTimeoutError):  # that is an answer
                self.counting.flush.put_off()
            logger.warning(
                "%s %s deferred: %s", delivery.task, delivery.key, error, extra=said_of(delivery)
            )
            found = self._deferrals.defer_or_raise(delivery, error)
        finally:
            if delivery.parking is not None and not isinstance(found, Admitted | Parked):
                self.line.promote_next(delivery)
        return found

    def _enter(self, delivery: Delivery, waiting: Waiting | None) -> Admitted | Outcome:
        found = self._admission.admit(delivery, waiting)
        return found if isinstance(found, Admitted) else self._refusals.settle(delivery, found)

    def _run(self, holding: Holding, body: _Body) -> Outcome:
        """Run the body under the lease, complete the work, and give back what is held."""
        delivery, tracked, attempt = holding.delivery, holding.tracked, holding.attempt
        try:
            self.watchdog.track(tracked)
            self._begin(holding)
            return Completed(self._body(holding, body))
        except _LOST as error:
            if tracked.lease.is_parents or (attempt.completed and error.key != attempt.key):
                raise  # in a forked child, or the error of a guarded function that the body called
            return self._endings.after_loss(holding, error)
        except TROUBLE as error:
            if attempt.completed:
                raise
            return self._endings.after_trouble(holding, error)
        except Exception as error:
            ended = self._endings.after_failure(holding, error)
            if ended is not None:
                return ended
            raise
        except BaseException as error:
            self._endings.after_exit(holding, error)
            raise
        finally:
            self._end_answer(holding)
            self._releases.release(holding)
            if self._late.pending:  # the ledger gave no answer
                self.counting.flush.put_off()
            if delivery.parking is not None:
                claimed = holding.claimed
                known = claimed is not None and (claimed.waited or claimed.attempt > 1)
                self.line.released(delivery, holding.tracked, hint=holding.hint, known=known)

    def _holding(self, delivery: Delivery, admitted: Admitted) -> Holding:
        tracked, claimed = admitted.tracked, admitted.claimed
        completed = functools.partial(self._releases.note_completed, delivery, tracked, claimed)
        attempt = Attempt(
            lease=tracked.lease,
            delivery=delivery,
            ledger=self.ledger,
            claimed=claimed,
            codec=self.codec,
            on_completed=completed,
            interrupt_by=tracked.interrupt_by,
        )
        return Holding(delivery, tracked, claimed, attempt)

    def _begin(self, holding: Holding) -> None:
        """Do what follows from the claim alone, before the body runs."""
        delivery, claimed = holding.delivery, holding.claimed
        if claimed is not None and claimed.replaced:
            self.line.send_superseded(delivery, claimed.replaced)
        if delivery.parking is not None:
            self.line.begun(delivery)
        if delivery.redelivered and claimed is not None:
            self._elsewhere.warn(delivery, claimed)

    # -- the body -----------------------------------------------------------------------------

    def _body(self, holding: Holding, body: _Body) -> Any:
        """Return the body's value once DONE is committed. Run the body again after a deadlock."""
        attempt, broken = holding.attempt, 0
        for run in range(1, _BODY_RUNS + 1):
            try:
                with running(attempt) as guard, holding.span("body"):
                    value = self._value(holding, guard, body)
                attempt.refuse_end()
                return self._complete(holding, value)
            except TransactionRetryError as error:
                broken += isinstance(error, ConnectionBrokenError)
                if run == _BODY_RUNS or broken == _BODY_RUNS_ON_BROKEN or attempt.completed:
                    raise
                attempt.forget()
                pause_s = min(_FIRST_PAUSE_S * 2.0 ** (run - 1), _LONGEST_PAUSE_S)
                self.clock.sleep(self._rng.uniform(0.1, 1.0) * pause_s)
        raise AssertionError("unreachable")

    def _value(self, holding: Holding, guard: Guard, body: _Body) -> Any:
        """Return the body's value. If the ledger ended its transaction, raise the ledger's error.

        The body may raise another error because of it: its own, a group, or an error that only
        follows from it. To give up instead, a body commits another transaction first.
        """
        try:
            return self._call(holding, guard, body)
        except Exception as error:
            said = holding.attempt.said_by_ledger
            obeyed = isinstance(error, holding.delivery.orders)
            if error is said or obeyed or not isinstance(said, _LOST + TROUBLE):
                raise
            raise said from error

    def _call(self, holding: Holding, guard: Guard, body: _Body) -> Any:
        delivery, tracked, attempt = holding.delivery, holding.tracked, holding.attempt
        tracked.enter_body()
        error: BaseException | None = None
        try:
            if not delivery.policy.atomic:
                return body(guard)
            with guard.transaction():
                value = body(guard)
                if not attempt.has_result:
                    attempt.result = value
                return value
        except BaseException as raised:
            error = raised
            raise
        finally:
            tracked.leave_body()
            if tracked.lease.is_parents and delivery.queue is not None:
                end_child(delivery, error)

    # -- complete -----------------------------------------------------------------------------

    def _complete(self, holding: Holding, value: Any) -> Any:
        """Commit DONE if the body did not, and return its value."""
        delivery, tracked, attempt = holding.delivery, holding.tracked, holding.attempt
        if tracked.lease.is_parents:
            tracked.lease.check()  # raises, because a forked child holds no work
        value = attempt.result if attempt.has_result else value
        claim = attempt.claim
        if self.ledger is None or claim is None:
            # A body that has ended is not run again, even if the lease was lost meanwhile: with
            # locks only, nothing could refuse the effects of the second run.
            return value
        if not attempt.completed:
            text = self._storable(delivery, value)
            if text is None and not tracked.at_lock_server:
                text = _NO_RESULT
            requested_at_s = self.clock.monotonic_s()
            try:
                with holding.span("complete"):
                    self.ledger.complete_alone(claim, text)
            except NO_LEDGER:
                self.counting.no_answer("complete")
                raise
            took_s = self.clock.monotonic_s() - requested_at_s
            self.counting.tally.answer("ledger", "complete", took_s)
            attempt.answered = True
            attempt.note_completed()
        elif value is not None and not attempt.has_result:
            text = self._storable(delivery, value)
            if text is not None:
                self._store_late(delivery, claim, text)
                attempt.answered = True
        return value

    def _end_answer(self, holding: Holding) -> None:
        """Record that no result will come for a body that committed DONE and has ended.

        With a lock server, duplicates see that by the lease. Without one they wait for the record.
        """
        attempt, tracked = holding.attempt, holding.tracked
        claim = attempt.claim
        known = attempt.answered or attempt.has_result or tracked.at_lock_server
        if attempt.completed and not known and claim is not None and not tracked.lease.is_parents:
            self._store_late(holding.delivery, claim, _NO_RESULT)

    def _store_late(self, delivery: Delivery, claim: Claim, text: str) -> None:
        assert self.ledger is not None  # noqa: S101
        try:
            self.ledger.store_result(claim, text)
        except TaskguardError as error:
            logger.warning(
                "%s %s: DONE, result not stored: %s",
                delivery.task,
                delivery.key,
                error,
                extra=said_of(delivery),
            )

    def _storable(self, delivery: Delivery, value: Any) -> str | None:
        """Return the value as JSON, or None if it cannot be stored. The work is DONE anyway."""
        if value is None:
            return None
        try:
            return encode(value, self.codec, what="result", key=delivery.key)
        except ResultError as error:
            logger.warning(
                "%s: DONE, but duplicates will get None. %s",
                delivery.task,
                error,
                extra=said_of(delivery),
            )
            return None

    # -- for enqueue(), and for a queue's reports on messages that have a line ------------------

    def request(self, delivery: Delivery) -> ClaimRequest:
        """Return the request of a delivery to the ledger, with an owner that holds nothing."""
        return delivery.request(clock=self.clock)

    def retried(
        self,
        claim: Claim,
        parking: Parking,
        *,
        retries: int,
        call: Mapping[str, Any] | None,
        again: Delivery | None,
        app: str,
        in_s: float,
    ) -> None:
        """Note that the queue sends the message of FAILED work again. Never raises.

        Args:
            claim: what `Parking.failed()` was given.
            parking: how to send the next message of its line.
            retries: the message's number of retries when it arrives.
            call: how to send the message, as a JSON object. None: unknown.
            again: the next delivery of the message. None: unknown.
            app: the application's namespace.
            in_s: in how many seconds the message arrives.
        """
        self.line.retried(
            claim, parking, retries=retries, call=call, again=again, app=app, in_s=in_s
        )

    def gave_up(self, claim: Claim, parking: Parking, *, retries: int, app: str) -> None:
        """Note that the queue does not send the message of FAILED work again. Never raises."""
        self.line.gave_up(claim, parking, retries=retries, app=app)

    def never_runs(self, delivery: Delivery) -> None:
        """Promote the next message, because this one was revoked or has expired. Never raises."""
        self.line.left(delivery)
