"""The state machine of work, as data, and the pure decision which delivery may claim it.

The SQL of every ledger is tested against this table. Guarantees: DONE and DEAD are final, unless an
operator requeues the work, or the user's own row is set back. A claim is decided from one snapshot
of the work, and never from two readings of a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from taskguard.values import value

__all__ = [
    "BY_ROW",
    "EXPIRED",
    "OUTDATED",
    "REPLACED_RETRIES",
    "TRANSITIONS",
    "Decision",
    "RowState",
    "State",
    "WorkRow",
    "decide",
    "decide_by_row",
    "is_outdated",
    "is_superseded",
    "sent_at_us",
    "speaking_record",
]


class State(StrEnum):
    """The state of work in the ledger."""

    NEW = "NEW"
    PROCESSING = "PROCESSING"
    DONE = "DONE"
    FAILED = "FAILED"
    DEAD = "DEAD"


TRANSITIONS: dict[tuple[State, State], str] = {
    (State.NEW, State.PROCESSING): "claimed for the first time, or again after it was given back",
    (
        State.PROCESSING,
        State.PROCESSING,
    ): "takeover: the holder's lease ran out, or its body ended the process: that is a crash",
    (
        State.PROCESSING,
        State.NEW,
    ): "given back: a shutdown, or its transaction was not committed; or an operator requeued work "
    "whose lease had run out, which counts as a crash",
    (State.PROCESSING, State.DONE): "completed, in the transaction of the effects",
    (
        State.PROCESSING,
        State.FAILED,
    ): "the body raised, its transaction failed too often, the work was revoked (final), its lease "
    "ran out and its call cannot be sent or has expired, or a newer message took its place (final)",
    (State.PROCESSING, State.DEAD): "max_crashes holders vanished",
    (
        State.NEW,
        State.FAILED,
    ): "revoked (final), its call cannot be sent, was sent too often or has expired, the line of "
    "its key was full, a newer message took its place (final), or an operator dropped it (final)",
    (State.FAILED, State.PROCESSING): "claimed by a later delivery, unless final",
    (State.DEAD, State.NEW): "requeued by an operator",
    (State.FAILED, State.NEW): "requeued by an operator, or enqueued again unless final",
    (State.FAILED, State.FAILED): "dropped by an operator (final)",
    (State.DEAD, State.FAILED): "dropped by an operator (final)",
    (State.NEW, State.DONE): "marked as done by an operator",
    (State.FAILED, State.DONE): "marked as done by an operator",
    (State.DEAD, State.DONE): "marked as done by an operator",
}

OUTDATED = "superseded by a newer message"
"""Beginning of the reason on record of FAILED work that a newer message superseded. Final."""

EXPIRED = "its message expired"
"""Reason on record of FAILED work whose message expired before its turn."""

REPLACED_RETRIES = 2**31 - 1
"""Retries on record of a message whose call was replaced: the maximum of the column."""

BY_ROW: dict[tuple[State, State], str] = {
    (State.DONE, State.PROCESSING): "claimed after its own row was set back to new",
    (State.DEAD, State.PROCESSING): "claimed after its own row was set back to new",
    (State.DONE, State.NEW): "enqueued after its own row was set back to new",
    (State.DEAD, State.NEW): "enqueued after its own row was set back to new",
}
"""Further transitions if the user's own row is the authority (`decide_by_row`).

If work has several records (`speaking_record`), the others get the state of that one, whatever
theirs was. A claim writes all of them, and copies what a worker with a former guard has done.
"""


class Decision(StrEnum):
    """The effect of a claim on work, given its row."""

    CREATE = "create"
    CLAIM = "claim"
    TAKEOVER = "takeover"
    SAME = "same"
    BUSY = "busy"
    DONE = "done"
    DEAD = "dead"
    BURY = "bury"
    REVOKED = "revoked"
    FAILED = "failed"  # a run whose last message has no retry left
    SUPERSEDED = "superseded"  # by a copy of the same message
    OUTDATED = "outdated"  # by a newer message of its task and key
    TOO_OLD = "too_old"
    MISMATCH = "mismatch"
    # Only where the user's own row is the authority (`decide_by_row`).
    AGAIN = "again"
    MISSING = "missing"
    INELIGIBLE = "ineligible"


_BEFORE_ROW = frozenset(
    {
        Decision.BUSY,
        Decision.REVOKED,
        Decision.FAILED,
        Decision.SUPERSEDED,
        Decision.DONE,
    }
)


class RowState(StrEnum):
    """The state of the user's own row, as one task sees it."""

    NEW = "new"
    HELD = "held"  # PROCESSING, or where a burial left it, with the fence of this work's record
    DONE = "done"
    OTHER = "other"  # any other state, or PROCESSING with the fence of another holder
    MISSING = "missing"


@value
class WorkRow:
    """The columns of a work that a claim is decided by. Times are µs of the database's clock."""

    state: State
    final: bool
    owner: str
    fence: int
    lease_until_us: int
    message: str
    retries: int
    crashes: int
    fingerprint: str | None = None
    outdated: bool = False  # FAILED and final because a newer message superseded it
    gave_up: bool = False  # FAILED and final because the message of its last attempt has no retry

    def is_other_than(self, message: str, fingerprint: str | None) -> bool:
        """Return whether another message with another fingerprint claimed it. None fits all."""
        known = self.fingerprint is not None and fingerprint is not None
        return known and self.message != message and self.fingerprint != fingerprint


def is_superseded(
    row: WorkRow | None, *, message: str, number: tuple[int, int], recorded: tuple[int, int]
) -> bool:
    """Return whether a live copy of this message with a higher number is known to exist.

    `recorded` is the message's number in this very work. One id may be used for two works, and a
    deferral of one is none of the other. A number is (retries, deferrals): a later retry comes
    after every deferral of an earlier one. With deferrals alone, a retry and an earlier copy could
    each be dropped in favour of the other.
    """
    if number < recorded:
        return True
    return row is not None and row.message == message and number[0] < row.retries


def sent_at_us(sent_us: int | None, *, created_us: int) -> int:
    """Return when a message was sent, to compare messages that supersede each other.

    `sent_us` is the message's own time, and `created_us` the time when its work came on record, by
    the database's clock. A message without a time, or with a time in the future, counts as sent
    when its work came on record. So the result is the same at each delivery.
    """
    return created_us if sent_us is None else min(sent_us, created_us)


def is_outdated(sent_us: int, *, others_us: Sequence[int | None]) -> bool:
    """Return whether one of these other messages of its task and key was sent later.

    The others are the newest message that has begun, and the newest that waits. If two messages
    were sent at the same moment, the one that comes later is newer. They cannot outdate each
    other, because the first one's record says finally that it is outdated.
    """
    return any(other is not None and sent_us < other for other in others_us)


def speaking_record(records: Sequence[tuple[State, int] | None]) -> int | None:
    """Return the number of the record that decides a claim, or None if there are no records.

    Each record is a state and a fence. The first has the work's own id. The others have ids from
    before its guard was changed, which workers with the former guard read and write.

    * The record with the highest fence counts, because the last holder wrote it.
    * Records with equal fences are of one claim. The first that is not PROCESSING counts, because a
      worker with the former guard buries and revokes only the former record.
    * Work that is DONE under any id is done. One work may have been several under the former guard.
      If one of those is not done, the effect must not be repeated.
    """
    known = [(number, each) for number, each in enumerate(records) if each is not None]
    if not known:
        return None

    def newest(one: tuple[int, tuple[State, int]]) -> tuple[bool, int, bool, int]:
        number, (state, fence) = one
        return state is State.DONE, fence, state is not State.PROCESSING, -number

    return max(known, key=newest)[0]


def decide(  # noqa: PLR0911  # one rule, one return: this is the table itself
    row: WorkRow | None,
    *,
    owner: str,
    message: str,
    number: tuple[int, int],
    recorded: tuple[int, int],
    now_us: int,
    max_crashes: int,
    may_create: bool,
    fingerprint: str | None = None,
    resumes: bool = False,
) -> Decision:
    """Return what a claim by `owner` does, by the first rule that fits.

    `resumes`: the message was sent again to resume a run that gave up.
    """
    if row is not None:
        if row.state is State.PROCESSING and row.owner == owner:
            return Decision.SAME
        if row.is_other_than(message, fingerprint):
            return Decision.MISMATCH
        if row.state is State.DONE:
            return Decision.DONE
        if row.state is State.DEAD:
            return Decision.DEAD
        if row.state is State.FAILED and row.final and not (row.gave_up and resumes):
            return _final(row)
    if is_superseded(row, message=message, number=number, recorded=recorded):
        return Decision.SUPERSEDED
    if row is None:
        return Decision.CREATE if may_create else Decision.TOO_OLD
    if row.state is not State.PROCESSING:
        return Decision.CLAIM
    if row.lease_until_us > now_us:
        return Decision.BUSY
    return Decision.BURY if row.crashes + 1 >= max_crashes else Decision.TAKEOVER


def _final(row: WorkRow) -> Decision:
    if row.gave_up:
        return Decision.FAILED
    return Decision.OUTDATED if row.outdated else Decision.REVOKED


def decide_by_row(recorded: Decision, work: State | None, row_state: RowState) -> Decision:
    """Return what a claim does if the user's own row is the authority about the state.

    Only such a claim can leave DONE and DEAD, after the row was set back to NEW.

    `recorded` is the answer of `decide()` for the record alone, and `work` the record's state. The
    first rule that fits decides.
    """
    ended = work in (State.DONE, State.DEAD)
    overdue = recorded in (Decision.SAME, Decision.TAKEOVER, Decision.BURY)
    if row_state is RowState.NEW and (ended or overdue):
        return Decision.AGAIN  # the row was set back
    if recorded is Decision.MISMATCH:
        return recorded
    if row_state is RowState.DONE:
        return Decision.DONE
    if recorded in _BEFORE_ROW:
        return recorded
    if row_state in (RowState.NEW, RowState.HELD):
        return recorded
    return Decision.MISSING if row_state is RowState.MISSING else Decision.INELIGIBLE
