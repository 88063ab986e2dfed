"""Answers a delivery from the record of its work, if its body does not run.

Guarantees: a stored result is returned only for work that is DONE. A message is dropped only if it
never runs, and its caller can read that (`DROPPED`).
"""

from __future__ import annotations

import logging

from taskguard.clock import Clock
from taskguard.errors import (
    FingerprintMismatchError,
    MessageTooOldError,
    RowIneligibleError,
    RowMissingError,
    SupersededError,
    WorkDeadError,
    WorkFailedError,
    WorkRevokedError,
    WorkStillDeadError,
)
from taskguard.events import Dead, Duplicate, Events, StillDead
from taskguard.log_fields import said_of
from taskguard.model.claims import Answer
from taskguard.model.delivery import Answered, Codec, Delivery, Outcome
from taskguard.model.states import Decision
from taskguard.run.deferrals import Deferrals, drop
from taskguard.run.names import Names
from taskguard.run.parking import Line

__all__ = ["Answers"]

logger = logging.getLogger("taskguard")

_LATE_ANSWER_S = 3_600.0


class Answers:
    """Answers deliveries from records."""

    def __init__(
        self,
        *,
        line: Line,
        deferrals: Deferrals,
        codec: Codec,
        events: Events,
        clock: Clock,
        names: Names,
    ) -> None:
        self._line = line
        self._deferrals = deferrals
        self._codec = codec
        self._events = events
        self._clock = clock
        self._names = names

    def answer(self, delivery: Delivery, found: Answer) -> Outcome:
        """Return the outcome of a delivery that the record answers, or raise its error."""
        match found.decision:
            case Decision.SUPERSEDED:
                by = found.replaced_by
                reason = "superseded" if by is None else "replaced"
                return drop(self._events, delivery, reason, by=by)
            case Decision.OUTDATED:
                return self._outdated(delivery, found)
            case Decision.MISMATCH:
                raise self._mismatch(delivery, found)
            case Decision.MISSING | Decision.INELIGIBLE:
                return self._unfit(delivery, found)
            case Decision.TOO_OLD:
                raise _too_old(delivery)
            case Decision.DEAD | Decision.BURY:
                raise self._dead(delivery, found)
            case Decision.REVOKED:
                return self._revoked(delivery, found)
            case Decision.FAILED:
                raise self._failed(delivery, found)
            case _:
                return self._done(delivery, found)

    def _done(self, delivery: Delivery, found: Answer) -> Answered:
        if found.error is not None:  # an operator marked it as done
            self._notified(delivery, found)
        self._events.about(delivery, Duplicate, reason="done", age_s=found.age_s)
        late = found.age_s > _LATE_ANSWER_S and not found.same_message
        if late and not (delivery.by_message or delivery.by_run):
            logger.warning(
                "%s %s: a new message was answered with a result that is %.1f h old. If each "
                'message should run, say once_per="message". If a message should run once the '
                'former run has ended, say once_per="run".',
                delivery.task,
                delivery.key,
                found.age_s / 3_600,
                extra=said_of(delivery),
            )
        json_text = found.result_json
        value = None if json_text is None else self._codec.loads(json_text)
        return Answered(value, same_message=found.same_message)

    def _outdated(self, delivery: Delivery, found: Answer) -> Outcome:
        """Drop a message that a newer one superseded, so that it never runs."""
        if delivery.parking is not None:
            self._line.notified(str(delivery.work))
        if delivery.queue is not None:
            return drop(self._events, delivery, "outdated")
        self._events.about(delivery, Duplicate, reason="outdated")
        raise SupersededError(
            f"{delivery.task} {delivery.key}: {found.error}. It never runs.", key=delivery.key
        )

    def _failed(self, delivery: Delivery, found: Answer) -> WorkFailedError:
        self._events.about(delivery, Duplicate, reason="failed", age_s=found.age_s)
        fix = f"To let it run again: taskguard work requeue {found.recorded_as!r} --reason …"
        if found.later is not None:
            fix = f"It cannot be requeued, because a later run is open: {found.later}"
        return WorkFailedError(
            f"{delivery.task} {delivery.key}: the run of this message failed, and has no retry "
            f"left: {found.error}. Nothing was run. A new message begins the next run. {fix}.",
            key=delivery.key,
        )

    def _notified(self, delivery: Delivery, found: Answer) -> None:
        """Note that the caller of ended work is notified, if it sent this message."""
        if found.same_message:
            self._line.notified(found.recorded_as or str(delivery.work))

    def _revoked(self, delivery: Delivery, found: Answer) -> Outcome:
        self._notified(delivery, found)
        if delivery.queue is not None:
            return drop(self._events, delivery, "revoked")
        raise WorkRevokedError(f"{delivery.task} {delivery.key} was revoked.", key=delivery.key)

    def _mismatch(self, delivery: Delivery, found: Answer) -> FingerprintMismatchError:
        self._events.about(delivery, Duplicate, reason="mismatch")
        work = found.recorded_as or delivery.work
        return FingerprintMismatchError(
            f"{delivery.task} {delivery.key}: another message requested this work with other "
            "arguments (the task's fingerprint= differs). Nothing was run. If it is other work, "
            "name it by once_per=. If these arguments are the right ones and the work failed, "
            f"taskguard work requeue {work!r} --reason …, and send this message again.",
            key=delivery.key,
        )

    def _dead(self, delivery: Delivery, found: Answer) -> WorkDeadError:
        """Return the error of DEAD work. Deliveries after the first get WorkStillDeadError."""
        buried = found.decision is Decision.BURY
        kind = WorkDeadError if buried else WorkStillDeadError
        last = f" (the last: {self._names.told(found.error)})" if found.error else ""
        holders = "1 holder" if found.crashes == 1 else f"{found.crashes} holders"
        error = kind(
            f"{delivery.task} {delivery.key} is DEAD: {holders} vanished "
            f"while running it{last}. Find out why it kills its workers, then let it run again: "
            f"taskguard work requeue {(found.recorded_as or delivery.work)!r} --reason …",
            key=delivery.key,
            crashes=found.crashes,
        )
        if buried:
            self._events.about(delivery, Dead, crashes=found.crashes, error=error)
        else:
            self._events.about(delivery, StillDead, age_s=found.age_s, crashes=found.crashes)
        return error

    def _unfit(self, delivery: Delivery, found: Answer) -> Outcome:
        """Handle a user's row that is missing, or in another state, as `row=` says.

        A message is not deferred for longer than records are kept.
        """
        row = delivery.row
        assert row is not None  # noqa: S101
        declared, name = row.declared, row.declared.describe(row)
        missing = found.decision is Decision.MISSING
        how = declared.on_missing if missing else declared.on_ineligible
        reason = found.decision.value
        lasting = delivery.request(clock=self._clock).may_create
        if delivery.queue is not None and how == "defer" and lasting:
            state = "is missing" if missing else f"is {found.row_state!r}"
            return self._deferrals.defer(delivery, f"{name} {state}")
        if delivery.queue is not None and how == "skip":
            return drop(self._events, delivery, reason)
        self._events.about(delivery, Duplicate, reason=reason)
        if missing:
            raise RowMissingError(
                f"{delivery.task} {delivery.key}: there is no row {name}. Nothing was run. If its "
                'message may arrive before its row is committed, set on_missing="defer".',
                key=delivery.key,
            )
        raise RowIneligibleError(
            f"{delivery.task} {delivery.key}: {name} is {found.row_state!r}, and this task takes "
            f"it from {declared.new!r} to {declared.done!r}. Nothing was run. If you expect such "
            'messages, set on_ineligible="skip", or "defer" if the row will reach that state.',
            key=delivery.key,
            state=found.row_state,
        )


def _too_old(delivery: Delivery) -> MessageTooOldError:
    return MessageTooOldError(
        f"{delivery.task} {delivery.key}: this message is older than retention_s "
        f"({delivery.policy.retention_s:g} s) and the record of its work may have been "
        "purged, so it may have been done. Check, and send a new message if it was not.",
        key=delivery.key,
    )
