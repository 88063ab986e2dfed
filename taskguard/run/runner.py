"""The way of one delivery: admit, claim, body, complete, acknowledge. All branching is here.

Guarantees: a body runs only under a lease that the ledger (or, with locks only, the lock
server) granted to this very attempt; "completed" is reported only for a committed DONE; a
delivery that does not run its body is answered from the record, or put off with a live copy
published first, or superseded by one. StaleTokenError and LeaseLostError never leave here while
the delivery can be put off, even if the body swallows them.

Does not guarantee exactly one run of the body: at least one, and one commit.

Read next: `model/claims.py` for what a claim is, `watchdog.py` for how a lease is kept.
"""

from __future__ import annotations

import functools
import logging
import os
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, cast

from taskguard.clock import SYSTEM_CLOCK, Clock
from taskguard.errors import (
    BodyCancelledError,
    ConfigurationError,
    FingerprintMismatchError,
    KeyAlreadyHeldError,
    KeyBusyError,
    LeaseLostError,
    LedgerSchemaError,
    LedgerUnavailableError,
    MessageTooOldError,
    ResultError,
    RowIneligibleError,
    RowMissingError,
    StaleTokenError,
    SupersededError,
    TaskguardError,
    TransactionFailedError,
    TransactionRetryError,
    WorkDeadError,
    WorkRevokedError,
    WorkStillDeadError,
)
from taskguard.events import Completed as CompletedEvent
from taskguard.events import (
    Dead,
    DoneElsewhere,
    Duplicate,
    Events,
    Failed,
    Released,
    StaleRefused,
    StillDead,
)
from taskguard.events import Deferred as DeferredEvent
from taskguard.ledger.connections.errors import ConnectionBrokenError, NoConnectionError
from taskguard.locks.base import LockProvider
from taskguard.model.claims import Answer, Busy, Claim, Claimed, ClaimRequest
from taskguard.model.delivery import (
    Answered,
    Codec,
    Completed,
    Deferred,
    Delivery,
    Dropped,
    Outcome,
    Parked,
    Parking,
)
from taskguard.model.lease import Lease, Owner
from taskguard.model.states import Decision, State
from taskguard.run.admission import Admission, Admitted
from taskguard.run.guard import JSON, Guard, encode, holders_around, running
from taskguard.run.parking import CALLED_WAIT_S, Line
from taskguard.run.shutdown import is_cancellation, is_shutdown
from taskguard.run.watchdog import TrackedLease, Watchdog

if TYPE_CHECKING:
    from taskguard.ledger.ports import Ledger, LineLedger

__all__ = ["Runner"]

logger = logging.getLogger("taskguard")

# So often a body runs under one lease: after deadlocks and serialization failures, which depend on
# what others write, and, less often, after connections that broke.
_BODY_RUNS, _BODY_RUNS_ON_BROKEN = 10, 4
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0
# Deliveries in a row whose body ran, and whose transaction the database ended while the ledger
# answered: a body that idles in it is ended each time, and nobody would see it.
_MOST_ROUNDS = 4
_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 30.0
_LATE_ANSWER_S = 3_600.0
# Claims whose end got no answer, kept until the ledger answers again.
_MOST_UNREPORTED = 1_000
_ERROR_CHARS = 500
_LOOKING_SHARE = 100
# A null result, stored where duplicates could not tell otherwise that the body has ended.
_NO_RESULT = "null"
# Missing tables are treated as a database that is down: an operator has to fix either.
_NO_LEDGER = (LedgerUnavailableError, LedgerSchemaError)
_LOST = (StaleTokenError, LeaseLostError)
_TROUBLE = (*_NO_LEDGER, TransactionRetryError)


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
        self.events = events or Events()
        self.clock = clock
        self.codec = codec
        self.watchdog = watchdog or Watchdog(
            locks=locks, ledger=ledger, events=self.events, clock=clock
        )
        self._rng = rng or random.SystemRandom()
        self._looks_again_at_s = 0.0
        self._unreported: deque[Claim] = deque(maxlen=_MOST_UNREPORTED)
        self._admission = Admission(
            locks=locks,
            ledger=ledger,
            events=self.events,
            clock=clock,
            watchdog=self.watchdog,
            rng=self._rng,
        )
        # Asked only of deliveries that can be parked, which want a ledger that keeps lines.
        self.line = Line(locks, cast("LineLedger", ledger), self.events)

    # -- the way of one delivery --------------------------------------------------------------

    def deliver(self, delivery: Delivery, body: Callable[[Guard], Any]) -> Outcome:
        """Run `body` if this delivery is the one to do it, and say what to tell the queue.

        Raises what the body raises; KeyBusyError, WorkDeadError, WorkRevokedError,
        MessageTooOldError, FingerprintMismatchError, RowMissingError and RowIneligibleError; and,
        where the delivery cannot be put off,
        LedgerUnavailableError, LeaseLostError and StaleTokenError.
        """
        _refuse_reentry(delivery)
        if delivery.row is not None and self.ledger is None:
            raise ConfigurationError(
                f"{delivery.task} has row=, and there is no ledger to move it in. Configure the "
                "database of that table as the ledger (TASKGUARD_LEDGER_URL)."
            )
        if delivery.policy.parks and self.ledger is None:
            raise ConfigurationError(
                f'{delivery.task} has busy="{delivery.policy.busy}", and there is no ledger to '
                'wait in. Configure one (TASKGUARD_LEDGER_URL), or say busy="retry".'
            )
        if delivery.bounds is not None and self.ledger is None:
            raise ConfigurationError(
                f"{delivery.task} has limit= or rate=, and there is no ledger to count in. "
                "Configure one (TASKGUARD_LEDGER_URL), or take tg.lock(…, limit=…) in the body."
            )
        self._report_late()
        entered = self._enter_or_look(delivery)
        return self._run(delivery, entered, body) if isinstance(entered, Admitted) else entered

    def _warn_of_done_elsewhere(self, delivery: Delivery, claimed: Claimed | None) -> None:
        """Warn of a message that was delivered before and has done another work of this task.

        The look-up reads every record of the ledger. So it is made only where the queue says that
        the message is redelivered, and takes no more than a hundredth of the time.
        """
        first = claimed is not None and claimed.attempt == 1
        started_s = self.clock.monotonic_s()
        if self.ledger is None or not first:
            return
        if not self.events.hears(DoneElsewhere.level) or started_s < self._looks_again_at_s:
            return
        try:
            other = self.ledger.done_elsewhere(self.request(delivery))
        except TaskguardError as error:
            logger.debug("%s: other work of the message is not known: %s", delivery.key, error)
            other = None
        now_s = self.clock.monotonic_s()
        self._looks_again_at_s = now_s + _LOOKING_SHARE * (now_s - started_s)
        if other is not None:
            self._admission.emit(DoneElsewhere, delivery, work=delivery.work, other=other)

    @contextmanager
    def hold(
        self,
        delivery: Delivery,
        *,
        entered: Callable[[Guard, TrackedLease], object] | None = None,
    ) -> Iterator[Lease]:
        """The plain lock: a lease for the time of a `with` block; `entered` gets what holds it."""
        _refuse_reentry(delivery)
        admitted = self._enter(delivery)
        if not isinstance(admitted, Admitted):
            raise KeyBusyError(f"{delivery.key} is held by another.", key=delivery.key)
        tracked = admitted.tracked
        guard = self._guard(delivery, admitted)
        try:
            self.watchdog.track(tracked)
            with running(guard):
                if entered is not None:
                    entered(guard, tracked)
                yield tracked.lease
        except BaseException:
            # Whatever comes of it: the caller gets the exception that is on its way.
            self._release_lock(delivery, tracked)
            raise
        if not self._release_lock(delivery, tracked):
            raise LeaseLostError(
                f"The lease on {delivery.key} was lost before its block was left: "
                f"{tracked.lease.lost_reason}. What was done in it may have overlapped with "
                "another holder's doing. Call lease.check() in the block before what matters, and "
                "hand lease.fence to what can refuse an older one.",
                key=delivery.key,
                fence=tracked.lease.fence or None,
            )

    def _release_lock(self, delivery: Delivery, tracked: TrackedLease) -> bool:
        """End the plain lock's lease. False if it is known not to have stood until now."""
        lease = tracked.lease
        ran_out = lease.remaining_s <= 0.0
        ended: list[bool] = []
        self._end_claim(tracked, lambda ledger, claim: ended.append(ledger.give_back(claim)))
        released = self._release(delivery, tracked)
        if lease.is_parents:
            return True  # the child of a fork ends nothing, and has lost nothing
        if ran_out:
            self.watchdog.lose(tracked, "it ran out")
        elif ended == [False] or (not tracked.decided_by_ledger and released is False):
            shared = "the lock server no longer knows it"
            self.watchdog.lose(
                tracked, "another holder took it over" if lease.limit == 1 else shared
            )
        return not lease.is_lost

    def request(self, delivery: Delivery) -> ClaimRequest:
        """What a delivery would ask the ledger for, with an owner that holds nothing."""
        return self._admission.request(delivery, Owner("", ""))

    # -- said by the queue, of messages that have a line ----------------------------------------

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
        """The queue sends the message of FAILED work again, to come in `in_s`. Never raises.

        Args:
            claim: what `Parking.failed()` was given.
            parking: how to send the next message of its line.
            retries: the number with which the message comes.
            call: how to send the message again. None: unknown.
            again: its next delivery. None: unknown; the message keeps its position in its line.
            app: the application's namespace.
            in_s: how long after now the message comes.
        """
        self.line.retried(
            claim, parking, retries=retries, call=call, again=again, app=app, in_s=in_s
        )

    def gave_up(self, claim: Claim, parking: Parking, *, retries: int, app: str) -> None:
        """The queue does not send the message of FAILED work again. Never raises."""
        self.line.gave_up(claim, parking, retries=retries, app=app)

    def never_runs(self, delivery: Delivery) -> None:
        """The message was revoked, or has expired: promote the next one. Never raises."""
        self.line.left(delivery)

    # -- enter --------------------------------------------------------------------------------

    def _enter_or_look(self, delivery: Delivery) -> Admitted | Outcome:
        """Who does not run may have had the key for a moment, in which others were parked."""
        entered: Admitted | Outcome | None = None
        try:
            entered = self._enter(delivery)
        except _NO_LEDGER as error:
            logger.warning("%s %s put off: %s", delivery.task, delivery.key, error)
            entered = self._defer_blindly(delivery, error)
        finally:
            if delivery.parking is not None and not isinstance(entered, Admitted | Parked):
                self.line.call_next(delivery)
        return entered

    def _enter(self, delivery: Delivery) -> Admitted | Outcome:
        found = self._admission.ask(delivery, wait_s=_wait_s(delivery))
        return found if isinstance(found, Admitted) else self._heed(delivery, found)

    def _heed(self, delivery: Delivery, found: Answer | Busy) -> Outcome:
        if isinstance(found, Answer):
            return self._answer(delivery, found)
        return self._turn_away(delivery, found)

    # -- not to be run ------------------------------------------------------------------------

    def _answer(self, delivery: Delivery, found: Answer) -> Outcome:
        """The record speaks for this delivery."""
        decision = found.decision
        if decision is Decision.SUPERSEDED:
            by = found.replaced_by
            return self._drop(delivery, "superseded" if by is None else "replaced", by=by)
        if decision is Decision.OUTDATED:
            return self._outdated(delivery, found)
        if decision is Decision.MISMATCH:
            raise self._mismatch(delivery, found)
        if decision in (Decision.MISSING, Decision.INELIGIBLE):
            return self._unfit(delivery, found)
        if decision is Decision.TOO_OLD:
            raise MessageTooOldError(
                f"{delivery.task} {delivery.key}: this message is older than retention_s "
                f"({delivery.policy.retention_s:g} s) and the record of its work may have been "
                "purged, so it may have been done. Check, and send a new message if it was not.",
                key=delivery.key,
            )
        if decision in (Decision.DEAD, Decision.BURY):
            raise self._dead(delivery, found)
        if decision is Decision.REVOKED:
            if delivery.queue is not None:
                return self._drop(delivery, "revoked")
            raise WorkRevokedError(f"{delivery.task} {delivery.key} was revoked.", key=delivery.key)
        self._admission.emit(Duplicate, delivery, reason="done", age_s=found.age_s)
        self._warn_of_late_answer(delivery, found)
        json_text = found.result_json
        value = None if json_text is None else self.codec.loads(json_text)
        return Answered(value, same_message=found.same_message)

    def _outdated(self, delivery: Delivery, found: Answer) -> Outcome:
        """A newer message took its place, so that this one never runs."""
        if delivery.parking is not None:
            self.line.hear(delivery)
        if delivery.queue is not None:
            return self._drop(delivery, "outdated")
        self._admission.emit(Duplicate, delivery, reason="outdated")
        raise SupersededError(
            f"{delivery.task} {delivery.key}: {found.error}. It never runs.", key=delivery.key
        )

    def _unfit(self, delivery: Delivery, found: Answer) -> Outcome:
        """The user's row is missing, or in a state that is not this task's; `row=` says what to do.

        A message is not put off for longer than records are kept.
        """
        row = delivery.row
        assert row is not None  # noqa: S101
        declared, name = row.declared, row.declared.describe(row)
        missing = found.decision is Decision.MISSING
        how = declared.on_missing if missing else declared.on_ineligible
        reason = found.decision.value
        lasting = self.request(delivery).may_create
        if delivery.queue is not None and how == "defer" and lasting:
            state = "is missing" if missing else f"is {found.row_state!r}"
            return self._defer(delivery, self._delay_s(delivery, None), f"{name} {state}")
        if delivery.queue is not None and how == "skip":
            return self._drop(delivery, reason)
        self._admission.emit(Duplicate, delivery, reason=reason)
        if missing:
            raise RowMissingError(
                f"{delivery.task} {delivery.key}: there is no row {name}. Nothing was run. If its "
                'message may come before its row is committed, say on_missing="defer".',
                key=delivery.key,
            )
        raise RowIneligibleError(
            f"{delivery.task} {delivery.key}: {name} is {found.row_state!r}, and this task takes "
            f"it from {declared.new!r} to {declared.done!r}. Nothing was run. If such messages are "
            'to be expected, say on_ineligible="skip", or "defer" if the state will come.',
            key=delivery.key,
            state=found.row_state,
        )

    def _dead(self, delivery: Delivery, found: Answer) -> WorkDeadError:
        """The error of the delivery that made the work DEAD; later ones get WorkStillDeadError."""
        buried = found.decision is Decision.BURY
        if buried:
            self._admission.emit(Dead, delivery, crashes=found.crashes)
        else:
            age_s, crashes = found.age_s, found.crashes
            self._admission.emit(StillDead, delivery, age_s=age_s, crashes=crashes)
        kind = WorkDeadError if buried else WorkStillDeadError
        return kind(
            f"{delivery.task} {delivery.key} is DEAD: {found.crashes} holders vanished "
            f"while they ran it{f' (the last: {found.error})' if found.error else ''}. Find out "
            "why it kills its workers, then let it run again: "
            f"taskguard work requeue {(found.recorded_as or delivery.work)!r} --reason …",
            key=delivery.key,
            crashes=found.crashes,
        )

    def _mismatch(self, delivery: Delivery, found: Answer) -> FingerprintMismatchError:
        self._admission.emit(Duplicate, delivery, reason="mismatch")
        work = found.recorded_as or delivery.work
        return FingerprintMismatchError(
            f"{delivery.task} {delivery.key}: another message asked for this work with other "
            "arguments (the task's fingerprint= differs). Nothing was run. If it is other work, "
            "name it by once_per=. If these arguments are the right ones and the work failed, "
            f"taskguard work requeue {work!r} --reason …, and send this message again.",
            key=delivery.key,
        )

    def _warn_of_late_answer(self, delivery: Delivery, found: Answer) -> None:
        late = found.age_s > _LATE_ANSWER_S and not found.same_message
        if late and not delivery.by_message:
            logger.warning(
                "%s %s: a new message was answered with a result that is %.1f h old. If each "
                'message is work of its own, say once_per="message".',
                delivery.task,
                delivery.key,
                found.age_s / 3_600,
            )

    def _drop(self, delivery: Delivery, reason: str, by: str | None = None) -> Dropped:
        self._admission.emit(Duplicate, delivery, reason=reason)
        return Dropped(reason, by)

    def _drop_old(self, delivery: Delivery, ledger: Ledger) -> Dropped:
        """Drop a message whose number is lower than one on record: an old copy, or a replaced call.

        Without an answer it counts as an old copy, whose caller hears from the other one.
        """
        by = None
        try:
            found = ledger.peek(self.request(delivery))
            by = found.replaced_by if isinstance(found, Answer) else None
        except TaskguardError as error:
            logger.debug("%s: whether its call was replaced got no answer: %s", delivery.key, error)
        return self._drop(delivery, "superseded" if by is None else "replaced", by=by)

    def _turn_away(self, delivery: Delivery, busy: Busy) -> Outcome:
        """The key stays taken: `busy=` decides, but deliveries of started work are put off."""
        untouched = not busy.same_work and not busy.started
        if not busy.same_work:
            parked = self._park(delivery, busy)
            if parked is not None:
                return parked
        if busy.unread:
            return self._heed(delivery, self._admission.read(delivery, busy))
        if delivery.queue is not None and not (
            untouched and delivery.policy.busy in ("skip", "raise")
        ):
            reason = "the same work is in progress" if busy.same_work else "the key is taken"
            if busy.too_early:
                reason = f"its rate is {delivery.policy.rate}"
                return self._defer(delivery, self._until_start_s(delivery, busy), reason)
            return self._defer(delivery, self._delay_s(delivery, busy.retry_after_s), reason)
        if untouched and delivery.policy.busy == "skip":
            return self._drop(delivery, "skipped")
        holders = holders_around(delivery.keys) if busy.same_work else []
        raise _already_held(delivery, holders[0]) if holders else _busy_error(delivery, busy)

    def _park(self, delivery: Delivery, busy: Busy) -> Outcome | None:
        """Keep the message in the ledger until the key is free; None if it cannot be kept there."""
        if delivery.parking is None:
            return None
        request = self.request(delivery)
        try:
            found = self.line.park(delivery, request, busy)
            if isinstance(found, Answer):
                return self._answer(delivery, found)
            if found:
                return Parked()
        except TransactionRetryError as error:
            logger.debug("%s is put off, not parked: %s", delivery.key, error)
        return None

    # -- put off ------------------------------------------------------------------------------

    def _delay_s(self, delivery: Delivery, retry_after_s: float | None) -> float:
        """Doubles from half a second, with jitter; no longer than the other lease lasts."""
        doubled_s = _FIRST_DELAY_S * 2.0 ** min(delivery.message.deferrals, 10)
        delay_s = min(doubled_s, _MAX_DELAY_S) * self._rng.uniform(0.5, 1.0)
        if retry_after_s is not None:
            delay_s = min(delay_s, retry_after_s + self._rng.uniform(0.0, 0.25))
        return min(delay_s, delivery.queue.max_delay_s if delivery.queue else delay_s)

    def _until_start_s(self, delivery: Delivery, busy: Busy) -> float:
        """Until its rate allows a start; later where it was put off often, for others come, too."""
        assert delivery.queue is not None  # noqa: S101
        after_s = busy.retry_after_s or 0.0
        if delivery.message.deferrals:
            after_s = max(after_s, self._delay_s(delivery, None))
        return min(after_s, delivery.queue.max_delay_s)

    def _defer(self, delivery: Delivery, delay_s: float, reason: str) -> Outcome:
        """Publish the message again, then record that; only then is this delivery acknowledged."""
        queue = delivery.queue
        assert queue is not None  # noqa: S101
        deferrals = delivery.message.deferrals + 1
        published = False

        def publish(number: int) -> None:
            nonlocal published
            queue.publish_again(number, delay_s)
            published = True

        try:
            if self.ledger is None or delivery.work is None or not queue.new_message_per_deferral:
                publish(deferrals)
            elif not self.ledger.defer(self.request(delivery), publish):
                return self._drop_old(delivery, self.ledger)
        except _TROUBLE:
            if not published:
                publish(deferrals)
        self._admission.emit(
            DeferredEvent, delivery, reason=reason, delay_s=delay_s, deferrals=deferrals
        )
        return Deferred(delay_s, deferrals)

    def _defer_blindly(self, delivery: Delivery, error: TaskguardError) -> Outcome:
        """Put a delivery off while the ledger gives no answer: nothing runs without it."""
        if delivery.queue is None:
            raise error
        return self._defer(delivery, self._delay_s(delivery, None), str(error))

    # -- the body -----------------------------------------------------------------------------

    def _run(self, delivery: Delivery, admitted: Admitted, body: Callable[[Guard], Any]) -> Outcome:
        tracked = admitted.tracked
        guard = self._guard(delivery, admitted)
        try:
            self.watchdog.track(tracked)
            if admitted.claimed is not None and admitted.claimed.replaced:
                self.line.tell(delivery, admitted.claimed.replaced)
            if delivery.parking is not None and _lets_more_in(delivery):
                self.line.call_next(delivery)
            if delivery.redelivered:
                self._warn_of_done_elsewhere(delivery, admitted.claimed)
            return Completed(self._body(delivery, tracked, guard, body))
        except _LOST as error:
            if tracked.lease.is_parents or (guard.completed and error.key != guard.key):
                raise  # in a forked child, or the error of a guarded function that the body called
            return self._after_loss(delivery, tracked, guard, error)
        except _TROUBLE as error:
            if guard.completed:
                raise
            return self._after_trouble(delivery, tracked, error)
        except Exception as error:
            ended = self._after_failure(delivery, tracked, guard, error)
            if ended is not None:
                return ended
            raise
        except BaseException as error:
            self._after_exit(delivery, tracked, guard, error)
            raise
        finally:
            self._end_answer(delivery, tracked, guard)
            self._release(delivery, tracked)
            if delivery.parking is not None:
                claimed = admitted.claimed
                known = claimed is not None and (claimed.waited or claimed.attempt > 1)
                self.line.released(delivery, hint=tracked.hint, known=known)

    def _body(
        self, delivery: Delivery, tracked: TrackedLease, guard: Guard, body: Callable[[Guard], Any]
    ) -> Any:
        """The body's value once DONE is committed; run again after a deadlock."""
        broken = 0
        for run in range(1, _BODY_RUNS + 1):
            try:
                with running(guard):
                    value = self._value(delivery, tracked, guard, body)
                guard.refuse_end()
                return self._complete(delivery, tracked, guard, value)
            except TransactionRetryError as error:
                broken += isinstance(error, ConnectionBrokenError)
                if run == _BODY_RUNS or broken == _BODY_RUNS_ON_BROKEN or guard.completed:
                    raise
                guard.forget_attempt()
                pause_s = min(_FIRST_PAUSE_S * 2.0 ** (run - 1), _LONGEST_PAUSE_S)
                self.clock.sleep(self._rng.uniform(0.1, 1.0) * pause_s)
        raise AssertionError("unreachable")

    def _value(
        self, delivery: Delivery, tracked: TrackedLease, guard: Guard, body: Callable[[Guard], Any]
    ) -> Any:
        """What the body returns. If the ledger ended its transaction, the ledger's error is raised.

        That holds whatever error the body raises from it: one of its own, a group, or an error that
        only follows from it. A body that means to give up commits another transaction first.
        """
        try:
            return self._call(delivery, tracked, guard, body)
        except Exception as error:
            said = guard.said_by_ledger
            obeyed = isinstance(error, delivery.orders)
            if error is said or obeyed or not isinstance(said, _LOST + _TROUBLE):
                raise
            raise said from error

    def _call(
        self, delivery: Delivery, tracked: TrackedLease, guard: Guard, body: Callable[[Guard], Any]
    ) -> Any:
        tracked.enter_body()
        error: BaseException | None = None
        try:
            if not delivery.policy.atomic:
                return body(guard)
            with guard.transaction():
                value = body(guard)
                if not guard.has_result:
                    guard.result = value
                return value
        except BaseException as raised:
            error = raised
            raise
        finally:
            tracked.leave_body()
            if tracked.lease.is_parents and delivery.queue is not None:
                _end_child(delivery, error)

    def _complete(self, delivery: Delivery, tracked: TrackedLease, guard: Guard, value: Any) -> Any:
        """DONE for a body that did not commit it, and its value for one that did."""
        if tracked.lease.is_parents:
            tracked.lease.check()  # raises: a forked child has done nobody's work
        if guard.has_result:
            value = guard.result
        claim = guard.claim
        if self.ledger is None or claim is None:
            # A body that got to its end is not run again, also if the lease was lost meanwhile:
            # with locks only there is nobody who could refuse the second run's effects.
            return value
        if not guard.completed:
            text = self._storable(delivery, value)
            if text is None and not tracked.at_lock_server:
                text = _NO_RESULT
            self.ledger.complete_alone(claim, text)
            guard.answered = True
            guard.note_completed()
        elif value is not None and not guard.has_result:
            text = self._storable(delivery, value)
            if text is not None:
                self._store_late(delivery, claim, text)
                guard.answered = True
        return value

    def _end_answer(self, delivery: Delivery, tracked: TrackedLease, guard: Guard) -> None:
        """Record that no result will come for a body that committed DONE and has ended.

        A lock server tells that by the lease; without one duplicates wait for the record.
        """
        claim = guard.claim
        told = guard.answered or guard.has_result or tracked.at_lock_server
        if guard.completed and not told and claim is not None and not tracked.lease.is_parents:
            self._store_late(delivery, claim, _NO_RESULT)

    def _store_late(self, delivery: Delivery, claim: Claim, text: str) -> None:
        assert self.ledger is not None  # noqa: S101
        try:
            self.ledger.store_result(claim, text)
        except TaskguardError as error:
            logger.warning("%s %s: DONE, result not stored: %s", delivery.task, delivery.key, error)

    def _storable(self, delivery: Delivery, value: Any) -> str | None:
        """The value as JSON; one that cannot be stored leaves DONE, and duplicates get None."""
        if value is None:
            return None
        try:
            return encode(value, self.codec, what="result", key=delivery.key)
        except ResultError as error:
            logger.warning("%s: DONE, but duplicates will get None. %s", delivery.task, error)
            return None

    def _note_completed(self, delivery: Delivery, admitted: Admitted) -> None:
        """DONE is committed, and with it the ledger's lease has ended."""
        tracked, claimed = admitted.tracked, admitted.claimed
        tracked.claim = None
        if claimed is not None:
            self._admission.emit(
                CompletedEvent,
                delivery,
                fence=claimed.claim.fence,
                attempt=claimed.attempt,
                held_s=self.clock.monotonic_s() - tracked.lease.taken_at_s,
            )

    # -- endings ------------------------------------------------------------------------------

    def _after_loss(
        self, delivery: Delivery, tracked: TrackedLease, guard: Guard, error: TaskguardError
    ) -> Outcome:
        """The lease or the commit was lost: the record answers, or the delivery is put off."""
        held_s = self.clock.monotonic_s() - tracked.lease.taken_at_s
        if isinstance(error, StaleTokenError):
            self._admission.emit(StaleRefused, delivery, fence=tracked.lease.fence, held_s=held_s)
        self._end_claim(tracked, self._uncount_crash)
        self._release(delivery, tracked)
        if self.ledger is not None and guard.claim is not None and delivery.work is not None:
            try:
                found = self.ledger.peek(self._admission.request(delivery, tracked.lease.owner))
            except _NO_LEDGER as unavailable:
                return self._defer_blindly(delivery, unavailable)
            if isinstance(found, Answer):
                return self._answer(delivery, found)
        if delivery.queue is None:
            raise error
        return self._defer(delivery, self._delay_s(delivery, None), str(error))

    def _after_trouble(
        self, delivery: Delivery, tracked: TrackedLease, error: TaskguardError
    ) -> Outcome:
        """The database failed, not the body: the delivery is put off; after several, FAILED."""
        found: list[State | None] = []

        def end(ledger: Ledger, claim: Claim) -> None:
            # Other threads have all connections, and will end.
            crowded = isinstance(error, NoConnectionError)
            if delivery.queue is None or claim.work is None or crowded:
                ledger.give_back(claim)  # a plain call gets the error; the round is not counted
            else:
                reason = f"{type(error).__name__}: {error}"[:_ERROR_CHARS]
                found.append(ledger.end_round(claim, reason, most=_MOST_ROUNDS))
                if found == [State.FAILED]:
                    self._ask_queue(delivery, claim)

        self._end_claim(tracked, end)
        self._release(delivery, tracked)
        if found != [State.FAILED]:
            return self._defer_blindly(delivery, error)
        held_s = self.clock.monotonic_s() - tracked.lease.taken_at_s
        kind = TransactionFailedError.__name__
        self._admission.emit(Failed, delivery, fence=tracked.lease.fence, error=kind, held_s=held_s)
        raise TransactionFailedError(
            f"{delivery.task} {delivery.key}: the body ran in {_MOST_ROUNDS} deliveries in a row, "
            f"and each time its transaction came to nothing, the last time so: {error} The work is "
            "FAILED. Mend what ends the transaction, then let it run again: taskguard work "
            f"requeue {delivery.work!r} --reason …",
            key=delivery.key,
            fence=tracked.lease.fence,
        ) from error

    @staticmethod
    def _uncount_crash(ledger: Ledger, claim: Claim) -> None:
        """Give the claim back if it stands; if it was taken over, uncount the crash."""
        if not ledger.give_back(claim):
            ledger.uncount_crash(claim)

    def _after_failure(
        self, delivery: Delivery, tracked: TrackedLease, guard: Guard, error: BaseException
    ) -> Outcome | None:
        """FAILED, unless DONE is committed; the exception goes on to the queue.

        An exception that came between COMMIT and its answer, as a time limit may, is no failure.
        Nor is one of a body whose work was superseded meanwhile: it was to end.
        """
        if guard.completed:
            return None
        text = _error_text(error)
        ended: list[bool] = []

        def end(ledger: Ledger, claim: Claim) -> None:
            ended.append(ledger.fail(claim, text))
            if ended[0]:
                self._ask_queue(delivery, claim)

        self._end_claim(tracked, end)
        if ended == [False] and guard.may_have_committed(error):
            done = self._committed_unheard(delivery, tracked, guard)
            if done is not None:
                return done
        obeyed = isinstance(error, delivery.orders)
        if ended == [False] and delivery.policy.newest is not None and not obeyed:
            outdated = self._superseded(delivery, tracked)
            if outdated is not None:
                return outdated
        self._emit_failed(delivery, tracked, error)
        return None

    def _superseded(self, delivery: Delivery, tracked: TrackedLease) -> Outcome | None:
        """The outcome, if the record says that a newer message took the work's place; else None."""
        assert self.ledger is not None  # noqa: S101
        try:
            found = self.ledger.peek(self._admission.request(delivery, tracked.lease.owner))
        except TaskguardError as error:
            logger.debug("%s: whether it was superseded got no answer: %s", delivery.key, error)
            return None
        if not isinstance(found, Answer) or found.decision is not Decision.OUTDATED:
            return None
        self._release(delivery, tracked)
        return self._answer(delivery, found)

    @staticmethod
    def _ask_queue(delivery: Delivery, claim: Claim) -> None:
        """Let the queue say whether FAILED work that keeps its place is to be retried."""
        if claim.request.strict and delivery.parking is not None:
            delivery.parking.failed(claim)

    def _committed_unheard(
        self, delivery: Delivery, tracked: TrackedLease, guard: Guard
    ) -> Completed | None:
        """The outcome, if the record says that this very holder completed the work; else None."""
        assert self.ledger is not None  # noqa: S101
        owner = tracked.lease.owner
        try:
            found = self.ledger.peek(self._admission.request(delivery, owner))
        except TaskguardError as error:
            logger.warning("%s: whether it is DONE got no answer: %s", tracked.lease.key, error)
            return None
        if not isinstance(found, Answer) or found.decision is not Decision.DONE:
            return None
        if found.owner != owner:
            return None
        text = found.result_json
        guard.answered = text is not None
        guard.note_committed_unheard()
        return Completed(None if text is None else self.codec.loads(text))

    def _after_exit(
        self, delivery: Delivery, tracked: TrackedLease, guard: Guard, error: BaseException
    ) -> None:
        """After a BaseException: a shutdown gives the work back, any other exit is a crash.

        So is a hard time limit, which comes as a shutdown does: the next body would exceed it, too.
        Where there is a queue, a cancelled body is its failure: queues take CancelledError for
        the end of their worker, and would deliver this message again and again.
        """
        if is_cancellation(error):
            self._after_failure(delivery, tracked, guard, error)
            if delivery.queue is not None:
                raise BodyCancelledError(
                    f"The body of {delivery.task} {delivery.key} was cancelled by itself "
                    "(asyncio.CancelledError). Catch that in the body, around its event loop.",
                    key=delivery.key,
                ) from error
        elif guard.completed:
            return
        elif is_shutdown(error) and delivery.timed_out is not None and delivery.timed_out():
            self._after_crash(delivery, tracked, error, timed_out=True)
        elif is_shutdown(error):
            # Also for a revoke and GreenletExit: another worker is to do the work, at once.
            self._end_claim(tracked, lambda ledger, claim: ledger.give_back(claim))
        else:
            self._after_crash(delivery, tracked, error)

    def _after_crash(
        self,
        delivery: Delivery,
        tracked: TrackedLease,
        error: BaseException,
        *,
        timed_out: bool = False,
    ) -> None:
        """The body ends its process, and would end the next one's: counted as a crash."""
        text = "the hard time limit was over" if timed_out else _error_text(error)
        # If the ledger does not answer, the lease runs out, which counts the same.
        self._end_claim(tracked, lambda ledger, claim: ledger.crash(claim, text), late=False)
        self._emit_failed(delivery, tracked, error)
        if timed_out:
            logger.warning(
                "%s %s: the hard time limit was over, and the queue ends this process: that counts "
                "as a crash. Give the task a longer limit, or a soft one that its body can catch.",
                delivery.task,
                delivery.key,
            )
            return
        logger.warning(
            "%s %s: the body raised %s, and nobody told this process to stop: that counts as a "
            "crash. Let the body return, or raise an Exception.",
            delivery.task,
            delivery.key,
            text,
        )

    def _emit_failed(self, delivery: Delivery, tracked: TrackedLease, error: BaseException) -> None:
        held_s = self.clock.monotonic_s() - tracked.lease.taken_at_s
        kind = type(error).__name__
        self._admission.emit(Failed, delivery, fence=tracked.lease.fence, error=kind, held_s=held_s)

    def _end_claim(
        self, tracked: TrackedLease, end: Callable[[Ledger, Claim], object], *, late: bool = True
    ) -> None:
        """End the ledger's lease, once; if the ledger does not answer, it runs out by itself.

        `late`: this is no crash, so the ledger is told so once it answers again.
        """
        claim, tracked.claim = tracked.claim, None
        self.watchdog.untrack(tracked)
        if claim is None or self.ledger is None or tracked.lease.is_parents:
            return
        try:
            end(self.ledger, claim)
        except TaskguardError as error:
            logger.warning("%s: ending the lease got no answer: %s", tracked.lease.key, error)
            if late:
                self._unreported.append(claim)

    def _report_late(self) -> None:
        """Tell the ledger of claims whose end it never heard of, so that they count as no crash.

        Other threads and greenlets may do this at the same time: each claim is taken by one.
        """
        if self.ledger is None:
            return
        self._admission.settle_late()
        while True:
            try:
                claim = self._unreported.popleft()
            except IndexError:
                return
            try:
                self._uncount_crash(self.ledger, claim)
            except TaskguardError:
                self._unreported.append(claim)
                return

    def _release(self, delivery: Delivery, tracked: TrackedLease) -> bool | None:
        """End the lock server's lease, after all else. Asked again it does nothing.

        False if the lock server knew of no such lease; None if it was not asked or did not tell.
        """
        if tracked.released:
            return None
        tracked.released = True
        self.watchdog.untrack(tracked)
        known = self.watchdog.release_lock(
            tracked,
            handed=tracked.decided_by_ledger,
            takes_hint=delivery.parking is not None and self.line.takes_hint(delivery),
        )
        held_s = self.clock.monotonic_s() - tracked.lease.taken_at_s
        self._admission.emit(Released, delivery, fence=tracked.lease.fence, held_s=held_s)
        return known

    def _guard(self, delivery: Delivery, admitted: Admitted) -> Guard:
        tracked = admitted.tracked
        return Guard(
            lease=tracked.lease,
            delivery=delivery,
            ledger=self.ledger,
            claimed=admitted.claimed,
            codec=self.codec,
            on_completed=functools.partial(self._note_completed, delivery, admitted),
            interrupt_by=tracked.interrupt_by,
        )


def _wait_s(delivery: Delivery) -> float:
    """How long a delivery waits for a taken key before it is put off, in seconds."""
    policy, queue = delivery.policy, delivery.queue
    # Whoever was called comes where the key is free, but for those who only look.
    wait_s = CALLED_WAIT_S if delivery.called else policy.wait_s if policy.busy == "wait" else 0.0
    if wait_s and holders_around(delivery.keys):
        return 0.0  # a body that holds a slot of its key does not wait for another one
    return min(wait_s, queue.longest_wait_s) if wait_s and queue is not None else wait_s


def _lets_more_in(delivery: Delivery) -> bool:
    """Whether the next one may begin by the time at which this one does, and not when it ends."""
    bounds = delivery.bounds
    return bounds is not None and bounds.limit > 1 and bounds.rate is not None


def _busy_error(delivery: Delivery, busy: Busy) -> KeyBusyError:
    after_s, owner = busy.retry_after_s, busy.owner
    limit = 1 if delivery.bounds is None else delivery.bounds.limit
    if busy.too_early:
        what = f"{delivery.key} is begun as often as its rate allows ({delivery.policy.rate})"
        when = f", and again in {after_s:.1f} s" if after_s else ""
    elif limit > 1:  # each of them holds a slot
        what, owner = f"{delivery.key} is held by {limit} deliveries", None
        when = f", one of them for at most {after_s:.1f} s" if after_s else ""
    else:
        what = f"{busy.key or delivery.key} is held by {_holder(owner)}"
        when = f", for at most {after_s:.1f} s" if after_s else ""
    nothing = "The lock was not taken; try" if delivery.is_lock else "Nothing was run; call"
    return KeyBusyError(
        f"{what}{when}. {nothing} again later, or wait for it with wait_s.",
        key=delivery.key,
        retry_after_s=after_s,
        owner=str(owner) if owner is not None and owner.is_ours else None,
    )


def _holder(owner: Owner | None) -> str:
    if owner is None:
        return "another delivery"
    if owner.process:
        return owner.described
    if owner.is_ours:
        return "a message that was sent from its line and has not arrived"
    return "a value that taskguard did not write"


def _error_text(error: BaseException) -> str:
    """What the record says of an error, whose `__str__` may fail or give nothing."""
    name = type(error).__name__
    try:
        said = f"{error}"
    except Exception as failed:  # noqa: BLE001  # anybody's code
        said = f"(str() of it raised {type(failed).__name__})"
    return f"{name}: {said}"[:_ERROR_CHARS]


def _end_child(delivery: Delivery, error: BaseException | None) -> NoReturn:
    """End a process that the body forked, and which leaves the body.

    What comes next (reporting a result, taking the next message) is for the parent alone.
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
    )
    os._exit(status & 0xFF)


def _has_room_beside(holders: list[Guard], delivery: Delivery) -> bool:
    """Whether `limit=` leaves a slot of the key beside those that the bodies around it hold."""
    bounds = delivery.bounds
    hold_slots = not any(set(delivery.keys).intersection(guard.keys) for guard in holders)
    return bounds is not None and hold_slots and len(holders) < bounds.limit


def _refuse_reentry(delivery: Delivery) -> None:
    holders = holders_around(delivery.keys)
    if holders and not _has_room_beside(holders, delivery):
        raise _already_held(delivery, holders[0])


def _already_held(delivery: Delivery, outer: Guard) -> KeyAlreadyHeldError:
    """The error of a call that would wait for the body or lock around it."""
    key = ", ".join(sorted(outer.held.intersection(delivery.keys)))
    holder = "the lock around it" if outer.is_lock else "the guarded body around it"
    if delivery.is_lock:
        fix = "A lock cannot be taken twice, not even to read: use the lease that is held"
    else:
        fix = (
            "Call the function's own body, or send it to a worker: with is_async=False or "
            "task_always_eager a message runs inside the body that sends it"
        )
    return KeyAlreadyHeldError(
        f"{delivery.task or 'lock()'} asks for {key}, which {holder} holds: it would wait for "
        f"itself. {fix}.",
        key=key,
    )
