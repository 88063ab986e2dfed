"""The state machine of work, as data, and the pure decision about who may claim it.

Every ledger's SQL is tested against this table. Guarantees: DONE and DEAD stay, unless a person
requeues the work or sets the user's own row back; a claim is decided from one
snapshot of the work and never from two readings of a clock.
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
    "Place",
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
    (State.PROCESSING, State.NEW): "given back: shutdown, a stale or unknown end",
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
    ): "revoked (final), its call cannot be sent, was in vain or has expired, the line of "
    "its key was full, or a newer message took its place (final)",
    (State.FAILED, State.PROCESSING): "claimed by a later delivery, unless final",
    (State.DEAD, State.NEW): "requeued by an operator",
    (State.FAILED, State.NEW): "requeued by an operator, or enqueued again unless final",
}

OUTDATED = "superseded by a newer message"
"""How the record of FAILED work begins its reason, where a newer message took its place. Final."""

EXPIRED = "its message expired"
"""What the record says of FAILED work whose message has expired before its turn."""

REPLACED_RETRIES = 2**31 - 1
"""Number of retries recorded of a message whose call was replaced: the most the column takes."""

BY_ROW: dict[tuple[State, State], str] = {
    (State.DONE, State.PROCESSING): "claimed after its own row was set back to new",
    (State.DEAD, State.PROCESSING): "claimed after its own row was set back to new",
    (State.DONE, State.NEW): "enqueued after its own row was set back to new",
    (State.DEAD, State.NEW): "enqueued after its own row was set back to new",
}
"""Further ones where the user's own row is the authority (`decide_by_row`).

Where a work has several records (`speaking_record`), the others become what that one becomes,
whatever they were: a claim writes all of them, and what a worker with a former guard has done is
copied by the next claim.
"""


class Decision(StrEnum):
    """What a claim does with work, given its row."""

    CREATE = "create"
    CLAIM = "claim"
    TAKEOVER = "takeover"
    SAME = "same"
    BUSY = "busy"
    DONE = "done"
    DEAD = "dead"
    BURY = "bury"
    REVOKED = "revoked"
    SUPERSEDED = "superseded"  # by a copy of the same message
    OUTDATED = "outdated"  # by a newer message of its task and key
    TOO_OLD = "too_old"
    MISMATCH = "mismatch"
    # Only where the user's own row is the authority (`decide_by_row`).
    AGAIN = "again"
    MISSING = "missing"
    INELIGIBLE = "ineligible"


class Place(StrEnum):
    """The state of the user's own row, as one task sees it."""

    NEW = "new"
    HELD = "held"  # PROCESSING, or where a burial left it, with the fence of this work's record
    DONE = "done"
    OTHER = "other"  # any other state; PROCESSING with the fence of somebody else
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
    outdated: bool = False  # of FAILED, final work: a newer message took its place

    def is_other_than(self, message: str, fingerprint: str | None) -> bool:
        """Whether another message claimed it, with another fingerprint; None fits all."""
        known = self.fingerprint is not None and fingerprint is not None
        return known and self.message != message and self.fingerprint != fingerprint


def is_superseded(
    row: WorkRow | None, *, message: str, number: tuple[int, int], recorded: tuple[int, int]
) -> bool:
    """Whether a live copy of this message with a higher number is known to exist.

    `recorded` is the message's number in this very work: an id may be used for two work items, and
    a deferral of the one is none of the other. A number is (retries, deferrals): a later retry
    comes after every deferral of an earlier one. By deferrals alone a retry could be dropped for a
    message that is itself dropped for the retry.
    """
    if number < recorded:
        return True
    return row is not None and row.message == message and number[0] < row.retries


def sent_at_us(sent_us: int | None, *, created_us: int) -> int:
    """When a message was sent, where a newer one takes an older one's place.

    `sent_us` is what it says itself, and `created_us` when its work came on record, by the
    database's clock. One that does not say, or was sent by a clock that is ahead, counts as sent
    when it came. So it is the same at each of its deliveries, and is never in the future.
    """
    return created_us if sent_us is None else min(sent_us, created_us)


def is_outdated(sent_us: int, *, others_us: Sequence[int | None]) -> bool:
    """Whether one of these others of its task and key was sent later.

    The others are the newest that has begun, and the newest that waits. Of two that were sent at
    the same moment the one that comes later is the newer one. That goes in no circle: the other
    one's record says for good that it is outdated.
    """
    return any(other is not None and sent_us < other for other in others_us)


def speaking_record(records: Sequence[tuple[State, int] | None]) -> int | None:
    """Which of a work's records a claim is decided by: its number; None if there are none.

    Each record is a state and a fence. The first is the work's own; the others stand under ids that
    it had before its guard was changed, where workers with the former guard look and write. Whoever
    held the key last has written last, so the record with the highest fence counts. Records with
    equal fences are of one claim; of those the first that is not PROCESSING counts, for a worker
    with the former guard buries and revokes the former record alone. But work that is DONE under
    any id is done: the former guard may have known as several what is one now, and one of several
    that is not done must not bring the effect back.
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
) -> Decision:
    """What a claim by `owner` does, by the first rule that fits."""
    if row is not None:
        if row.state is State.PROCESSING and row.owner == owner:
            return Decision.SAME
        if row.is_other_than(message, fingerprint):
            return Decision.MISMATCH
        if row.state is State.DONE:
            return Decision.DONE
        if row.state is State.DEAD:
            return Decision.DEAD
        if row.state is State.FAILED and row.final:
            return Decision.OUTDATED if row.outdated else Decision.REVOKED
    if is_superseded(row, message=message, number=number, recorded=recorded):
        return Decision.SUPERSEDED
    if row is None:
        return Decision.CREATE if may_create else Decision.TOO_OLD
    if row.state is not State.PROCESSING:
        return Decision.CLAIM
    if row.lease_until_us > now_us:
        return Decision.BUSY
    return Decision.BURY if row.crashes + 1 >= max_crashes else Decision.TAKEOVER


def decide_by_row(recorded: Decision, work: State | None, place: Place) -> Decision:
    """What a claim does where the user's own row is the authority about the state.

    It alone may leave DONE and DEAD: where the row's owner has set it back to NEW.

    `recorded` is what `decide()` says by the record alone, `work` the record's state. The first
    rule that fits decides.
    """
    ended = work in (State.DONE, State.DEAD)
    overdue = recorded in (Decision.SAME, Decision.TAKEOVER, Decision.BURY)
    if place is Place.NEW and (ended or overdue):
        return Decision.AGAIN  # the row's owner has set it back
    if recorded is Decision.MISMATCH:
        return recorded
    if place is Place.DONE:
        return Decision.DONE
    if recorded in (Decision.BUSY, Decision.REVOKED, Decision.SUPERSEDED, Decision.DONE):
        return recorded
    if place in (Place.NEW, Place.HELD):
        return recorded
    return Decision.MISSING if place is Place.MISSING else Decision.INELIGIBLE
