"""The states of work in the line of its key, as data: which event moves which state to which.

`line` is a column of the work's record. It is NULL for work in no line. Guarantees nothing by
itself: the contract suite compares each statement of each ledger with `TRANSITIONS`, and the
simulation each change of its ledger.

Position and time are other columns. `rank` and `parked` are the position in the line. Until `due` a
message that was sent is expected. At `expires` it expires. `strict` is 1 if it keeps its position.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from taskguard.model.states import State

__all__ = ["IN_STATE", "IN_WORDS", "TRANSITIONS", "Event", "LineState", "is_transition"]


class LineState(StrEnum):
    """The state of work in the line of its key."""

    WAITING = "waiting"
    PROMOTED = "promoted"
    RESENT = "resent"
    EXPIRED = "expired"
    KEPT = "kept"
    SUPERSEDED = "superseded"


IN_WORDS: Mapping[LineState, str] = MappingProxyType(
    {
        LineState.WAITING: "the message is parked",
        LineState.PROMOTED: (
            "the message was sent; until `due` it is expected, and blocks the messages behind it"
        ),
        LineState.RESENT: (
            "the message did not arrive in time, and was sent again; it blocks no other message"
        ),
        LineState.EXPIRED: (
            "the message expired while it waited; it is sent to notify its caller, and blocks no "
            "other message"
        ),
        LineState.KEPT: (
            "strict: the message was sent, or the body has begun; it blocks the messages behind it "
            "until the work has ended"
        ),
        LineState.SUPERSEDED: (
            "a newer message took its position, or an operator ended the work; the message is "
            "sent to notify its caller"
        ),
    }
)

IN_STATE: Mapping[LineState, frozenset[State]] = MappingProxyType(
    {
        LineState.WAITING: frozenset({State.NEW}),
        LineState.PROMOTED: frozenset({State.NEW}),
        LineState.RESENT: frozenset({State.NEW}),
        LineState.EXPIRED: frozenset({State.NEW}),
        LineState.KEPT: frozenset({State.NEW, State.PROCESSING, State.FAILED}),
        LineState.SUPERSEDED: frozenset({State.FAILED, State.DONE}),  # FAILED is final
    }
)
"""The states that work may have in each state of its line."""


class Event(StrEnum):
    """An event that moves work in, into or out of a line."""

    ENQUEUE = "enqueue"
    PARK = "park"
    PROMOTE = "promote"
    EXPIRE = "expire"
    SEND_AGAIN = "send again"
    UNSEND = "unsend"
    CLAIM = "claim"
    KEEP = "keep"
    SUPERSEDE = "supersede"
    NOTIFY = "notify"
    LEAVE = "leave"
    END = "end"
    ABANDON = "abandon"
    REPLACE = "replace"
    REQUEUE = "requeue"
    DROP = "drop"


_NONE = (None,)
_WAITED = (LineState.WAITING, LineState.PROMOTED, LineState.RESENT, LineState.EXPIRED)
_NEW = (*_NONE, *_WAITED, LineState.KEPT)
_ALL = (*_NEW, LineState.SUPERSEDED)

_WAITS = (LineState.WAITING,)
_KEEPS = (LineState.KEPT,)
_SUPERSEDED = (LineState.SUPERSEDED,)
_LATE = (LineState.PROMOTED, LineState.RESENT, LineState.EXPIRED)

# Event, old states, new state, and when.
_MOVES: tuple[tuple[Event, tuple[LineState | None, ...], LineState | None, str], ...] = (
    (
        Event.ENQUEUE,
        (*_NONE, *_KEEPS),
        LineState.KEPT,
        "strict; the work is not on record, or FAILED and not final",
    ),
    (Event.ENQUEUE, _KEEPS, None, "FAILED; a message that is not strict replaces it"),
    (
        Event.PARK,
        _NEW,
        LineState.WAITING,
        (
            "NEW, or FAILED and not final; no other message of the work is stored; the line is not "
            "full. Work keeps a position that it has"
        ),
    ),
    (Event.PROMOTE, _WAITS, LineState.PROMOTED, "first in line; its key or a slot is free"),
    (Event.PROMOTE, _WAITS, LineState.KEPT, "first in line; its key or a slot is free; strict"),
    (Event.EXPIRE, _WAITS, LineState.EXPIRED, "`expires` is past"),
    (Event.EXPIRE, _WAITS, LineState.KEPT, "`expires` is past; strict"),
    (
        Event.SEND_AGAIN,
        _LATE,
        LineState.RESENT,
        "`due` is past; the message is sent again, and `sends` grows by 1",
    ),
    (
        Event.SEND_AGAIN,
        _KEEPS,
        LineState.KEPT,
        "`due` is past; the message is sent again, and `sends` grows by 1",
    ),
    (
        Event.SEND_AGAIN,
        _SUPERSEDED,
        LineState.SUPERSEDED,
        "`due` is past; the message is sent again, and `sends` grows by 1",
    ),
    (
        Event.UNSEND,
        _KEEPS,
        LineState.WAITING,
        "NEW; the message was enqueued and did not arrive, so it will be promoted in its turn",
    ),
    (Event.CLAIM, _NEW, None, "the claim is granted"),
    (Event.CLAIM, _NEW, LineState.KEPT, "the claim is granted; strict"),
    (Event.KEEP, _KEEPS, LineState.KEPT, "FAILED; its queue sent the message for a retry"),
    (
        Event.SUPERSEDE,
        (*_WAITED, *_KEEPS),
        LineState.SUPERSEDED,
        "NEW; a newer message of its task and key was parked or claimed",
    ),
    (
        Event.SUPERSEDE,
        _NEW,
        None,
        "its own delivery finds a newer message, or a newer message takes its key",
    ),
    (Event.NOTIFY, _SUPERSEDED, None, "a delivery of the message notifies its caller"),
    (Event.LEAVE, _KEEPS, None, "FAILED; its queue does not retry the message again"),
    (
        Event.END,
        _ALL,
        None,
        (
            "the work is completed, revoked or DEAD; or its message expired, and its caller was "
            "notified; or another record counts: the user's own row, or that of another id"
        ),
    ),
    (
        Event.ABANDON,
        (*_NONE, *_LATE, *_KEEPS, *_SUPERSEDED),
        None,
        (
            "`due` is past; the message cannot be sent, was sent too often, or was sent into the "
            "application's new namespace"
        ),
    ),
    (Event.REPLACE, _NEW, None, "NEW; a newer message of the work replaces the stored one"),
    (Event.REQUEUE, (*_NONE, *_KEEPS, *_SUPERSEDED), None, "DEAD or FAILED"),
    (
        Event.DROP,
        _NEW,
        LineState.SUPERSEDED,
        (
            "an operator drops the work, or marks it as done; it is NEW or has never begun, and "
            "its call is stored"
        ),
    ),
    (Event.DROP, _ALL, None, "an operator drops the work, or marks it as done; otherwise"),
)

TRANSITIONS: Mapping[tuple[LineState | None, Event, LineState | None], str] = MappingProxyType(
    {
        (old, event, new): when
        for event, olds, new, when in _MOVES
        for old in olds
        if old is not None or new is not None
    }
)
"""Each transition that a statement may make, and when: old state, event, new state."""


def is_transition(old: LineState | None, new: LineState | None, *events: Event) -> bool:
    """Return whether one of these events, or any if none is given, moves `old` to `new`.

    Work that stays in its state makes no transition.
    """
    return old == new or any((old, event, new) in TRANSITIONS for event in events or Event)
