"""An operator's changes of work, as data and pure functions: drop, done, requeue, call.

The statements of every ledger, and the simulation's ledger, change work by these functions, over a
row that they have locked. Guarantees: work that a delivery runs under a live lease never changes. A
change that was made before, by an equal call, is not made again.

Read next: `ledger/operations/changes.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from taskguard.model.changes import Expected, Said
from taskguard.model.delivery import without_delay
from taskguard.model.history import Action, works_of
from taskguard.model.lease import Owner
from taskguard.model.line_states import LineState
from taskguard.model.records import StoredWork
from taskguard.model.states import OUTDATED, State, speaking_record

__all__ = [
    "FROM",
    "TO",
    "ChangedRow",
    "counts_instead",
    "first_position",
    "refusal",
    "sent_anew",
    "text_of",
    "twins_of",
    "was_made",
    "written",
]

FROM: Mapping[Action, frozenset[State]] = MappingProxyType(
    {
        Action.DROP: frozenset({State.NEW, State.FAILED, State.DEAD}),
        Action.DONE: frozenset({State.NEW, State.FAILED, State.DEAD}),
        Action.REQUEUE: frozenset({State.FAILED, State.DEAD}),
        Action.REQUEUE_LEFT: frozenset({State.PROCESSING}),
        Action.CALL: frozenset({State.NEW, State.PROCESSING}),
    }
)
"""The states from which each action may change work."""

TO: Mapping[Action, State] = MappingProxyType(
    {
        Action.DROP: State.FAILED,
        Action.DONE: State.DONE,
        Action.REQUEUE: State.NEW,
        Action.REQUEUE_LEFT: State.NEW,
    }
)
"""The state to which each action moves work. A call moves it to no other state."""

_DONE_BY = {
    Action.DROP: "dropped",
    Action.DONE: "marked as done",
    Action.REQUEUE: "requeued",
    Action.REQUEUE_LEFT: "requeued, because no worker ran it",
    Action.CALL: "called",
}
_NO_POSITION: dict[str, Any] = {"line": None, "parked": None, "expires": None}
_FREED: dict[str, Any] = {"owner": "", "lease_until": 0, "rounds": None, "flag": None}


class ChangedRow(StoredWork, Protocol):
    """The columns of work that decide what an operator may do to it. Times are in µs."""

    @property
    def attempts(self) -> int: ...
    @property
    def call(self) -> str | None: ...
    @property
    def due(self) -> int | None: ...
    @property
    def line(self) -> str | None: ...
    @property
    def rank(self) -> int | None: ...
    @property
    def parked(self) -> int | None: ...
    @property
    def created(self) -> int: ...


def text_of(action: Action, by: Said) -> str:
    """Return the text on record of work that an operator changed."""
    return f"{_DONE_BY[action]} by {by.actor}: {by.reason}"


def was_made(row: ChangedRow, action: Action, text: str) -> bool:
    """Return whether an equal call made this change, for example if its COMMIT got no answer."""
    return action in TO and row.state == TO[action].value and row.error == text


def refusal(
    row: ChangedRow, action: Action, *, now_us: int, gone_s: float, expected: Expected | None
) -> str:
    """Return why the action may not change this work, or "".

    Args:
        row: its row, locked.
        action: the action.
        now_us: the database's clock.
        gone_s: for how many seconds a lease must have expired, before its work counts as left.
        expected: what the operator saw of it. None: nothing.
    """
    changed = "" if expected is None else _changed_since(row, expected)
    if changed:
        return changed
    state = State(row.state)
    if state not in FROM[action]:
        return _wrong_state(row, action, state)
    if state is State.FAILED and row.final == 1 and action is Action.DROP:
        return f"it is FAILED for good already: {row.error}"
    if action is Action.REQUEUE and (row.error or "").startswith(OUTDATED):
        return f"it was {row.error}. It would be superseded again: send the call again"
    if action is Action.CALL and row.call is None:
        return "its call is not stored: send its message again"
    gone_us = int(gone_s * 1e6) if action is Action.REQUEUE_LEFT else 0
    return _lives(row, row.lease_until - now_us, gone_us) if state is State.PROCESSING else ""


def twins_of(row: Any, others: Sequence[Any], action: Action) -> list[Any]:
    """Return the other records of the claim that this row is of, which change with it.

    Only the record under the present id waits in a line, so their states may differ.
    """
    return [
        each
        for each in others
        if _is_of_one_claim(each, row)
        and (each.state == row.state or State(each.state) in FROM[action])
    ]


def sent_anew(row: Any, others: Sequence[Any], action: Action) -> list[Any]:
    """Return the records whose messages may be sent anew, with lower numbers than are recorded.

    Under any id a recorded number would make such a message an old copy. A stored call is sent with
    its numbers, unless its work is requeued.
    """
    records = [row, *(each for each in others if each.fence <= row.fence)]
    by_hand = all(each.call is None for each in records)
    anew = action is Action.REQUEUE or (action is Action.REQUEUE_LEFT and by_hand)
    return records if anew else []


def counts_instead(row: Any, others: Sequence[Any], action: Action) -> str:
    """Return why another record of this work decides its next claim, or "".

    `others` are its records under other ids. Workers with the former guard read only the former
    record. If the one that counts has ended for good, only a requeue is refused, which would have
    no effect.
    """
    ids, rows = works_of(row.also), {each.id: each for each in (row, *others)}
    if not ids or ids[0] != row.id:
        return ""
    known = [rows.get(each) for each in ids]
    number = speaking_record([each and (State(each.state), each.fence) for each in known])
    counts = known[number or 0]
    if counts is None or _is_of_one_claim(counts, row):
        return ""
    ended = counts.state == State.DONE.value or (
        counts.state == State.FAILED.value and counts.final
    )
    if ended and action is not Action.REQUEUE:
        return ""
    return f"its record under a former id counts: {counts.id!r} is {State(counts.state).value}"


def _is_of_one_claim(one: Any, other: Any) -> bool:
    return bool(one.fence == other.fence and one.started == other.started)


def _changed_since(row: ChangedRow, expected: Expected) -> str:
    seen = {"state": expected.state, "fence": expected.fence, "owner": expected.owner}
    for name, wanted in seen.items():
        found = getattr(row, name)
        if wanted is not None and found != wanted:
            return f"it has changed since: its {name} was {wanted!s}, and is {found!s}"
    return ""


def _lives(row: ChangedRow, left_us: int, gone_us: int) -> str:
    """Return why a holder may still run the work. `gone_us`: the time since its expiry."""
    if left_us > 0:
        return f"{_holder(row)} runs it, and its lease ends in {left_us / 1e6:.1f} s"
    if -left_us < gone_us:
        return (
            f"the lease of {_holder(row)} expired {-left_us / 1e6:.1f} s ago. Its work counts as "
            f"left {gone_us / 1e6:g} s after that"
        )
    return ""


def _wrong_state(row: ChangedRow, action: Action, state: State) -> str:
    allowed = " or ".join(each.value for each in State if each in FROM[action])
    if state is not State.PROCESSING:
        return f"it is {state.value}, and only {allowed} work is {_DONE_BY[action]}"
    return (
        f"it is PROCESSING by {_holder(row)}. If that worker is gone, release its key or requeue "
        "the work as left"
    )


def _holder(row: ChangedRow) -> str:
    return Owner.parse(row.owner).described


def written(row: ChangedRow, action: Action, *, now_us: int, text: str) -> dict[str, Any]:
    """Return the columns that the action writes. The line of its key goes on without the work."""
    if action is Action.CALL:
        return _called(row, now_us)
    if action is Action.REQUEUE_LEFT:
        return _given_back(row, now_us, text)
    to = TO[action]
    values = {**_FREED, "state": to.value, "since": None, "error": text, "sends": None}
    if to is State.NEW:
        values |= {"final": 0, "retries": 0, "crashes": 0, "crashed_owner": "", "finished": None}
        due = None if row.call is None else now_us
        return values | {"fingerprint": None, "due": due, **_NO_POSITION}
    values |= {"final": int(to is State.FAILED), "finished": now_us, **_NO_POSITION, "due": None}
    if to is State.DONE and row.result is None:
        values["result"] = "null"  # a duplicate does not wait for a result
    not_told = row.state == State.NEW.value or row.attempts == 0 or row.due is not None
    if row.call is not None and not_told:
        # Its message is acknowledged, was never published, or may be lost. It is sent, so that its
        # caller reads the end of the work. See `ledger/lines/newest.py`.
        position = row.created if row.parked is None else row.parked
        values |= {"line": LineState.SUPERSEDED.value, "parked": position, "due": now_us}
        values |= {"rank": row.rank or 0, "call": without_delay(row.call)}
    elif to is State.DONE:
        values["call"] = None
    return values


def _given_back(row: ChangedRow, now_us: int, text: str) -> dict[str, Any]:
    """Return the columns of work whose holder is gone. It counts as a crash.

    The lease ends now, so that no list says that it ended in 1970. Strict work keeps its position.
    """
    return {
        "state": State.NEW.value,
        "owner": "",
        "lease_until": now_us,
        "crashes": row.crashes + 1,
        "crashed_owner": row.owner,
        "flag": None,
        "since": None,
        "sends": None,
        "due": None if row.call is None else now_us,
        "error": text,
        **({"retries": 0} if row.call is None else {}),  # its message is sent by hand
    }


def first_position(head: Any, *, by_rank: bool) -> dict[str, int]:
    """Return a position before the first message of a line.

    `by_rank`: the message supersedes others of its task by the time at which it was sent, which is
    its position in its rank.
    """
    if by_rank:
        return {"rank": head.rank - 1}
    return {"rank": head.rank, "parked": head.parked - 1}


def _called(row: ChangedRow, now_us: int) -> dict[str, Any]:
    """Return the columns of work whose message is sent now, or in its turn if it is in a line."""
    in_turn = row.line == LineState.WAITING or row.call is None  # a copy under a former id
    return {"due": None if in_turn else now_us, "call": without_delay(row.call)}
